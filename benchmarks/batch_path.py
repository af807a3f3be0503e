"""What the driver does with a step's trajectories: from the workers' results to ranks and records.

    OMP_NUM_THREADS=1 python benchmarks/batch_path.py [--rows 8192] [--ranks 8] [--against CHECKOUT] [--pairs 3]

Trajectories have a log-normal length (median 2,000 tokens, at most 16,000), a prompt that eight of them share, turns
of the policy and answers of a tool. Agent-loop workers, which are not measured, have left them in files, as Ray would
hand them over. Each part of the path runs in the same process, whose CPU seconds and peak memory are taken:

1. unpickle: summaries of the results arrive from the workers.
2. build: the step's batch.
3. estimate: advantages by GRPO, and the metrics of the batch.
4. send: what the actor's update sends to each rank, pickled.
5. records: until the trajectories are handed over to what writes them, or written.

With ``--against`` the same runs with the code of another checkout, in turns. Goals hold for 8,192 rows and are scaled
to ``--rows``.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CPU_GOAL, MEMORY_GOAL, FULL = 5.0, 1.0, 8192
SAMPLES, WORKERS, PROMPT, TURN, ANSWER, LONGEST, MEDIAN, SIGMA = 8, 16, 300, 400, 100, 16_000, 2_000, 0.9
PARTS = ("unpickle", "build", "estimate", "send", "records")
OUT_OF_BAND = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=FULL, help="trajectories of the step")
    parser.add_argument("--ranks", type=int, default=8, help="of the actor")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, to compare with")
    parser.add_argument("--pairs", type=int, default=1, help="repetitions of both")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--worker", nargs=2, metavar=("WORK", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work, folder = options.worker
        {"make": make, "measure": measure}[work](Path(folder), options.rows, options.ranks)
        return
    # Below, for the other checkout may not have it.
    from _report import Figure, report

    def figures() -> Iterator[Figure]:
        checkouts = [Path(__file__).resolve().parents[1], *([options.against.resolve()] if options.against else [])]
        found: dict[Path, list[dict[str, float]]] = {checkout: [] for checkout in checkouts}
        for pair in range(options.pairs):
            for checkout in checkouts[:: -1 if pair % 2 else 1]:
                found[checkout].append(in_checkout(checkout, options))
        share = options.rows / FULL
        goals = {"CPU in all": CPU_GOAL * share, "growth of the peak memory": MEMORY_GOAL * share}
        for checkout, measured in found.items():
            case = f"{options.rows} rows, {options.ranks} ranks" + (", against" if checkout != checkouts[0] else "")
            for name in measured[0]:
                unit = "" if name == "million tokens" else "s" if "CPU" in name else "GiB"
                goal = goals.get(name) if checkout == checkouts[0] else None
                yield Figure(case, name, statistics.median(each[name] for each in measured), unit, goal)

    report("From results to ranks and records", figures(), options.json)


def in_checkout(checkout: Path, options: argparse.Namespace) -> dict[str, float]:
    """The figures of a checkout's code, from processes of its own."""
    environment = os.environ | {"PYTHONPATH": f"{checkout}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with tempfile.TemporaryDirectory() as folder:
        for work in ("make", "measure"):
            own = checkout / ".venv" / "bin" / "python"
            # Its plugins are those of its own environment.
            command = [
                str(own) if own.exists() else sys.executable,
                __file__,
                "--rows",
                str(options.rows),
                "--ranks",
                str(options.ranks),
            ]
            subprocess.run([*command, "--worker", work, folder], env=environment, check=True)
        measured: dict[str, float] = json.loads(Path(folder, "figures.json").read_text())
        return measured


# What agent-loop workers do


def make(folder: Path, rows: int, ranks: int) -> None:
    """Write the results of each worker into a file."""
    from ray import cloudpickle

    chance = random.Random(0)
    for worker in range(WORKERS):
        share = range(worker * rows // WORKERS, (worker + 1) * rows // WORKERS)
        results = what_is_sent([trajectory(chance, number) for number in share])
        buffers: list[Any] = []
        data = cloudpickle.dumps(results, protocol=OUT_OF_BAND, buffer_callback=buffers.append)
        (folder / f"{worker}.pickle").write_bytes(data)
        for number, buffer in enumerate(buffers):
            (folder / f"{worker}.{number}").write_bytes(buffer.raw())


def trajectory(chance: random.Random, number: int) -> Any:
    """A finished trajectory, as a worker returns it."""
    from agentrl_core.api import PolicySpan, RewardResult, Termination
    from agentrl_core.api.tree import Call, Node, Request, Tree, TreePath
    from agentrl_core.rollout import results
    from agentrl_core.rollout.loop_output import TreeRow, adopt

    length = min(max(int(chance.lognormvariate(0, SIGMA) * MEDIAN), PROMPT + 50), LONGEST)
    tree, group = Tree(), random.Random(number // SAMPLES)
    ids = [group.randrange(32_000) for _ in range(PROMPT)]
    messages: list[dict[str, Any]] = [{"role": "user", "content": written(group, ids)}]
    node = Node(None, "prompt", ids, f"<user>{messages[0]['content']}", (messages[0],))
    tree.nodes.append(node)
    left, turns = length - PROMPT, 0
    while left > 0:
        ids = [chance.randrange(32_000) for _ in range(min(TURN, left))]
        log_probs = single([-chance.random() for _ in ids])
        said = {"role": "assistant", "content": written(chance, ids)}
        spans, request = [PolicySpan(3, 0, len(ids))], Request(turns % 4, 0.1, 1e9 + turns, 1.5)
        calls = [Call("search", {"query": "x" * 20}, "y" * 50, start=1e9, seconds=0.1)]
        node = Node(node, "turn", ids, f"{said['content']}<end>", (said,), "", log_probs, spans, "stop",
                    {"temperature": 1.0}, "<end>", request, calls)  # fmt: skip
        tree.nodes.append(node)
        messages.append(said)
        left, turns = left - len(ids), turns + 1
        if left > 0:
            ids = [chance.randrange(32_000) for _ in range(min(ANSWER, left))]
            answer = {"role": "tool", "content": written(chance, ids)}
            node = Node(node, "context", ids, f"<tool>{answer['content']}", (answer,))
            tree.nodes.append(node)
            messages.append(answer)
            left -= len(ids)
    row = TreeRow(TreePath(tree, node.path))
    row.termination, row.trajectory_id, row.num_turns, row.messages = (
        Termination.COMPLETED,
        f"t{number}",
        turns,
        messages,
    )
    row.turn_texts = [each.said for each in tree.turns()]
    row.full_text = "".join(each.text for each in tree.nodes[1:])
    given = {"uid": f"u{number // SAMPLES}", "prompt_index": number // SAMPLES, "sample_index": number % SAMPLES,
             "data_source": "d", "raw_prompt": messages[:1], "reward_model": {"ground_truth": "42"}}  # fmt: skip
    result = results.TrajectoryResult(
        given,
        row.trajectory_id,
        row.termination,
        adopt("loop", tree, row, 32_000),
        RewardResult(chance.random()),
        tree=tree,
    )
    result.reward_input = results.reward_trajectory(result)
    if hasattr(result, "pack"):
        result.pack()
    return result


def what_is_sent(results: list[Any]) -> Any:
    """Summaries; of an earlier version, results as they are."""
    try:
        from agentrl_core.rollout.summaries import summaries
    except ImportError:
        return results
    return summaries(results)


def written(chance: random.Random, ids: list[int]) -> str:
    """About four characters a token."""
    return "".join(f"{token % 999:3d} " for token in ids)


def single(values: list[float]) -> list[float]:
    """As an engine gives them: numbers that float32 holds."""
    from array import array

    return array("f", values).tolist()


# What the driver does


def measure(folder: Path, rows: int, ranks: int) -> None:
    """Write CPU seconds and the growth of the peak memory of each part."""
    from ray import cloudpickle

    from agentrl_core.controller.decorator import registrations
    from agentrl_core.rollout.batching import to_data_proto
    from agentrl_core.rollout.pacing import fewer_collections
    from agentrl_core.trainer import outcomes
    from agentrl_core.trainer.algorithm import Algorithm
    from agentrl_core.trainer.metrics import batch_metrics, signal_metrics, throughput
    from agentrl_core.workers.actor import OPTIONAL_COLUMNS, ActorWorker
    from agentrl_core.workers.micro_batching import narrowed

    figures: dict[str, float] = {}
    start = resident("VmRSS")

    @contextmanager
    def part(name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text(str(OUT_OF_BAND))
        cpu = time.process_time()
        # As `agentrl train` runs.
        with fewer_collections():
            yield
        figures[f"{name}: CPU"] = time.process_time() - cpu
        figures[f"{name}: peak memory"] = resident("VmHWM") - start

    results: list[Any] = []
    with part("unpickle"):
        for worker in range(WORKERS):
            files = sorted(folder.glob(f"{worker}.[0-9]*"), key=lambda file: int(file.suffix[1:]))
            buffers = [file.read_bytes() for file in files]
            results += cloudpickle.loads((folder / f"{worker}.pickle").read_bytes(), buffers=buffers)
        for number, result in enumerate(results):
            result.kept, result.place = There(number // SAMPLES), number % SAMPLES
    with part("build"):
        batch = to_data_proto(results, 0, {"step": 1, "temperature": 1.0, "seed": 0})
    algorithm = Algorithm(config(folder))
    with part("estimate"):
        batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        algorithm.estimate(batch)
        metrics = signal_metrics(batch) | batch_metrics(batch) | throughput(batch, 1.0, 1)
    names = ("old_log_probs", "advantages", *OPTIONAL_COLUMNS)
    sent: dict[int, int] = {}
    most = 0
    with part("send"):
        mode = registrations(ActorWorker)["update"]
        plan = getattr(mode, "dispatch_mode", mode).plan(Ranks(ranks), (narrowed(batch, names),), {})
        for call in plan.calls:
            most = max(most, sum(pickled(cloudpickle, each, sent) for each in call[0]))
    with part("records"):
        pickled(cloudpickle, ("train", what_is_handed(results), outcomes.Credit.of(batch)), {})
    figures["CPU in all"] = sum(figures[f"{name}: CPU"] for name in PARTS)
    figures["growth of the peak memory"] = max(figures[f"{name}: peak memory"] for name in PARTS)
    figures["most that a rank receives"] = most / 2**30
    figures["million tokens"] = metrics["perf/total_num_tokens"] / 1e6
    (folder / "figures.json").write_text(json.dumps(figures))


class There:
    """Stands for the place in Ray's store of a group's trajectories."""

    def __init__(self, number: int) -> None:
        self.reference = number.to_bytes(28)


def what_is_handed(results: list[Any]) -> Any:
    """References; of an earlier version, results as they are."""
    try:
        from agentrl_core.rollout.summaries import handed
    except ImportError:
        return results
    return handed(results)


def config(folder: Path) -> Any:
    from agentrl_core.config import load_config

    file = folder / "config.json"
    loops = [{"name": "single_turn"}]
    file.write_text(json.dumps({
        "model": {"path": str(folder)}, "data": {"train_files": ["none.jsonl"]},
        "rollout": {"n": SAMPLES, "agent": {"loops": loops}}, "reward": {"functions": [{"name": "exact_match"}]},
    }))  # fmt: skip
    return load_config(file, check_files=False)


class Ranks:
    """A worker group on Ray, as far as a dispatch mode asks for it."""

    auto_padding, pickles = False, True

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def sharing(self) -> list[Any]:
        """How an update goes through the batch."""
        from agentrl_core.workers.shares import Sharing

        return [Sharing(epochs=1, mini_batches=4, by_prefix=True)]


def pickled(cloudpickle: Any, value: Any, sent: dict[int, int]) -> int:
    """The bytes of a value, which Ray would copy into its store once."""
    if id(value) not in sent:
        total = 0

        def count(buffer: Any) -> None:
            nonlocal total
            # Ray copies it.
            total += len(bytes(buffer.raw()))

        data = cloudpickle.dumps(value, protocol=OUT_OF_BAND, buffer_callback=count)
        sent[id(value)] = total + len(data)
    return sent[id(value)]


def resident(name: str) -> float:
    """Memory of this process in GiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 2**20


if __name__ == "__main__":
    main()
