"""The configurations of docs/real-model.md fit the GPUs that the page names, as it says."""

import pytest

from benchmarks._plan_documented import PAGE, ROWS, Documented, line_of, prediction_of


@pytest.mark.parametrize("row", ROWS, ids=[row.model for row in ROWS])
def test_a_documented_configuration_fits_as_the_page_says(row: Documented) -> None:
    found = prediction_of(row)
    assert found.fits and not found.estimated
    assert found.processes == row.gpus
    assert line_of(row, found) in PAGE.read_text(encoding="utf-8")
