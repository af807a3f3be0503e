"""The page: one HTML frame, served with its files beside it or exported with everything inside it."""

import base64
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from agentrl_core.engine_kit.images import data_url
from agentrl_core.engine_kit.media import parts_of
from agentrl_viewer.index import Filter
from agentrl_viewer.run import Run

MODULES = ("data", "dom", "curves", "configs", "list", "trajectory", "clock", "lanes", "waits", "time", "app")
"""The ES modules, each imported as ``viewer/<name>``; the last one starts the page."""
IMAGE_BYTES = 32 * 2**20
"""Of the images of a run in an exported file; its page shows the names of the others."""
_KINDS = {".js": "text/javascript", ".css": "text/css"}


@cache
def _text(name: str) -> str:
    return files("agentrl_viewer").joinpath("static", name).read_text(encoding="utf-8")


@cache
def _names() -> frozenset[str]:
    return frozenset(file.name for file in files("agentrl_viewer").joinpath("static").iterdir())


def static(path: str) -> tuple[str, bytes] | None:
    """Content type and content of ``static/<name>``; None for anything but our own scripts and styles."""
    folder, _, name = path.partition("/")
    kind = _KINDS.get("." + name.rpartition(".")[2])
    if folder != "static" or kind is None or name not in _names():
        return None
    return kind, _text(name).encode()


def policy(nonce: str) -> str:
    """The content security policy of the served page: our files, our server, nothing else."""
    return (
        f"default-src 'none'; script-src 'self' 'nonce-{nonce}'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def served(nonce: str) -> bytes:
    """The page that loads its files from the server."""
    imports = {f"viewer/{name}": f"./static/{name}.js" for name in MODULES}
    head = '<link rel="stylesheet" href="static/uPlot.min.css"><link rel="stylesheet" href="static/style.css">'
    scripts = (
        '<script src="static/uPlot.iife.min.js"></script>'
        f'<script type="importmap" nonce="{nonce}">{_safe({"imports": imports})}</script>'
        '<script type="module" src="static/app.js"></script>'
    )
    return _frame(head, scripts)


def exported(runs: Sequence[Run], count: int) -> tuple[bytes, int, int]:
    """The page with everything inside it, how many trajectories it holds, and how many were left out.

    Args:
        runs: already refreshed.
        count: trajectories to include, shared out over the runs: half of them problems, half of them the newest.
    """
    data: dict[str, Any] = {"runs": []}
    kept, total = 0, 0
    for run in runs:
        facets = run.index.facets()
        chosen = _chosen(run, count // len(runs))
        steps = {(row["split"], row["step"]) for row in chosen}
        # Each row of a trajectory is listed, and the trajectory has all of them: it is in the file once.
        names = [(row["split"], row["step"], row["trajectory"]) for row in chosen]
        first = dict(zip(reversed(names), reversed(chosen), strict=True))
        places = {name: place for place, name in enumerate(first)}
        found = [run.trajectory(row["split"], row["step"], row["line"]) for row in first.values()]
        held = [each for each in found if each is not None]
        data["runs"].append({
            "summary": run.summary(),
            "series": run.series(),
            "config": run.flat_config(),
            "facets": facets,
            "list": chosen,
            "trajectories": held,
            "images": _images(run, [row for each in held for row in each["rows"]]),
            "places": [places[name] for name in names],
            "timelines": {f"{split}/{step}": run.timeline(split, step) for split, step in sorted(steps)[-3:]},
        })  # fmt: skip
        kept, total = kept + len(chosen), total + facets["total"]
    data["left_out"] = total - kept
    imports = {f"viewer/{name}": _data_url(_text(f"{name}.js")) for name in MODULES}
    head = (
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src data: 'nonce-page'; "
        f"style-src 'unsafe-inline'; img-src data:\"><style>{_text('uPlot.min.css')}{_text('style.css')}</style>"
    )
    scripts = (
        f'<script type="application/json" id="data">{_safe(data)}</script>'
        f'<script nonce="page">{_text("uPlot.iife.min.js")}</script>'
        f'<script type="importmap" nonce="page">{_safe({"imports": imports})}</script>'
        '<script type="module" nonce="page">import "viewer/app";</script>'
    )
    return _frame(head, scripts), kept, total - kept


def _chosen(run: Run, count: int) -> list[dict[str, Any]]:
    """Problems, then the newest; whole groups are not promised."""
    chosen: dict[tuple[str, int, int], dict[str, Any]] = {}
    for order, limit in (("failed", count // 2), ("newest", count)):
        for row in run.index.listed(Filter(order=order), 0, limit)["rows"]:
            if len(chosen) < count and (order != "failed" or row["problem"]):
                chosen[row["split"], row["step"], row["line"]] = row
    return [chosen[key] for key in sorted(chosen, key=lambda key: (-key[1], key[0], key[2]))]


def _images(run: Run, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Images of messages by name, as data URLs, the first ones up to :data:`IMAGE_BYTES`."""
    names = dict.fromkeys(name for row in rows for message in row.get("messages") or [] for name in parts_of(message))
    kept: dict[str, str] = {}
    left = IMAGE_BYTES
    for name in names:
        data = run.image(name)
        if data is not None and len(data) <= left:
            left -= len(data)
            kept[name] = data_url(name, data)
    return kept


def _safe(content: Any) -> str:
    """JSON that cannot end the script element that holds it."""
    text = json.dumps(content, default=str).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _data_url(script: str) -> str:
    return "data:text/javascript;base64," + base64.b64encode(script.encode()).decode()


def _frame(head: str, scripts: str) -> bytes:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>agentrl view</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,">{head}</head><body><div id="app"></div>{scripts}</body></html>'
    ).encode()
