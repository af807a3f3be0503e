"""One training step from the papers, with plain torch and transformers: nothing here imports agentrl.

It reads what a run wrote (``config.yaml``, rollout records, checkpoints) and computes what its next line of
``metrics.jsonl`` and its next checkpoint must be. One row at a time, without padding, packing or micro-batches, with
eager attention.

Shapes: n sampled tokens of a row, N of all rows.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

TRAINED = {"completed", "length", "max_turns", "tool_error", "env_error"}


@dataclass
class Row:
    """A row of a record that is trained, and what is computed for each of its sampled tokens."""

    record: dict[str, Any]
    old_n: Tensor
    ref_n: Tensor
    advantages_n: Tensor
    returns_n: Tensor
    values_n: Tensor

    @property
    def ids(self) -> Tensor:
        return torch.tensor([self.record["prompt_ids"] + self.record["response_ids"]])

    @property
    def sampled_n(self) -> Tensor:
        """Places of the sampled tokens in ``ids``."""
        return torch.tensor(self.record["response_mask"]).nonzero().squeeze(-1) + len(self.record["prompt_ids"])


class PlainPolicy:
    """A causal language model of transformers."""

    def __init__(self, path: Path, temperature: float) -> None:
        self.module = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
        self.temperature = temperature

    def __call__(self, row: Row) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [n] of the sampled tokens, at the temperature of the rollout."""
        ids = row.ids
        logits = self.module(ids, use_cache=False).logits[0, row.sampled_n - 1] / self.temperature
        log_probs = logits.log_softmax(-1)
        return log_probs.gather(-1, ids[0, row.sampled_n, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.module.named_parameters())


class PlainCritic:
    """A backbone of transformers and a linear head."""

    def __init__(self, path: Path) -> None:
        self.backbone = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
        self.head = torch.nn.Linear(self.backbone.config.hidden_size, 1)
        file = path / "value_head.safetensors"
        zeros = {name: torch.zeros_like(parameter) for name, parameter in self.head.named_parameters()}
        self.head.load_state_dict(load_file(file) if file.exists() else zeros)

    def __call__(self, row: Row) -> Tensor:
        """Values [n] of the states in which the sampled tokens were chosen."""
        hidden = self.backbone(row.ids, use_cache=False).last_hidden_state[0, row.sampled_n - 1]
        return self.head(hidden)[:, 0]

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.backbone.named_parameters()) | {f"head.{n}": p for n, p in self.head.named_parameters()}


class PlainAdamW:
    """Algorithm 2 of arXiv 1711.05101, with the learning rate of SGDR's cosine (arXiv 1608.03983) after a warm-up."""

    def __init__(self, settings: Mapping[str, Any], grad_clip: float, total_steps: int) -> None:
        self.settings, self.grad_clip, self.total_steps = settings, grad_clip, total_steps
        self.steps = 0
        self.first: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}

    @property
    def lr(self) -> float:
        peak, warmup = self.settings["lr"], self.settings["warmup_steps"]
        if self.steps < warmup:
            return float(peak * (self.steps + 1) / warmup)
        if self.settings["schedule"] == "constant":
            return float(peak)
        done = (self.steps - warmup) / (self.total_steps - warmup)
        floor = self.settings["min_lr_ratio"] * peak
        return float(floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done)))

    @torch.no_grad()
    def step(self, parameters: Mapping[str, torch.nn.Parameter]) -> float:
        """Clip and step; the norm of the gradient before it was clipped."""
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        scale = min(1.0, self.grad_clip / norm) if norm else 1.0
        beta1, beta2 = self.settings["betas"]
        lr, self.steps = self.lr, self.steps + 1
        for name, gradient in gradients.items():
            gradient = gradient * scale
            first, second = self.first.get(name, torch.tensor(0.0)), self.second.get(name, torch.tensor(0.0))
            self.first[name] = beta1 * first + (1 - beta1) * gradient
            self.second[name] = beta2 * second + (1 - beta2) * gradient.square()
            m_hat = self.first[name] / (1 - beta1**self.steps)
            v_hat = self.second[name] / (1 - beta2**self.steps)
            parameter = parameters[name]
            parameter -= lr * (m_hat / (v_hat.sqrt() + 1e-8) + self.settings["weight_decay"] * parameter)
        return norm


