"""The TRL side of benchmarks/vs_trl.py, in TRL's interpreter.

python _turns_trl.py MODEL DATA STEPS THREADS RESPONSE TURNS RANK

RANK is that of a LoRA adapter; 0: all weights are trained.
"""

import sys
import tempfile
from typing import Any

import torch
from _turns import Turn, find_places, score
from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class TakeTurns(TrainerCallback):  # type: ignore[misc]  # transformers has no complete types
    """Every step of the run waits for the other side's."""

    def __init__(self) -> None:
        self._turn = Turn()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """The last event of a step that is logged: with ``logging_steps=1`` every one."""
        if logs and "completions/mean_length" in logs:
            self._turn.step_ended({"response_length/mean": float(logs["completions/mean_length"])})


def reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Of each completion, a list of messages."""
    return [score("".join(str(message) for message in completion)) for completion in completions]


def tools_of(model: str) -> dict[str, Any]:
    """The tool, and the tokenizer with the grammar of Qwen3's calls, whose tags its chat template has."""
    from trl.chat_template_utils import qwen3_template

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = qwen3_template
    return {"tools": [find_places], "processing_class": tokenizer}


def adapter_of(rank: int) -> Any:
    """An adapter in all linear layers."""
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def main(model: str, data: str, steps: int, threads: int, response: int, turns: int, rank: int) -> None:
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as output:
        arguments = GRPOConfig(
            output_dir=output, use_cpu=True, bf16=False, per_device_train_batch_size=32, num_generations=8,
            max_completion_length=response, max_steps=steps, learning_rate=1e-4, beta=0.0, gradient_checkpointing=False,
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, seed=0,
            max_tool_calling_iterations=turns - 1,
        )  # fmt: skip
        dataset = load_dataset("json", data_files=data, split="train").select_columns(["prompt"])
        trainer = GRPOTrainer(
            model=model, reward_funcs=reward, args=arguments, train_dataset=dataset, callbacks=[TakeTurns()],
            peft_config=adapter_of(rank) if rank else None,
            **(tools_of(model) if turns > 1 else {}),
        )  # fmt: skip
        trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
