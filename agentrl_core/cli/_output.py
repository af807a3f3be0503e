"""How the command line speaks of errors: one red head, the message, no traceback unless asked for."""

import errno
import sys
import traceback

from rich.console import Console
from rich.text import Text

from agentrl_core.api.errors import ConfigError, PluginError

_EXTRA_OF_MODULE = {
    "psutil": "train",
    "ray": "ray",
    "safetensors": "train",
    "tensordict": "train",
    "torch": "train",
    "transformers": "train",
}

_DISK = {
    errno.ENOSPC: "Make room; `agentrl train … --resume` continues the run",
    errno.EDQUOT: "Make room; `agentrl train … --resume` continues the run",
    errno.EROFS: "Choose another directory",
    errno.EACCES: "Check the rights there, or choose another directory",
}
_WIDTH_OF_A_PIPE = 250


def console_of_stdout() -> Console:
    """For tables: as wide as the terminal, and without folding where the output goes elsewhere."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE)


def exit_code(error: Exception) -> int:
    """2 where the user's input is at fault (configuration, choice of plugins), else 1."""
    return 2 if isinstance(error, ConfigError | PluginError) else 1


def print_error(error: Exception, verbose: bool) -> None:
    """The message on stderr, after the traceback if ``verbose``."""
    if verbose:
        traceback.print_exception(error, file=sys.stderr)
    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble(("error: ", "bold red"), _message(error)), soft_wrap=True)


def is_missing_extra(error: ModuleNotFoundError) -> bool:
    """Whether the module comes with an extra of agentrl-core that is not installed."""
    return _root(error) in _EXTRA_OF_MODULE


def is_about_the_disk(error: Exception) -> bool:
    """Whether a file could not be written for a reason that the user can remove."""
    return isinstance(error, OSError) and error.errno in _DISK


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in _DISK:
        return f"{error.filename or 'a file'}: {(error.strerror or str(error)).lower()}. {_DISK[error.errno]}"
    if isinstance(error, ModuleNotFoundError):
        extra = _EXTRA_OF_MODULE[_root(error)]
        return f"this needs {_root(error)}, which is not installed: pip install 'agentrl-core[{extra}]'"
    return str(error)


def _root(error: ModuleNotFoundError) -> str:
    return (error.name or "").partition(".")[0]
