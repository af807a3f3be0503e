"""``agentrl view``."""

import threading
from pathlib import Path
from typing import Annotated

import typer

from agentrl_core.api import DataError

app = typer.Typer(add_completion=False)


@app.command()
def view(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories, finished or live.", show_default=False)
    ],
    export: Annotated[
        Path | None, typer.Option(help="Write one HTML file that works without a server, and exit.", show_default=False)
    ] = None,
    trajectories: Annotated[
        int, typer.Option(min=1, help="Number of trajectories in the exported file: problems and the newest.")
    ] = 200,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0: any free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in the default browser.")] = True,
) -> None:
    """Look at runs: curves, trajectories, tokens and times, as a page on this machine or as one file."""
    from agentrl_viewer.page import exported
    from agentrl_viewer.run import Run
    from agentrl_viewer.server import Viewer

    opened = [Run(path, name) for path, name in zip(runs, _names(runs), strict=True)]
    if export is not None:
        for run in opened:
            run.index.refresh()
            for line in run.damage():
                typer.echo(f"warning: {line}", err=True)
        content, kept, left_out = exported(opened, trajectories)
        export.write_bytes(content)
        typer.echo(f"{export}: {kept} trajectories, {left_out} left out (--trajectories), {len(content) / 1e6:.1f} MB")
        return
    with Viewer(opened, port) as viewer:
        typer.echo(f"{viewer.url}\nPress Ctrl-C to stop.")
        if browser:
            import webbrowser

            webbrowser.open(viewer.url)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return


def _names(runs: list[Path]) -> list[str]:
    """The directories' names, with their parents where two are equal."""
    for path in runs:
        if not path.is_dir() or not any((path / name).exists() for name in ("metrics.jsonl", "rollouts", "state.json")):
            raise DataError(f"{path}: no run directory; give one such as runs/calculator (`agentrl runs list`)")
    paths = [path.resolve() for path in runs]
    if len(set(paths)) < len(paths):
        raise DataError("a run directory is given twice")
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
