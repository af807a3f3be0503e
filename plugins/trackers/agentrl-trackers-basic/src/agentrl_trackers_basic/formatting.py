"""Numbers and short series as a person reads them at a glance."""

import math
from collections.abc import Sequence

_LEVELS = "▁▂▃▄▅▆▇█"


def figure(value: float) -> str:
    """A metric with few digits: ``0.41``, ``34.2``, ``1234``, ``3.1e-05``."""
    if not math.isfinite(value) or value == 0:
        return f"{value:.3g}"
    magnitude = abs(value)
    if magnitude >= 100:
        return f"{value:.0f}" if magnitude < 1e6 else f"{value:.2e}"
    if magnitude >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if magnitude >= 0.01 else f"{value:.1e}"


def compact(value: float) -> str:
    """A count: ``950``, ``12.1k``, ``3.4M``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def percent(share: float) -> str:
    """A share of 1: ``61%``."""
    return f"{share:.0%}"


def duration(seconds: float) -> str:
    """``8s``, ``1m12s``, ``2h05m``, ``3d04h``."""
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes_rest = divmod(minutes, 60)
    days, hours_rest = divmod(hours, 24)
    if days:
        return f"{days}d{hours_rest:02d}h"
    if hours:
        return f"{hours}h{minutes_rest:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def sparkline(values: Sequence[float], width: int, low: float | None = None, high: float | None = None) -> str:
    """The series as bars of eight heights, at most ``width`` of them; a longer series is averaged in equal parts.

    ``low`` and ``high`` are the values of the lowest and the highest bar; None: those of the series.
    """
    finite = [value for value in values if math.isfinite(value)]
    # Sums and differences of the largest floats are infinite.
    scale = max((abs(value) for value in (*finite, low or 0.0, high or 0.0)), default=0.0) or 1.0
    finite = [value / scale for value in finite]
    bars = min(width, len(finite))
    edges = [len(finite) * bar // bars for bar in range(bars + 1)] if bars else []
    means = [sum(finite[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    if not means:
        return ""
    bottom = min(means) if low is None else low / scale
    top = max(means) if high is None else high / scale
    if top <= bottom:
        return _LEVELS[3] * len(means)
    last = len(_LEVELS) - 1
    levels = (round((mean - bottom) / (top - bottom) * last) for mean in means)
    return "".join(_LEVELS[min(max(level, 0), last)] for level in levels)
