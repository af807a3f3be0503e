"""For all tests of this tree: none depends on how busy the machine is."""

from contextlib import suppress

# Not in the environments of engines.
with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")
