"""The configurations of docs/real-model.md fit the GPUs that the page names, as it says."""

import re

import pytest

from agentrl_core.fsdp2.log_probs import MOST_LOGITS
from agentrl_plan.devices import DEVICES, GIB
from agentrl_plan.prediction import predict
from benchmarks._plan_documented import MODELS, PAGE, ROWS, Documented, config_in, line_of, prediction_of


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_configuration_of_the_page_on_lora_fits_as_it_says() -> None:
    page = PAGE.with_name("lora.md")
    with config_in(page, "Qwen2.5-7B", first=1) as config:
        found = predict(config, DEVICES["rtx-4090-24g"])
    together = [f"{phase.total / GIB:.2f}" for phase in found.phases.values()]
    assert found.fits and re.search(r"together +" + " +".join(together), page.read_text(encoding="utf-8"))
