"""The configurations of docs/real-model.md fit the GPUs that the page names, as it says."""

import pytest

from agentrl_core.workers.log_probs import MOST_LOGITS
from benchmarks._plan_documented import MODELS, PAGE, ROWS, Documented, line_of, prediction_of


@pytest.mark.parametrize("row", ROWS, ids=[row.model for row in ROWS])
def test_a_documented_configuration_fits_as_the_page_says(row: Documented) -> None:
    found = prediction_of(row)
    assert found.fits and not found.estimated
    assert found.processes == row.gpus
    # The gradient of the head has as many rows as the model is wide; all others come in chunks of tokens.
    vocabulary, width = (MODELS[row.model][key] for key in ("vocab_size", "hidden_size"))
    assert {shape[-1] for shape in found.logits.values()} == {vocabulary}
    assert max(shape[-2] for shape in found.logits.values()) <= max(MOST_LOGITS // vocabulary, width)
    assert line_of(row, found) in PAGE.read_text(encoding="utf-8")
