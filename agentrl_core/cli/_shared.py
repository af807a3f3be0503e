"""What commands share: arguments, tables, logging, and how errors are shown."""

import errno
import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeGuard

import typer

from agentrl_core.api.errors import AgentRLError, ConfigError, DataError, PluginError, TemplateError
from agentrl_core.cli.groups import OpenGroup

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Values that replace those of the file.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_TRAINING = "psutil", "safetensors", "tensordict", "torch", "transformers"
_EXTRA_OF_MODULE = {"ray": "ray", **dict.fromkeys(_TRAINING, "train")}
_DISK_FULL = errno.ENOSPC, errno.EDQUOT
_FILE_ERRORS = {
    errno.ENOSPC: "Make room; `agentrl train … --resume` continues the run",
    errno.EDQUOT: "Make room; `agentrl train … --resume` continues the run",
    errno.EROFS: "Choose another directory",
    errno.EACCES: "Check the rights there, or choose another directory",
    errno.EPERM: "Check the rights there, or choose another directory",
    errno.EIO: "Check the disk",
    errno.ENOENT: "Check the path",
    errno.ENOTDIR: "Move away the file that is in the directory's place",
    errno.EEXIST: "Move it away, or choose another path",
    errno.EISDIR: "Move away the directory that is in the file's place",
    errno.ELOOP: "Replace the symbolic link, which leads back to itself",
    errno.ENAMETOOLONG: "Choose a shorter path",
    errno.EINVAL: "Move away what is in the file's place",
    errno.ENXIO: "Move away what is in the file's place",
}
_WIDTH_OF_A_PIPE = 250


def command_group(help_text: str | None = None) -> typer.Typer:
    """A group of subcommands, even where it has only one; packages may add to it."""
    app = typer.Typer(cls=OpenGroup, no_args_is_help=True, add_completion=False, help=help_text)
    app.callback()(lambda: None)
    return app


def console_of_stdout() -> "Console":
    """A console for tables: as wide as the terminal, and wide enough not to fold where the output is a pipe.

    Brackets have no meaning, because cells hold names and messages of others.
    """
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE
    return Console(highlight=False, markup=False, emoji=False, width=width)


def new_table(*columns: str, right: Sequence[str] = (), title: str | None = None) -> "Table":
    """A table without lines, which never cuts a cell. Cells of the columns ``right`` are aligned to the right."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def warn(line: str) -> None:
    """Print a warning on stderr, so that JSON on stdout stays whole."""
    typer.echo(f"warning: {line}", err=True)


def say(line: str) -> None:
    """Print a line that can be copied: it isn't wrapped, and brackets and names between colons have no meaning."""
    import rich

    rich.get_console().print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


class _LineHandler(logging.Handler):
    """Writes messages to a pipe or file, where nothing should wrap them."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def set_up_logging(verbose: bool = False, stderr: bool = False) -> None:
    """Show agentrl's messages, and errors of other packages; a run's ``log.txt`` has their warnings too.

    Messages go through the console that also draws the live view, so that neither breaks the other's lines.

    Args:
        verbose: show agentrl's debug messages and the warnings of other packages too.
        stderr: leave standard output to a command that prints JSON.
    """
    import rich
    from rich.logging import RichHandler

    console = rich.get_console()
    console.stderr = stderr
    handler: logging.Handler = _LineHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, rich_tracebacks=False, log_time_format="%H:%M:%S")
    handler.addFilter(lambda record: verbose or record.name.startswith("agentrl") or record.levelno >= logging.ERROR)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)
    # Python's warnings are written to stderr otherwise, over the live view and not into ``log.txt``.
    logging.captureWarnings(True)
    logging.getLogger("agentrl_core").setLevel(logging.DEBUG if verbose else logging.INFO)


def log_transformers() -> None:
    """Log what transformers logs, and nothing of its progress bars: it writes to stderr by itself, over the live view
    and not into ``log.txt``."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    transformers_logging.disable_progress_bar()


@contextmanager
def reading_input() -> Iterator[None]:
    """Before a run, data and templates are the user's input: their errors are errors of the configuration.

    Raises:
        ConfigError: in the place of DataError and TemplateError.
    """
    try:
        yield
    except (DataError, TemplateError) as error:
        raise ConfigError(str(error)) from error


def is_for_the_user(error: Exception) -> bool:
    """Whether a message is enough: an error of agentrl, a missing extra, or a file that cannot be read or written."""
    return (
        isinstance(error, AgentRLError)
        or (isinstance(error, ModuleNotFoundError) and _root(error) in _EXTRA_OF_MODULE)
        or _is_of_a_file(error)
    )


def _is_of_a_file(error: Exception) -> TypeGuard[OSError]:
    # Python names no file where flushing to a full disk failed.
    return isinstance(error, OSError) and error.errno in (_FILE_ERRORS if error.filename else _DISK_FULL)


def exit_code(error: Exception) -> int:
    """2 for an error in the user's input (configuration, choice of plugins), else 1."""
    return 2 if isinstance(error, ConfigError | PluginError) else 1


def print_error(error: Exception, verbose: bool) -> None:
    """Print the message on stderr, after the traceback if ``verbose``."""
    from rich.console import Console
    from rich.text import Text

    if verbose:
        traceback.print_exception(error, file=sys.stderr)
    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble(("error: ", "bold red"), message(error)), soft_wrap=True)


def message(error: Exception) -> str:
    """What an error says to the user."""
    if _is_of_a_file(error):
        reason = (error.strerror or str(error)).lower()
        return f"{error.filename or 'a file'}: {reason}. {_FILE_ERRORS[error.errno or 0]}"
    if isinstance(error, ModuleNotFoundError):
        extra = _EXTRA_OF_MODULE[_root(error)]
        return f"this needs {_root(error)}, which is not installed: pip install 'agentrl-core[{extra}]'"
    text = str(error) if is_for_the_user(error) else f"{type(error).__name__}: {error}"
    # An error of the command line says more than its text.
    said = getattr(error, "format_message", lambda: text)()
    return "\n".join([said, *getattr(error, "__notes__", ())])


def _root(error: ModuleNotFoundError) -> str:
    return (error.name or "").partition(".")[0]
