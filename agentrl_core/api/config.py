"""How a plugin declares its options: a dataclass whose fields carry help, units and bounds.

    @dataclass
    class CalculatorConfig:
        max_digits: int = option(12, help="longest number in a result", unit="digits", ge=1)
        obsolete = {"rounding": "Results are exact."}

The walker of :mod:`agentrl_core.config` checks a YAML file against such classes and reports every problem at once.
``obsolete`` is no option. It names those of earlier versions that change nothing any more, and why: a run that still
has one loads, with a warning.
"""

from dataclasses import MISSING, dataclass, field
from typing import Any


@dataclass(frozen=True)
class OptionInfo:
    """What is known about one option in addition to its type and default.

    ``ge``/``gt``/``le``/``lt`` bound numbers, ``choices`` lists the allowed values, ``unit`` is printed next to the
    type, ``path`` says that a relative value is relative to the config file ("file", or "" for no path). ``code``: a
    plugin's option names an object, as ``package.module:object`` or ``path/to/file.py:object`` relative to the config
    file. The factory gets the object of a file itself instead of its name, and the file is in the lock. ``hub``: a path
    that is no directory may also name a model of the Hugging Face hub.
    """

    help: str = ""
    unit: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[Any, ...] = ()
    path: bool = False
    code: bool = False
    hub: bool = False


def option(
    default: Any = MISSING,
    *,
    default_factory: Any = MISSING,
    help: str = "",
    unit: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: tuple[Any, ...] = (),
    path: bool = False,
    code: bool = False,
    hub: bool = False,
) -> Any:
    """A dataclass field with an :class:`OptionInfo`. Without a default the option is required."""
    info = OptionInfo(help=help, unit=unit, ge=ge, gt=gt, le=le, lt=lt, choices=choices, path=path, code=code, hub=hub)
    metadata = {"agentrl": info}
    return field(default=default, default_factory=default_factory, metadata=metadata)


@dataclass
class NoConfig:
    """For plugins without options."""
