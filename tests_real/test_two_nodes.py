"""Two nodes that share no directory train together, with the commands of docs/training-on-many-gpus.md.

    make two-nodes                            # about three minutes on an idle machine
    make two-nodes TWO_NODES_ARGS="--slow"    # and a link that goes down

Each test needs what the one before it has left.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import yaml
from PIL import Image

from agentrl_testing.tiny_model import save_tiny_model
from agentrl_testing.tiny_vision import save_tiny_vision_model
from tests_real.two_nodes import HOME, ROOT, WORK, Node, Relay, missing, two_nodes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200), pytest.mark.skipif(bool(missing()), reason=str(missing()))]

PATIENCE = float(os.environ.get("AGENTRL_TWO_NODES_PATIENCE", "180"))
"""Seconds for a run to do what it is to do; a machine that does other things needs more."""
PAGE = (ROOT / "docs" / "training-on-many-gpus.md").read_text(encoding="utf-8")
SMALL = " --num-cpus=16 --object-store-memory=200000000"
ACTORS = {"training": "ray::Host_actor", "engine": "ray::EngineServer", "agent loop": "ray::AgentLoopWorker"}
PARTS = '''
from agentrl_core.api import AgentLoopBase

class Talk(AgentLoopBase):
    """One turn."""

    async def run(self, sampling_params, *, session, raw_prompt, **row):
        trajectory = session.trajectory(raw_prompt)
        turn = await trajectory.generate({**sampling_params, "max_tokens": 6})
        return trajectory.finish(turn.termination)


def score(trajectory):
    text = trajectory.model_text
    return sum(letter.islower() for letter in text) / max(len(text), 1)
'''
SEEING = '''
import socket

from PIL import Image
from agentrl_core.api import AgentLoopBase

class Show(AgentLoopBase):
    """Two turns; between them the user shows a picture that no other node makes."""

    async def run(self, sampling_params, *, session, raw_prompt, **row):
        trajectory = session.trajectory(raw_prompt)
        await trajectory.generate({**sampling_params, "max_tokens": 4})
        red = 200 if socket.gethostname() == "worker" else 100
        picture = Image.new("RGB", (56, 56), (red, row["prompt_index"], row["sample_index"]))
        said = [await session.image(picture), {"type": "text", "text": "and now?"}]
        assert trajectory.add_messages([{"role": "user", "content": said}])
        turn = await trajectory.generate({**sampling_params, "max_tokens": 4})
        return trajectory.finish(turn.termination)


def seen(trajectory):
    assert len(trajectory.images) == 2
    return sum(map(len, trajectory.images.values())) % 7 + len(trajectory.model_text) % 5
'''
CONFIG: dict[str, Any] = {
    "model": {"path": "model"},
    "data": {"train_files": ["rows.jsonl"], "batch_size": 4, "max_prompt_length": 64},
    "rollout": {
        "agent": {"loops": [{"name": "./parts.py:Talk"}], "num_workers": 2}, "n": 2, "max_response_length": 8,
        "engine": {"name": "hf"},
    },
    "reward": {"functions": [{"name": "./parts.py:score"}], "num_workers": 2},
    "actor": {"optimizer": {"lr": 1e-2}, "micro_batch_tokens": 256},
    "trainer": {
        "name": "two", "steps": 2, "checkpoint": {"interval": 1}, "trackers": [{"name": "jsonl"}],
    },
    "cluster": {"cpu_threads": 1},
}  # fmt: skip


def commands() -> list[str]:
    """The blocks of the page: for the first node, for each other one, and the run."""
    section = PAGE.split("## Several nodes", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```\n(.*?)```", section, re.DOTALL)


class Cluster:
    """Two nodes with Ray as the page starts it.

    Args:
        head: where the run is started.
        worker: the other node.
        relay: between them.
    """

    def __init__(self, head: Node, worker: Node, relay: Relay) -> None:
        self.head, self.worker, self.relay = head, worker, relay
        self.first, self.other, self.train = (each.replace("HEAD", head.address) for each in commands())
        rows = [
            {"prompt": [{"role": "user", "content": f"say {i}"}], "reward_model": {"ground_truth": "1"}}
            for i in range(8)
        ]
        for node in (head, worker):
            # The model is what every node must have; the rest is the driver's.
            save_tiny_model(node.path(f"{WORK}/model"), initializer_range=0.1)
        head.path(f"{WORK}/parts.py").write_text(PARTS)
        head.path(f"{WORK}/rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        head.path(f"{WORK}/config.yaml").write_text(yaml.safe_dump(CONFIG))
        self._start(head, self.first)
        # What the page says to copy.
        token = head.path(f"{HOME}/.ray/auth_token").read_text()
        worker.path(f"{HOME}/.ray").mkdir()
        worker.path(f"{HOME}/.ray/auth_token").write_text(token)
        self.join()

    def _start(self, node: Node, block: str) -> None:
        lines = [f"{line}{SMALL}" if line.startswith("ray start") else line for line in block.splitlines()]
        done = node.run("set -e\n" + "\n".join(lines), PATIENCE)
        assert done.returncode == 0, done.stdout

    def join(self) -> None:
        """Start Ray on the other node."""
        self._start(self.worker, self.other)

    def command(self, changes: str) -> str:
        assert "processes_per_node=8" in self.train
        return f"{self.train.strip().replace('processes_per_node=8', 'processes_per_node=1')} {changes}"

    @contextmanager
    def running(self, changes: str) -> Iterator["subprocess.Popen[str]"]:
        """A run; killed at the end of the block if it is still there."""
        process = self.head.start(self.command(changes))
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def run(self, changes: str) -> "subprocess.CompletedProcess[str]":
        """A run, to its end."""
        return self.head.run(self.command(changes), PATIENCE)

    def metrics(self, name: str = "two") -> list[dict[str, float]]:
        with suppress(OSError):
            lines = self.head.path(f"{WORK}/runs/{name}/metrics.jsonl").read_text().splitlines()
            return [json.loads(line) for line in lines]
        return []


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with two_nodes() as (head, worker, relay):
        yield Cluster(head, worker, relay)


def verified(node: Node, run: str) -> set[str]:
    """The files of a run's newest checkpoint, which are as their checksums say."""
    latest = node.path(f"{WORK}/runs/{run}/checkpoints/latest")
    expected = json.loads((latest / "checksums.json").read_text())
    assert expected == {name: hashlib.sha256((latest / name).read_bytes()).hexdigest() for name in expected}
    return set(expected)


