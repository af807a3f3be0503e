"""Writes a run directory as training does, without training: for the viewer's benchmark, tests and screenshots."""

import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

START = 1_795_000_000.0
PRICES = {"keyboard": 37.5, "mouse": 19.0, "monitor": 189.0, "cable": 6.5, "webcam": 54.0, "headset": 72.0}
SYSTEM = "You are a shop's assistant. Look up prices with `price`, use `calculator`, and answer with the total."
TOOLS = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": {
        "type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}}}
    for name, text, argument in (
        ("price", "Price of an article in EUR.", "article"), ("calculator", "Evaluates an expression.", "expression"))
]  # fmt: skip


@dataclass
class SampleRun:
    """A run directory that grows step by step.

    Args:
        path: made where it is absent.
        seed: two runs of one seed are equal.
        skill: how fast it learns.
        prompts, samples: per step.
        total: steps of the configuration.
        replicas: of the engine; 0: as an older agentrl wrote runs, without replicas and phases on the clock.
        overlaps: it samples while it trains.
    """

    path: Path
    seed: int = 0
    skill: float = 1.0
    prompts: int = 4
    samples: int = 4
    total: int = 30
    replicas: int = 2
    overlaps: bool = False
    _ids: dict[str, int] = field(default_factory=lambda: {"<unk>": 0})
    _encodings: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.path / "rollouts").mkdir(parents=True, exist_ok=True)
        self.random = random.Random(self.seed)
        config = {"trainer": {"name": self.path.name, "steps": self.total, "seed": self.seed},
                  "actor": {"optimizer": {"lr": 5e-7 * self.skill}}, "algorithm": {"advantage": {"name": "grpo"}},
                  "rollout": {"n": self.samples, "engine": {"name": "vllm"}}}  # fmt: skip
        # JSON is YAML.
        (self.path / "config.yaml").write_text(json.dumps(config))

    def write(self, first: int, last: int, status: str = "running") -> "SampleRun":
        """Write the steps from ``first`` to ``last``, their metrics, and the tokenizer that reads them."""
        for step in range(first, last + 1):
            records = list(self._step(step))
            self.write_records(step, records)
            metrics = self._metrics(step, records)
            row = json.dumps({"step": step, "time": _time(START + 60 * step + 58), **metrics})
            with (self.path / "metrics.jsonl").open("a") as file:
                file.write(row + "\n")
            if self.replicas:
                with (self.path / "phases.jsonl").open("a") as file:
                    file.write(json.dumps({"step": step, "phases": list(_phases(step, metrics))}) + "\n")
        state = {"status": status, "step": last, "time": _time(START + 60 * last)}
        (self.path / "state.json").write_text(json.dumps(state))
        actor = self.path / "checkpoints/step-000001/actor"
        actor.mkdir(parents=True, exist_ok=True)
        tokenizer = Tokenizer(models.WordLevel(self._ids, unk_token="<unk>"))
        tokenizer.decoder = decoders.Fuse()
        tokenizer.save(str(actor / "tokenizer.json"))
        return self

    def write_records(self, step: int, records: list[dict[str, Any]]) -> Path:
        """Write the rollout file of a step."""
        file = self.path / f"rollouts/step-{step:06d}.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        return file

    def _step(self, step: int) -> Iterator[dict[str, Any]]:
        for prompt in range(self.prompts):
            group = [self.record(step, prompt, sample) for sample in range(self.samples)]
            rewards = [rows[0]["reward"] for rows in group if rows[0]["reward"] is not None]
            mean = sum(rewards) / max(len(rewards), 1)
            deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / max(len(rewards), 1)) + 1e-6
            for rows in group:
                for row in rows:
                    if row["reward"] is not None:
                        row["advantage"] = (row["reward"] - mean) / deviation
                        row["advantages"] = [
                            mask * round(row["advantage"] * (1 + 0.3 * max(turn, 0)), 5)
                            for mask, turn in zip(row["response_mask"], row["turn_ids"], strict=True)
                        ]
                    yield row

    def record(self, step: int, prompt: int, sample: int) -> list[dict[str, Any]]:
        """The rows of one trajectory: mostly one, two where the conversation was compacted."""
        chance = self.random
        skill = 1 / (1 + math.exp(-self.skill * (step - 9) / 4))
        asked = random.Random(f"{(step * self.prompts + prompt) % 23}")
        (one, many), (two, few) = ((name, asked.randint(2, 9)) for name in asked.sample(sorted(PRICES), 2))
        question = f"I take {many} {one}s and {few} {two}s, with 10% off. What is the total in EUR?"
        truth = f"{0.9 * (many * PRICES[one] + few * PRICES[two]):.2f}"
        expression = f"0.9 * ({many} * {PRICES[one]} + {few} * {PRICES[two]})"
        system = {"role": "system", "content": SYSTEM}
        turns: list[tuple[str, list[tuple[str, dict[str, str], str, bool]]]] = [("", [
            ("price", {"article": one}, f"{PRICES[one]} EUR", False),
            ("price", {"article": two}, f"{PRICES[two]} EUR", False)])]  # fmt: skip
        termination, error = "completed", None
        fate = chance.random()
        if fate < 0.01:
            termination, error = "engine_error", "EngineError: replica 1 exited with code -9 while generating"
        elif fate > 0.15 + 0.83 * skill:
            turns = [("", [("price", {"article": one + "s"}, f"Error: no article '{one}s'", True)])]
            turns += [(f"I guess that it is about {100 * many}.", [])]
        elif fate > 0.1 + 0.84 * skill:
            turns += [(f"I compute it in my head: the total is {many * PRICES[one]:.2f} EUR.", [])]
        else:
            turns += [("Both prices are known now.", [("calculator", {"expression": expression}, truth, False)])]
            turns += [(f"The total is {truth} EUR.", [])]
        right = f" {truth} EUR" in turns[-1][0]
        rows = [self._row(step, prompt, sample, [system, {"role": "user", "content": question}], turns, right)]
        if len(turns) == 3 and sample == 1 and prompt == 0:
            summary = {"role": "user", "content": f"{question}\n(So far: the prices are known.)"}
            rows.append(self._row(step, prompt, sample, [system, summary], turns[1:], right))
        for row in rows:
            scored = termination == "completed"
            row |= {"termination": termination, "error": error, "ground_truth": truth}
            row |= {"reward": (0.9 * right + 0.1 * (len(turns) > 2)) if scored else None}
            row |= {"reward_components": {"total": float(right), "used_calculator": float(len(turns) > 2)}}
        return rows

    def _row(
        self, step: int, prompt: int, sample: int, first: list[dict[str, Any]], turns: list[Any], right: bool
    ) -> dict[str, Any]:
        chance, messages = self.random, list(first)
        prompt_text = "".join(f"<|{each['role']}|>{each['content']}<|end|>\n" for each in first) + "<|assistant|>"
        ids, mask, turn_ids, log_probs, calls, spans = [], [], [], [], [], []
        segments: list[tuple[int, str]] = []
        at = begun = START + 60 * step + 2 + 2 * chance.random()
        for number, (content, asked) in enumerate(turns):
            wanted = [{"name": name, "arguments": arguments} for name, arguments, _, _ in asked]
            text = content + "".join(f"\n<tool_call>{json.dumps(call)}</tool_call>" for call in wanted) + "<|end|>"
            told = "".join(f"\n<|tool|>{answer}<|end|>" for _, _, answer, _ in asked)
            segments += [(1, text), *([(0, told + "\n<|assistant|>")] if asked else [])]
            new = self._encoded(text)
            ids += new
            mask += [1] * len(new)
            turn_ids += [number] * len(new)
            log_probs += [round(math.log(1 - 0.97 * chance.random() ** (2 + step / 4)), 4) for _ in new]
            generating = 0.05 * len(new) * (0.6 + chance.random())
            spans.append(("generate", round(at, 4), round(generating, 4)))
            at += generating + 0.02
            named = [{"type": "function", "function": call} for call in wanted]
            messages.append({"role": "assistant", "content": content} | ({"tool_calls": named} if named else {}))
            for name, arguments, answer, failed in asked:
                calls.append({"name": name, "arguments": arguments, "response": answer, "failed": failed})
                messages.append({"role": "tool", "name": name, "content": answer})
                taken = 0.3 + 3 * chance.random() ** 6
                spans.append(("tools", round(at, 4), round(taken, 4)))
                at += taken
            given = self._encoded(told + "\n<|assistant|>") if asked else []
            ids += given
            mask += [0] * len(given)
            turn_ids += [-1] * len(given)
            log_probs += [0.0] * len(given)
        spans.append(("reward", round(at, 4), 0.2))
        actor = [round(value + chance.gauss(0, 0.01), 5) * on for value, on in zip(log_probs, mask, strict=True)]
        versions = [on * step - 1 for on in mask]
        if len(turns) > 2:
            # The weights arrived while it ran.
            versions = [version - (version > 0 and turn == 0) for version, turn in zip(versions, turn_ids, strict=True)]
        name = f"train-{step:06d}-{prompt:05d}"
        served = [] if not self.replicas else list(self._served(f"{name}-{sample:03d}", spans))
        timings = {kind: sum(s for each, _, s in spans if each == kind) for kind in ("generate", "tools", "reward")}
        return {
            "schema_version": 1, "step": step, "split": "train", "uid": name, "sample": sample,
            "trajectory_id": f"{name}-{sample:03d}", "data_source": "shop", "messages": messages,
            "prompt_text": prompt_text, "prompt_ids": self._encoded(prompt_text), "segments": segments,
            "response_ids": ids, "response_mask": mask, "response_logprobs": log_probs, "old_log_probs": actor,
            "policy_versions": versions, "turn_ids": turn_ids, "tool_schemas": TOOLS, "tool_calls": calls,
            "tool_rewards": [], "turn_rewards": [0.0] * (len(turns) - 1) + [0.9 * right], "spans": spans,
            "served": served, "num_turns": len(messages) - 1,
            "timings": {**timings, "total": at + 0.2 - begun}, "advantage": None, "advantages": [],
        }  # fmt: skip

    def _served(self, name: str, spans: list[tuple[str, float, float]]) -> Iterator[tuple[int, float]]:
        # Numbers of their own: a run without replicas has the same trajectories.
        chance = random.Random(name)
        home = chance.randrange(self.replicas)
        for kind, _, length in spans:
            if kind == "generate":
                yield home, round(length * max(0.0, chance.random() - 0.6), 5)

    def _encoded(self, text: str) -> list[int]:
        if text not in self._encodings:
            words = re.findall(r"<[|/\w]+>| ?\w+|.", text, flags=re.DOTALL)
            self._encodings[text] = [self._ids.setdefault(word, len(self._ids)) for word in words]
        return self._encodings[text]

    def _metrics(self, step: int, records: list[dict[str, Any]]) -> dict[str, float]:
        noise = self.random.uniform
        rewards = [record["reward"] for record in records if record["reward"] is not None]
        lengths = [len(record["response_ids"]) for record in records]
        seconds = max(at + length for record in records for _, at, length in record["spans"]) - START - 60 * step
        phases = {"rollout": seconds, "log_probs": 2 + noise(0, 1), "update_actor": 7 + noise(0, 2),
                  "sync_weights": 1.5 + noise(0, 0.5)}  # fmt: skip
        metrics = {
            "reward/mean": sum(rewards) / max(len(rewards), 1),
            "response_length/mean": sum(lengths) / len(lengths),
            "actor/entropy": 0.9 * math.exp(-step * self.skill / 14) + noise(0, 0.03),
            "actor/grad_norm": 0.4 + noise(0, 0.5),
            "actor/loss": noise(-0.1, 0.1),
            "rollout/tool_call_share": sum(bool(r["tool_calls"]) for r in records) / len(records),
            "rollout/logprob_gap_mean": 0.01 + noise(0, 0.002),
            "perf/tokens_per_second": sum(lengths) / seconds,
            "timing/step": sum(phases.values()),
        }
        if step % 5 == 0:
            metrics["validation/shop/accuracy"] = 1 / (1 + math.exp(-self.skill * (step - 9) / 4)) - noise(0, 0.04)
            phases["validation"] = 6 + noise(0, 2)
        if self.overlaps:
            phases["early_log_probs"] = 0.2 * seconds
            metrics |= {"idle/trainer/engines": 0.5 * seconds, "idle/trainer/tool_price": 0.2 * seconds,
                        "idle/rollout/trainer": 1 + noise(0, 1), "idle/rollout/weights": 0.1}  # fmt: skip
        return metrics | {f"timing/{name}": value for name, value in phases.items()}


def _phases(step: int, metrics: dict[str, float]) -> Iterator[tuple[str, float, float]]:
    begun = START + 60 * step
    yield "step", begun, metrics["timing/step"]
    if early := metrics.get("timing/early_log_probs"):
        yield "early_log_probs", round(begun + 0.5 * metrics["timing/rollout"], 4), round(early, 5)
    for name in ("rollout", "log_probs", "update_actor", "sync_weights", "validation"):
        seconds = metrics.get(f"timing/{name}", 0.0)
        if seconds:
            yield name, round(begun, 4), round(seconds, 5)
            begun += seconds + 0.2


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
