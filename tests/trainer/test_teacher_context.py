"""A teacher that reads more than the policy: its log-probs are those of the longer prompt."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl_core.api import ConfigError, DataError
from agentrl_core.config import load_config
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer import Trainer

Fit = Callable[..., RunDir]
KEEPS = """
import torch
from agentrl_core.api import hookimpl

class Keeps:
    def __init__(self, config, context):
        self.file = context.run_dir / "batch.pt"

    @hookimpl
    def on_batch_ready(self, batch):
        assert "teacher_prompts" not in batch.non_tensor_batch
        names = ("responses", "response_mask", "attention_mask", "teacher_log_probs", "old_log_probs", "prompts")
        torch.save({name: batch.batch[name] for name in names}, self.file)
"""
SELF: dict[str, Any] = {
    "trainer.steps": 1,
    "algorithm.advantage": {"name": "on_policy_distillation"},
    "teacher.context": "It is {ground_truth} in {index}.",
    "hooks": ["./keeps.py:Keeps"],
}


def log_probs(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Of each token of the response, by transformers alone."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)


@pytest.mark.parametrize("own", [True, False], ids=["the policy", "another model"])
def test_the_log_probs_are_those_of_the_prompt_with_the_context(
    fit: Fit, tiny_run: Any, tiny_model: Path, tmp_path: Path, own: bool
) -> None:
    (tiny_run.folder / "keeps.py").write_text(KEEPS)
    path = tiny_model
    if not own:
        from agentrl_testing.tiny_model import save_tiny_model

        path = tmp_path / "teacher"
        save_tiny_model(path, initializer_range=0.2)
    run = fit(SELF if own else {**SELF, "teacher.path": str(path)})
    batch = torch.load(run.path / "batch.pt")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = len(batch["responses"])
    assert rows == 4
    checked = 0
    for row in range(rows):
        width = batch["prompts"].shape[1]
        shown = batch["prompts"][row][batch["attention_mask"][row, :width].bool()].tolist()
        filled = batch["attention_mask"][row, width:].bool()
        response = batch["responses"][row][filled].tolist()
        for index in range(6):
            question = f"say {index}"
            plain, told = (
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
                )
                for text in (question, f"{question}\n\nIt is {index} in {index}.")
            )
            if plain == shown:
                expected = log_probs(model, told, response)
                torch.testing.assert_close(batch["teacher_log_probs"][row][filled], expected, atol=1e-5, rtol=1e-5)
                assert not torch.allclose(expected, batch["old_log_probs"][row][filled], atol=1e-3)
                checked += 1
    assert checked == rows
    metrics = run.read_metrics()[-1]
    assert metrics["actor/grad_norm"] > 0 and metrics["advantage/teacher_kl"] != 0


def test_a_field_that_a_row_lacks_is_named(fit: Fit, tiny_run: Any) -> None:
    (tiny_run.folder / "keeps.py").write_text(KEEPS)
    with pytest.raises(
        DataError, match=r"teacher.context: the row of train-000001-0000. has no hint; it has ground_tr"
    ):
        fit({**SELF, "teacher.context": "Think of {hint}."})


def test_a_context_that_nobody_reads_is_refused(tiny_run: Any) -> None:
    with pytest.raises(ConfigError, match=r"teacher.context.*'grpo' uses no teacher; set teacher.context=null"):
        Trainer(load_config(tiny_run({"teacher.context": "The answer is 4."})))
