"""Numbers and sparklines."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl_trackers_basic.formatting import compact, duration, figure, percent, sparkline


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.414, "0.41"), (-0.5, "-0.50"), (34.17, "34.2"), (1234.5, "1234"), (0.00031, "3.1e-04"),
     (2.5e7, "2.50e+07"), (float("nan"), "nan")],
)  # fmt: skip
def test_figure(value: float, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize(("value", "text"), [(950, "950"), (12100, "12.1k"), (3.4e6, "3.4M"), (1e9, "1.0G")])
def test_compact(value: float, text: str) -> None:
    assert compact(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (8, "8s"), (59.6, "1m00s"), (72, "1m12s"), (7500, "2h05m"), (273600, "3d04h"), (-1, "0s")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_percent() -> None:
    assert percent(0.614) == "61%"


def test_sparkline_rises_with_the_series_and_respects_bounds() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.5], 8, 0, 1) == "▅"
    assert sparkline([2.0, -1.0], 8, 0, 1) == "█▁"
    assert sparkline([3, 3], 8) == "▄▄"
    assert sparkline([0, 0, 1, 1], 2) == "▁█"
    assert sparkline([], 8) == ""


@given(st.lists(st.floats()), st.integers(1, 40))
@example([1.0, -1.7976931348623157e308], 2)
@example([1.7976931348623157e308] * 3, 1)
def test_sparkline_never_exceeds_its_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) <= width
