"""The rollout's fixtures, for what runs below it."""

from tests.rollout.conftest import installed, make_rollout, make_row, make_session, make_slot, renderer

__all__ = ["installed", "make_rollout", "make_row", "make_session", "make_slot", "renderer"]
