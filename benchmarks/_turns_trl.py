"""The TRL side of benchmarks/vs_trl.py, in TRL's interpreter.

python _turns_trl.py MODEL DATA STEPS THREADS
"""

import sys
import tempfile
from typing import Any

import torch
from _turns import Turn, score
from datasets import load_dataset
from transformers import TrainerCallback
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
    """Of each completion, a list with one message."""
    return [score(completion[0]["content"]) for completion in completions]


def main(model: str, data: str, steps: int, threads: int) -> None:
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as output:
        arguments = GRPOConfig(
            output_dir=output, use_cpu=True, bf16=False, per_device_train_batch_size=32, num_generations=8,
            max_completion_length=64, max_steps=steps, learning_rate=1e-4, beta=0.0, gradient_checkpointing=False,
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, seed=0,
        )  # fmt: skip
        dataset = load_dataset("json", data_files=data, split="train").select_columns(["prompt"])
        trainer = GRPOTrainer(
            model=model, reward_funcs=reward, args=arguments, train_dataset=dataset, callbacks=[TakeTurns()]
        )
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