def until(condition: Callable[[], Any], process: "subprocess.Popen[str]") -> None:
    """Wait for it while the run is under way."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.2)


def ended(process: "subprocess.Popen[str]", limit: float) -> str:
    """The output of a run that ends by itself with an error; TimeoutExpired if it hangs."""
    output, _ = process.communicate(timeout=limit)
    assert process.returncode == 1, output
    return str(output)


def test_both_nodes_train_serve_and_roll_out_and_the_checkpoint_is_whole(cluster: Cluster) -> None:
    seen: set[tuple[str, str]] = set()

    def look() -> bool:
        for node in (cluster.head, cluster.worker):
            seen.update((role, node.name) for role, title in ACTORS.items() if node.processes(f"^{title}"))
        return len(seen) == 2 * len(ACTORS)

    with cluster.running("") as process:
        until(look, process)
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    log = cluster.head.path(f"{WORK}/runs/two/log.txt").read_text()
    assert re.search(r"/runs/two: not shared with worker \(10\.93\.0\.2\); checkpoints go over the network", log)
    steps = cluster.metrics()
    assert [row["step"] for row in steps] == [1, 2]
    # The second step's tokens were sampled with weights that an update had changed: they came to both nodes' engines.
    assert all(row["rollout/logprob_gap_max"] < 1e-4 for row in steps), steps
    shards = {name for name in verified(cluster.head, "two") if name.startswith("actor/training/")}
    assert shards == {f"actor/training/{name}" for name in (".metadata", "__0_0.distcp", "__1_0.distcp")}
    assert not list(cluster.worker.path(f"{WORK}/runs/two/checkpoints").iterdir())


def test_a_run_resumes_on_both_nodes_and_weights_come_through_the_store_of_the_actors_node(cluster: Cluster) -> None:
    done = cluster.run("--resume trainer.steps=4 rollout.engine.weight_transfer=host_memory")
    assert done.returncode == 0, done.stdout
    steps = cluster.metrics()
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(row["rollout/logprob_gap_max"] < 1e-4 for row in steps), steps
    assert not list(cluster.worker.path(f"{WORK}/runs/two/checkpoints").iterdir())


def test_images_of_either_node_are_trained_scored_and_kept_by_the_driver(cluster: Cluster) -> None:
    for node in (cluster.head, cluster.worker):
        save_tiny_vision_model(node.path(f"{WORK}/seeing"), initializer_range=0.1)
    rows = [
        {"prompt": "<image>what?", "images": [f"picture{i}.png"], "reward_model": {"ground_truth": "1"}}
        for i in range(4)
    ]
    for i in range(4):
        # Where the run is started only.
        Image.new("RGB", (56, 28), (i, 50, 50)).save(cluster.head.path(f"{WORK}/picture{i}.png"))
    cluster.head.path(f"{WORK}/seeing.py").write_text(SEEING)
    cluster.head.path(f"{WORK}/pictures.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    changes = {
        "model.path": "seeing", "data.train_files": ["pictures.jsonl"], "trainer.name": "seeing",
        "rollout.agent.loops": [{"name": "./seeing.py:Show"}], "rollout.max_response_length": 64,
        "reward.functions": [{"name": "./seeing.py:seen"}], "algorithm.old_log_probs": "actor",
    }  # fmt: skip
    done = cluster.run(" ".join(f"'{key}={json.dumps(value)}'" for key, value in changes.items()))
    assert done.returncode == 0, done.stdout
    steps = cluster.metrics("seeing")
    assert all(row["rollout/logprob_gap_max"] < 1e-4 and row["rollout/failed_fraction"] == 0 for row in steps), steps
    run = cluster.head.path(f"{WORK}/runs/seeing")
    files = {file.name for file in (run / "media").iterdir()}
    lines = [json.loads(line) for file in (run / "rollouts").glob("step-*.jsonl") for line in file.open()]
    names = [name for line in lines for node in line["nodes"] for name in node.get("images", ())]
    assert len(lines) == 16 and len(names) == 32 and set(names) == files
    reds = {Image.open(run / "media" / name).getpixel((0, 0))[0] for name in files}  # type: ignore[index]
    assert {100, 200} <= reds, "agent loops of both nodes have made pictures"
    # The other node has no files of the run; its processes read each image once.
    assert not cluster.worker.path(f"{WORK}/runs/seeing/media").exists()
    assert 0 < sum(row["images/other_hosts"] for row in steps) <= 4 * len(files)


def test_a_node_without_the_model_is_named_with_the_path(cluster: Cluster) -> None:
    model = cluster.worker.path(f"{WORK}/model")
    model.rename(model.with_name("hidden"))
    try:
        done = cluster.run("trainer.name=missing")
    finally:
        model.with_name("hidden").rename(model)
    assert done.returncode, done.stdout
    assert re.search(rf"{WORK}/model' is not a directory on node worker", done.stdout), done.stdout


def test_a_cluster_whose_token_the_driver_does_not_give_says_what_to_set(cluster: Cluster) -> None:
    given = cluster.train.strip().replace("cluster.address=auto", f"cluster.address={cluster.head.address}:6379")
    # Ray asks 20 times, with a second between.
    done = cluster.head.run(f"RAY_NUM_REDIS_GET_RETRIES=2 {given.splitlines()[-1]}", PATIENCE)
    assert done.returncode == 2 and "set RAY_AUTH_MODE=token" in done.stdout, done.stdout


def test_a_slow_network_delays_a_run_and_a_killed_raylet_ends_it(cluster: Cluster) -> None:
    cluster.relay.tell("delay 0.05")
    try:
        with cluster.running("trainer.name=slow trainer.steps=1000") as process:
            until(lambda: len(cluster.metrics("slow")) > 1, process)
            (raylet,) = cluster.worker.processes(r"/raylet/raylet ")
            os.kill(raylet, signal.SIGKILL)
            output = ended(process, PATIENCE)
    finally:
        cluster.relay.tell("delay 0")
    assert cluster.worker.address in output, output
    # What was written before is whole.
    assert "actor/training/__1_0.distcp" in verified(cluster.head, "slow")
    state = json.loads(cluster.head.path(f"{WORK}/runs/slow/state.json").read_text())
    assert state["status"] == "failed"


@pytest.mark.slow
def test_a_link_that_goes_down_ends_the_run_and_the_processes_behind_it(cluster: Cluster) -> None:
    cluster.worker.run("ray stop --force", PATIENCE)
    cluster.other = f"export RAY_gcs_rpc_server_reconnect_timeout_s=20\n{cluster.other}"
    cluster.join()
    try:
        with cluster.running("trainer.name=down trainer.steps=1000") as process:
            until(lambda: len(cluster.metrics("down")) > 1, process)
            cluster.relay.tell("down")
            output = ended(process, PATIENCE)
        # As docs/reliability.md says: packets vanish without an error, so gRPC must notice by itself.
        end = time.monotonic() + 480
        while left := cluster.worker.processes("^ray::"):
            assert time.monotonic() < end, left
            time.sleep(1)
    finally:
        cluster.relay.tell("up")
    assert cluster.worker.address in output, output


def test_the_page_says_what_every_node_must_have() -> None:
    first, other, train = commands()
    assert [line.split()[0] for line in first.splitlines()] == ["export", "ray", "ray"]
    assert "ray start --address=HEAD:6379" in other and "cluster.nodes=2" in train
    for needed in ("model.path", "rollout.engine.python", "Hugging Face", "trainer.output_dir"):
        assert needed in PAGE.split("## Several nodes", 1)[1].split("\n## ", 1)[0]
