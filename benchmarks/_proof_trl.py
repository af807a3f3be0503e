"""TRL's GRPOTrainer on what a configuration of a single turn says, for benchmarks/proof.py.

python _proof_trl.py CONFIG RUN SEED

Model, prompts, samples, learning rate and steps are those of the configuration. ``RUN/metrics.jsonl`` gets
``reward/mean`` of each step.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from agentrl_core.config import load_config


class WriteMetrics(TrainerCallback):  # type: ignore[misc]  # transformers has no complete types
    """A line for each step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "reward" in logs:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, "reward/mean": float(logs["reward"])}) + "\n")


def exact_match(completions: list[Any], reward_model: list[dict[str, str]], **kwargs: Any) -> list[float]:
    """1 for an answer that is the ground truth of its row."""
    return [
        float(completion[0]["content"] == row["ground_truth"])
        for completion, row in zip(completions, reward_model, strict=True)
    ]


def main(config_path: Path, run: Path, seed: int) -> None:
    config = load_config(config_path)
    torch.set_num_threads(config.cluster.cpu_threads or 1)
    run.mkdir(parents=True, exist_ok=True)
    metrics = run / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as output:
        arguments = GRPOConfig(
            output_dir=output,
            seed=seed,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=config.data.batch_size * config.rollout.n,
            num_generations=config.rollout.n,
            max_completion_length=config.rollout.max_response_length,
            temperature=config.rollout.sampling.temperature,
            max_steps=config.trainer.steps,
            learning_rate=config.actor.optimizer.lr,
            lr_scheduler_type=config.actor.optimizer.schedule,
            weight_decay=config.actor.optimizer.weight_decay,
            max_grad_norm=config.actor.grad_clip,
            beta=config.algorithm.kl_coef,
            epsilon=0.2,
            scale_rewards="group",
            loss_type="dapo",  # the mean over all tokens, as aggregation: token-mean
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        rows = load_dataset("json", data_files=config.data.train_files, split="train")
        trainer = GRPOTrainer(
            model=config.model.path,
            reward_funcs=exact_match,
            args=arguments,
            train_dataset=rows,
            callbacks=[WriteMetrics(metrics)],
        )
        trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