class PlainRun:
    """What a run with one mini-batch per epoch must do in each step, given its records."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = yaml.safe_load((path / "config.yaml").read_text())
        self.temperature = self.config["rollout"]["sampling"]["temperature"]
        trainer = self.config["trainer"]
        self.has_critic = self.config["algorithm"]["advantage"]["name"] == "gae"
        self.optimizers = {
            role: PlainAdamW(
                self.config[role]["optimizer"], self.config[role]["grad_clip"],
                trainer["steps"] * self.config[role]["epochs"],
            )
            for role in ("actor", "critic")
        }  # fmt: skip

    def checkpoint(self, step: int, role: str) -> Path:
        """The models before the first step, or those that a step saved."""
        if step == 0:
            return Path(self.config["model"]["path"])
        return self.path / "checkpoints" / f"step-{step:06d}" / role

    def saved(self, step: int, role: str) -> dict[str, Tensor]:
        """The weights that a step saved."""
        folder = self.checkpoint(step, role)
        weights = load_file(folder / "model.safetensors")
        head = folder / "value_head.safetensors"
        return weights | ({f"head.{name}": tensor for name, tensor in load_file(head).items()} if head.exists() else {})

    def records(self, step: int) -> list[dict[str, Any]]:
        """The rows of a step's trees, one agent each."""
        file = self.path / "rollouts" / f"step-{step:06d}.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        return [row_of(line, agent, row) for line in lines for agent in line["agents"] for row in agent["rows"] or [{}]]

    def metrics(self) -> dict[int, dict[str, float]]:
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        return {line["step"]: line for line in map(json.loads, lines)}

    # One step ---------------------------------------------------------------------------------------------------

    def step(self, step: int) -> tuple[dict[str, float], dict[str, PlainPolicy | PlainCritic]]:
        """The metrics of a step, and its models after the step."""
        policy = PlainPolicy(self.checkpoint(step - 1, "actor"), self.temperature)
        critic = PlainCritic(self.checkpoint(step - 1, "critic")) if self.has_critic else None
        records = self.records(step)
        rows = self.rows(records, policy, critic)
        metrics = self.outcomes(records) | self.engine_gap(rows) | self.tokens(rows)
        if self.config["algorithm"]["kl_placement"] == "reward":
            metrics |= self.penalty(rows)
        if critic is None:
            metrics |= self.grpo(rows)
        else:
            metrics |= self.gae(rows)
        metrics |= spreads(rows, ("advantages", "returns", *(["values"] if critic else [])))
        if critic is not None:
            metrics |= self.update_critic(critic, rows)
        metrics |= self.update_policy(policy, rows)
        metrics["epoch"] = step * self.config["data"]["batch_size"] / self.training_rows()
        return metrics, {"actor": policy} | ({"critic": critic} if critic else {})

    def rows(self, records: Sequence[dict[str, Any]], policy: PlainPolicy, critic: PlainCritic | None) -> list[Row]:
        reference = PlainPolicy(self.checkpoint(0, "actor"), self.temperature)
        nothing = torch.zeros(0)
        rows = []
        for record in records:
            if record["termination"] in TRAINED and any(record["response_mask"]):
                row = Row(record, nothing, nothing, nothing, nothing, nothing)
                with torch.no_grad():
                    row.old_n, row.ref_n = policy(row)[0], reference(row)[0]
                    if critic is not None:
                        row.values_n = critic(row)
                rows.append(row)
        return rows

    # Advantages -------------------------------------------------------------------------------------------------

    def rewards(self, row: Row) -> Tensor:
        """[n]: what each turn earned on its last token, and the rest of the score on the last of all; minus the KL."""
        turns = torch.tensor(row.record["turn_ids"])[torch.tensor(row.record["response_mask"]).bool()]
        rewards_n = torch.zeros(len(turns), dtype=torch.float64)
        for turn, reward in enumerate(row.record["turn_rewards"]):
            if (turns == turn).any():
                rewards_n[(turns == turn).nonzero().max()] += reward
        rewards_n[-1] += row.record["reward"] - sum(row.record["turn_rewards"])
        if self.config["algorithm"]["kl_placement"] == "reward":
            rewards_n -= self.config["algorithm"]["kl_coef"] * (row.old_n - row.ref_n)
        return rewards_n

    def penalty(self, rows: Sequence[Row]) -> dict[str, float]:
        kl_N = torch.cat([row.old_n - row.ref_n for row in rows])
        return {"reward/kl": float(kl_N.mean()), "reward/kl_coef": self.config["algorithm"]["kl_coef"]}

    def grpo(self, rows: Sequence[Row]) -> dict[str, float]:
        """arXiv 2402.03300, section 4.1.2: (r_i - mean(r)) / std(r) over the trajectories of a prompt."""
        settings = self.config["algorithm"]["advantage"]["config"]
        groups: dict[str, dict[str, float]] = defaultdict(dict)
        for row in rows:
            groups[row.record["uid"]][row.record["trajectory_id"]] = row.record["reward"]
        silent = 0
        by_trajectory: dict[str, float] = {}
        for scores in groups.values():
            values = np.array(list(scores.values()))
            flat = len(values) < 2 or bool((values == values[0]).all())
            silent += flat
            centred = values - values.mean()
            advantages = np.zeros(len(values)) if flat else centred / (values.std(ddof=1) + settings["eps"])
            by_trajectory |= dict(zip(scores, advantages.tolist(), strict=True))
        for row in rows:
            row.advantages_n = torch.full_like(row.old_n, by_trajectory[row.record["trajectory_id"]])
            row.returns_n = torch.full_like(row.old_n, row.record["reward"])
        return {"advantage/groups_without_signal": silent / len(groups)}

    def gae(self, rows: Sequence[Row]) -> dict[str, float]:
        """arXiv 1506.02438, equation 16 as it is written: a discounted sum of the residuals of all later tokens."""
        settings = self.config["algorithm"]["advantage"]["config"]
        gamma, lam = settings["gamma"], settings["lam"]
        for row in rows:
            values = [*row.values_n.tolist(), 0.0]
            rewards = self.rewards(row).tolist()
            deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(len(rewards))]
            sums = [
                sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, len(deltas)))
                for t in range(len(deltas))
            ]
            row.advantages_n = torch.tensor(sums, dtype=torch.float64)
            row.returns_n = (row.advantages_n + row.values_n).float()
        everything_N = torch.cat([row.advantages_n for row in rows])
        for row in rows:
            whitened = (row.advantages_n - everything_N.mean()) / everything_N.std(correction=0)
            row.advantages_n = (whitened if settings["whiten"] else row.advantages_n).float()
        prompts = {row.record["uid"] for row in rows}
        heard = {row.record["uid"] for row in rows if (row.advantages_n.abs() > 1e-6).any()}
        return {"advantage/groups_without_signal": len(prompts - heard) / len(prompts)}

    # Updates ----------------------------------------------------------------------------------------------------

    def averaged(self, by_row: Sequence[Tensor]) -> Tensor:
        """Per-token losses as one number."""
        mode = self.config["algorithm"]["aggregation"]
        if mode == "token-mean":
            return torch.cat(list(by_row)).mean()
        if mode == "seq-mean-token-mean":
            return torch.stack([losses_n.mean() for losses_n in by_row]).mean()
        raise ValueError(mode)

    def update_policy(self, policy: PlainPolicy, rows: Sequence[Row]) -> dict[str, float]:
        """Equation 7 of arXiv 1707.06347, the KL term of arXiv 2402.03300 (equation 4) and an entropy bonus."""
        algorithm, optimizer = self.config["algorithm"], self.optimizers["actor"]
        low, high = (algorithm["loss"]["config"][key] for key in ("clip_low", "clip_high"))
        kl_coef = algorithm["kl_coef"] if algorithm["kl_placement"] == "loss" else 0.0
        seen: dict[str, list[float]] = defaultdict(list)
        for _ in range(self.config["actor"]["epochs"]):
            policy.module.zero_grad()
            terms: dict[str, list[Tensor]] = defaultdict(list)
            for row in rows:
                log_probs_n, entropies_n = policy(row)
                ratio_n, advantages_n = (log_probs_n - row.old_n).exp(), row.advantages_n
                clipped_n = ratio_n.clamp(1 - low, 1 + high)
                terms["pg"].append(-torch.minimum(ratio_n * advantages_n, clipped_n * advantages_n))
                log_ratio_ref_n = row.ref_n - log_probs_n
                terms["kl"].append(log_ratio_ref_n.exp() - log_ratio_ref_n - 1)
                terms["entropy"].append(entropies_n)
                terms["ratio"].append(ratio_n)
                terms["ppo_kl"].append(row.old_n - log_probs_n)
                terms["clip_fraction"].append((clipped_n * advantages_n < ratio_n * advantages_n).float())
            pg_loss = self.averaged(terms["pg"])
            loss = pg_loss + kl_coef * self.averaged(terms["kl"])
            loss = loss - algorithm["entropy_coef"] * self.averaged(terms["entropy"])
            loss.backward()
            names = ("entropy", "ratio", "ppo_kl", "clip_fraction", *(["kl"] if kl_coef else []))
            for name in names:
                seen[name].append(torch.cat(terms[name]).mean().item())
            seen["pg_loss"].append(pg_loss.item())
            seen["loss"].append(loss.item())
            seen["lr"] = [optimizer.lr]
            seen["grad_norm"].append(optimizer.step(policy.parameters()))
        moving = [bool((row.advantages_n != 0).any()) or bool(kl_coef or algorithm["entropy_coef"]) for row in rows]
        metrics = {f"actor/{name}": float(np.mean(values)) for name, values in seen.items()}
        return metrics | {"actor/skipped_steps": 0.0, "actor/trained_rows_share": float(np.mean(moving))}

    def update_critic(self, critic: PlainCritic, rows: Sequence[Row]) -> dict[str, float]:
        """Half the squared error, clipped as in arXiv 2005.12729, section 3; averaged over all tokens."""
        clip, optimizer = self.config["critic"]["value_clip"], self.optimizers["critic"]
        seen: dict[str, list[float]] = defaultdict(list)
        for _ in range(self.config["critic"]["epochs"]):
            critic.backbone.zero_grad()
            critic.head.zero_grad()
            losses, values, clipped = [], [], []
            for row in rows:
                values_n = critic(row)
                near_n = row.values_n + (values_n - row.values_n).clamp(-clip, clip)
                plain_n, near_n = (values_n - row.returns_n) ** 2, (near_n - row.returns_n) ** 2
                losses.append(torch.maximum(plain_n, near_n) / 2)
                clipped.append((near_n > plain_n).float())
                values.append(values_n)
            loss = torch.cat(losses).mean()
            loss.backward()
            seen["loss"].append(loss.item())
            seen["value_mean"].append(torch.cat(values).mean().item())
            seen["clip_fraction"].append(torch.cat(clipped).mean().item())
            seen["lr"] = [optimizer.lr]
            seen["grad_norm"].append(optimizer.step(critic.parameters()))
        returns_N = torch.cat([row.returns_n for row in rows]).double()
        errors_N = returns_N - torch.cat([row.values_n for row in rows]).double()
        metrics = {f"critic/{name}": float(np.mean(numbers)) for name, numbers in seen.items()}
        explained = 1 - float(errors_N.var() / returns_N.var())
        return metrics | {"critic/skipped_steps": 0.0, "critic/explained_variance": explained}

    # Counts -----------------------------------------------------------------------------------------------------

    def training_rows(self) -> int:
        return sum(len(Path(file).read_text().splitlines()) for file in self.config["data"]["train_files"])

    def engine_gap(self, rows: Sequence[Row]) -> dict[str, float]:
        """The rollout's log-probs against plain ones."""
        gaps: dict[str, list[Tensor]] = defaultdict(list)
        differences = []
        for row in rows:
            mask = torch.tensor(row.record["response_mask"]).bool()
            engine_n = torch.tensor(row.record["response_logprobs"])[mask]
            gap_n, turns = (engine_n - row.old_n).abs(), torch.tensor(row.record["turn_ids"])[mask]
            differences.append((engine_n.exp() - row.old_n.exp()).abs())
            gaps[""].append(gap_n)
            for turn in turns.unique().tolist():
                gaps[f"/turn_{turn + 1}"].append(gap_n[turns == turn])
        metrics = {}
        for name, values in gaps.items():
            metrics[f"rollout/logprob_gap{name}_mean"] = float(torch.cat(values).mean())
            metrics[f"rollout/logprob_gap{name}_max"] = float(torch.cat(values).max())
        diff_N = torch.cat(differences)
        return metrics | {
            "rollout/probs_diff_mean": float(diff_N.mean()), "rollout/probs_diff_max": float(diff_N.max()),
            "rollout/probs_diff_std": float(diff_N.std(correction=0)),
        }  # fmt: skip

    def tokens(self, rows: Sequence[Row]) -> dict[str, float]:
        return {"perf/total_num_tokens": float(sum(row.ids.numel() for row in rows))}

    def outcomes(self, records: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Rewards, lengths, terminations and tool calls, by trajectory."""
        trajectories: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for record in records:
            trajectories[record["trajectory_id"]].append(record)
        count = len(trajectories)
        last = [rows[-1] for rows in trajectories.values()]
        trained = [rows for rows in trajectories.values() if rows[-1]["termination"] in TRAINED]
        rewards = [rows[-1]["reward"] for rows in trained]
        # Each row is a branch with a budget of its own.
        lengths = [len(row["response_ids"]) for rows in trained for row in rows]
        limit = self.config["rollout"]["max_response_length"]
        above = self.config["trainer"]["validation"]["correct_above"]
        calls = [rows[-1]["tool_calls"] for rows in trajectories.values()]
        samples: dict[str, list[list[list[int]]]] = defaultdict(list)
        for rows in trained:
            samples[rows[0]["uid"]].append([row["response_ids"] for row in rows])
        identical = [all(one == of_prompt[0] for one in of_prompt) for of_prompt in samples.values() if of_prompt[1:]]
        metrics = spread("reward", rewards) | {"reward/std": float(np.std(rewards))}
        metrics |= spread("response_length", lengths)
        metrics |= spread("prompt_length", [len(rows[0]["prompt_ids"]) for rows in trained])
        for part in {part for rows in trained for part in rows[-1]["reward_components"]}:
            values = [rows[-1]["reward_components"][part] for rows in trained]
            metrics[f"reward/{part}"] = float(np.mean(values))
        for kind, number in Counter(row["termination"] for row in last).items():
            metrics[f"rollout/termination/{kind}"] = number / count
        for source in {rows[-1]["data_source"] for rows in trained}:
            scores = [rows[-1]["reward"] for rows in trained if rows[-1]["data_source"] == source]
            metrics[f"train/{source}/accuracy"] = float(np.mean([score > above for score in scores]))
            metrics[f"train/{source}/score_mean"] = float(np.mean(scores))
        return metrics | {
            "response_length/clip_ratio": float(np.mean([length >= limit for length in lengths])),
            "rollout/failed_fraction": (count - len(trained)) / count,
            "rollout/identical_groups_share": float(np.mean(identical)),
            "rollout/tool_calls_mean": sum(map(len, calls)) / count,
            "rollout/tool_call_share": sum(map(bool, calls)) / count,
            "rollout/tool_failures": sum(call["failed"] for each in calls for call in each) / count,
            "rollout/sampled_tokens": float(sum(sum(record["response_mask"]) for record in records)),
            "rollout/turns_mean": float(np.mean([rows[-1]["num_turns"] for rows in trained])),
        }


def row_of(line: dict[str, Any], agent: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """A row of a trajectory's tree: the nodes from its prompt to its leaf."""
    nodes = line["nodes"]
    turns = [at for at, node in enumerate(nodes) if node["kind"] == "turn" and node.get("agent", "") == agent["agent"]]
    path, at = [], row.get("leaf")
    while at is not None:
        path.insert(0, at)
        at = None if nodes[at]["kind"] == "prompt" else nodes[at]["parent"]
    prompt, response = path[: row.get("shared", 0)], path[row.get("shared", 0) :]
    found: dict[str, Any] = {**agent, "data_source": line["data_source"], "num_turns": row.get("num_turns", 0)}
    found["prompt_ids"] = [token for at in prompt for token in nodes[at]["ids"]]
    found["tool_calls"] = [call for at in turns for call in nodes[at]["calls"]]
    columns: dict[str, list[Any]] = {
        "response_ids": [], "response_mask": [], "turn_ids": [], "response_logprobs": [], "advantages": [],
    }  # fmt: skip
    for at in response:
        node, count = nodes[at], len(nodes[at]["ids"])
        sampled = node["kind"] == "turn"
        columns["response_ids"] += node["ids"]
        columns["response_mask"] += [int(sampled)] * count
        columns["turn_ids"] += [turns.index(at) if sampled else -1] * count
        columns["response_logprobs"] += node["log_probs"] or [math.nan] * count if sampled else [0.0] * count
        columns["advantages"] += node.get("advantages") or [node.get("advantage", math.nan)] * count
    return found | columns


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/max": float(max(values)),
        f"{name}/min": float(min(values)),
    }


def spreads(rows: Sequence[Row], names: Sequence[str]) -> dict[str, float]:
    """Over all sampled tokens, with the standard deviation of all of them."""
    metrics: dict[str, float] = {}
    for name in names:
        values_N = torch.cat([getattr(row, f"{name}_n") for row in rows]).double().numpy()
        metrics |= spread(f"critic/{name}", values_N.tolist()) | {f"critic/{name}/std": float(values_N.std())}
    return metrics
