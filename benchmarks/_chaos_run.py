"""A tiny real run in a process of its own, for faults: its processes by role, its phases, and what it left behind."""

import ctypes
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import yaml

from agentrl_core.api import AgentRLError
from agentrl_core.hosting.processes import family
from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import CHECKPOINT, RunDir, entries, parse_metrics_line

NAME, PROMPTS, SAMPLES = "chaos", 2, 2
PATIENCE = 600.0
"""Seconds for anything to happen, on a machine that does other things too."""
PHASES = ("start", "validation", "rollout", "score", "advantages", "update_actor", "sync_weights", "checkpoint")
PARTS = '''
import hashlib, os, time
from pathlib import Path
from agentrl_core.api import AgentLoopBase, Tool, ToolCall, ToolResponse, ToolResult, Tracker, function_schema
from agentrl_testing.scripted_config import ScriptedConfig
from agentrl_testing.scripted_engine import ScriptedEngine

FOLDER = Path({folder!r})


def mark(role):
    """Say which role this child process has."""
    (FOLDER / "pids" / f"{{role}}-{{os.getpid()}}").touch()


class Letters(ScriptedEngine):
    """Eight letters that are a function of the request."""
    capabilities = frozenset({{"logprobs", "weight_update", "live_update", "sessions"}})

    def __init__(self, config, context):
        super().__init__(ScriptedConfig(log_prob=-4.0), context, script=self.answer)

    def answer(self, request_id, turn, prompt_ids):
        return [33 + byte % 60 for byte in hashlib.sha256(f"{{request_id}}/{{turn}}".encode()).digest()[:8]]


class Talk(AgentLoopBase):
    """A turn, a call of the tool whatever the turn says, and another turn."""
    capabilities = frozenset({{"tools"}})

    async def run(self, sampling_params, *, session, raw_prompt, **row):
        tools = await session.open_tools()
        trajectory = session.trajectory(raw_prompt, tools=tools)
        await trajectory.generate({{**sampling_params, "max_tokens": 6}})
        outcome = await session.call_tool(ToolCall("look", {{}}, id="0"))
        trajectory.add_messages([outcome.message])
        turn = await trajectory.generate({{**sampling_params, "max_tokens": 6}})
        return trajectory.finish(turn.termination)


class Look(Tool):
    schema = function_schema("look", "Looks.", {{}})
    isolation = "process"

    async def execute(self, instance_id, parameters, **kwargs):
        mark("tool")
        return ToolResult(ToolResponse("nothing to see"))


def score(trajectory):
    mark("reward")
    text = trajectory.model_text
    return sum(letter.islower() for letter in text) / max(len(text), 1)


class Phases(Tracker):
    """Writes down what the run does now."""

    def log(self, metrics, step):
        pass

    def progress(self, phase, done=0, total=0):
        if phase:
            with open(FOLDER / "phase", "a") as file:
                file.write(phase + "\\n")


class Sleeps(Tracker):
    """Never comes back."""

    def log(self, metrics, step):
        time.sleep(1e6)
'''
START = """
import os, signal, sys
os.setsid()
# nohup, under which the script may run, ignores it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.chdir({folder!r})
os.environ.update({environment!r})
output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
os.dup2(output, 1)
os.dup2(output, 2)
sys.stdout = open(1, "w", closefd=False)
sys.stderr = open(2, "w", closefd=False)
from _chaos_run import obey_permissions
obey_permissions()
sys.argv = ["agentrl", *{arguments!r}]
import agentrl_core.cli.main
from agentrl_core.trainer import trackers
trackers.DEADLINE_SECONDS = {tracker_deadline!r}
agentrl_core.cli.main.main()
"""


class ChaosRun:
    """The files of one run, and the process that trains it.

    Args:
        folder: new; its path must be short, because Ray puts sockets there.
        steps: of the whole run.
        changes: of the configuration, by dotted key.
    """

    def __init__(self, folder: Path, steps: int, changes: Mapping[str, Any]) -> None:
        from agentrl_testing.tiny_model import save_tiny_model

        self.folder, self.steps = folder, steps
        for name in ("pids", "tmp"):
            (folder / name).mkdir(parents=True)
        save_tiny_model(folder / "model", initializer_range=0.1)
        (folder / "parts.py").write_text(PARTS.format(folder=str(folder)))
        rows = [
            {"prompt": [{"role": "user", "content": f"say {i}"}], "data_source": "tiny",
             "reward_model": {"ground_truth": "1"}}
            for i in range(6)
        ]  # fmt: skip
        for split in ("train", "validation"):
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "config.yaml").write_text(yaml.safe_dump(_with(_config(steps), changes)))
        output_dir = Path(changes.get("trainer.output_dir", "runs"))
        self.run_dir = RunDir(folder / output_dir / NAME)
        self.process: BaseProcess | None = None

    def start(self, *arguments: str, tracker_deadline: float = 120.0) -> None:
        """Begin to train; ``--resume`` continues."""
        (self.folder / "phase").unlink(missing_ok=True)
        temporary = str(self.folder / "tmp")
        environment = {"TMPDIR": temporary, "RAY_TMPDIR": str(self.folder / "ray"), "OMP_NUM_THREADS": "1",
                       "COLUMNS": "1000", "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
        code = START.format(
            folder=str(self.folder), environment=environment, arguments=("train", "config.yaml", *arguments),
            tracker_deadline=tracker_deadline,
        )  # fmt: skip
        # The process may have the same id as one that is gone.
        for file in (self.folder / "pids").iterdir():
            file.unlink()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["agentrl_core.trainer", "agentrl_core.cli.train"])
        self.process = context.Process(target=exec, args=(code, {"__name__": "chaos"}))
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process is not None and self.process.pid is not None, "it has been started"
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.is_alive()

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace") if (self.folder / "output").exists() else ""

    def wait(self) -> int:
        """The exit code; negative: of a signal."""
        assert self.process is not None, "it has been started"
        self.process.join(PATIENCE)
        if self.process.exitcode is None:
            raise TimeoutError(
                f"the run in {self.folder} still runs after {PATIENCE:g} s; its output:\n{self.output()}"
            )
        return self.process.exitcode

    def until(self, ready: Any, what: str) -> bool:
        """Wait until ``ready()`` is true; False if the process ended before."""
        end = time.monotonic() + PATIENCE
        while not ready():
            if not self.is_running:
                return bool(ready())
            if time.monotonic() > end:
                raise TimeoutError(f"{what} has not come within {PATIENCE:g} s; the output:\n{self.output()}")
            time.sleep(0.003)
        return True

    def phases(self) -> list[str]:
        """What the run has done since it was started."""
        with suppress(FileNotFoundError):
            return (self.folder / "phase").read_text().split()
        return []

    def until_phase(self, phase: str, delay: float) -> bool:
        """Wait until this phase begins again, and then for ``delay`` seconds; False if the run ended before."""
        if phase != "start":
            before = self.phases().count(phase)
            if not self.until(lambda: self.phases().count(phase) > before, f"the phase {phase}"):
                return False
        time.sleep(delay)
        return self.is_running

    def step(self) -> int:
        """The last finished step."""
        state = self.run_dir.read_state()
        return -1 if state is None else state.step

    def pids(self, role: str) -> list[int]:
        """Living processes of a role: ``driver``, ``tool``, ``reward``, a name of Ray's, or an actor's class."""
        if role == "driver":
            return [self.pid]
        if role in ("tool", "reward"):
            marks = (self.folder / "pids").glob(f"{role}-*")
            found = {int(each.name.rpartition("-")[2]) for each in marks}
            return sorted(found & family(self.pid))
        return sorted(pid for pid in family(self.pid) if _names(pid, role))


def process_name(run: ChaosRun, pid: int) -> str:
    """``driver``, ``tool``, ``reward``, or the name of its program."""
    for role in ("driver", "tool", "reward"):
        if pid in run.pids(role):
            return role
    name = Path(_command(pid).split(" ")[0]).name
    # Ray adds the method that runs now.
    return name.partition(".")[0] or "a process that has ended"


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies, so that none can hide."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def obey_permissions() -> None:
    """Give up root's right to write where the permissions say no, so that a read-only directory is one for root too."""
    libc, all_of_it = ctypes.CDLL(None), (ctypes.c_uint32 * 6)()
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    cap_dac_override, cap_dac_read_search = 1, 2
    if libc.capget(header, all_of_it) == 0:
        all_of_it[0] &= ~(1 << cap_dac_override | 1 << cap_dac_read_search)
        libc.capset(header, all_of_it)


def left_processes(own: set[int]) -> list[str]:
    """The command lines of all descendants that are not in ``own``; the dead ones are reaped."""
    found = []
    for pid in family(os.getpid()) - own - {os.getpid()}:
        with suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "Z":
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            else:
                found.append(f"{pid} {_command(pid)[:80]}")
    return found


def shared_memory(pids: set[int]) -> set[str]:
    """Names in /dev/shm that these processes have mapped or opened."""
    names = set()
    for pid in pids:
        lines = _open_files(pid)
        with suppress(OSError):
            lines += Path(f"/proc/{pid}/maps").read_text().splitlines()
        names |= {path.partition("/dev/shm/")[2] for path in lines if "/dev/shm/" in path}
    return {name for name in names if not name.endswith("(deleted)")}


def listening(pids: set[int]) -> dict[str, str]:
    """The sockets at which these processes listen: address by inode."""
    held = {link for pid in pids for link in _open_files(pid)}
    return {inode: address for inode, address in _listening().items() if f"socket:[{inode}]" in held}


def still_open(sockets: Mapping[str, str]) -> list[str]:
    """The addresses of those sockets at which somebody listens still, whoever it is."""
    return sorted(sockets[inode] for inode in sockets.keys() & _listening().keys())


def unreadable(run: RunDir, *, ended: bool) -> list[str]:
    """What of a run directory cannot be read; after a run that ``ended`` by itself also what no run should leave."""
    problems = []
    for folder in [run, *map(RunDir, _superseded(run))]:
        for file in [*folder.path.glob("*.json"), *folder.checkpoints_dir.glob("step-*/*.json")]:
            with _noted(problems, file):
                json.loads(file.read_bytes())
        for file in folder.rollouts_dir.glob("[!.]*"):
            with _noted(problems, file):
                list(read_rollouts(file))
        for _, path in entries(folder.checkpoints_dir, CHECKPOINT):
            with _noted(problems, path):
                _verify(path)
        lines = folder.metrics_file.read_bytes().split(b"\n") if folder.metrics_file.exists() else []
        cut = [line for line in lines if line and parse_metrics_line(line) is None]
        # A killed process may leave one line half-written; the run that resumes it moves that away.
        if len(cut) > (0 if ended else 1):
            problems.append(f"{len(cut)} unreadable lines in {folder.metrics_file}")
    if ended:
        hidden = [*run.path.glob(".*"), *run.rollouts_dir.glob(".*"), *run.checkpoints_dir.glob(".*")]
        problems += [f"{each} was left behind" for each in hidden if each.name != ".lock"]
    return problems


def lost_or_repeated(run: RunDir, steps: int, staleness: int = 0) -> list[str]:
    """Steps and trajectories of a finished run that are missing or there twice, tokens that are too old, and updates
    that were made twice. Above 0, ``staleness`` lets a step train prompts of others."""
    logged = [row["step"] for row in run.read_metrics()]
    problems = [] if logged == [*range(steps + 1)] else [f"metrics.jsonl has the steps {logged}"]
    found, expected = list[list[str]](), list[list[str]]()
    for step in range(1, steps + 1):
        records = list(read_rollouts(run.rollout_file(step, "train")))
        found.append([record.trajectory_id for record in records])
        expected.append([f"train-{step:06d}-{p:05d}-{s:03d}" for p in range(PROMPTS) for s in range(SAMPLES)])
        ages = [step - 1 - version for record in records for version in record.policy_versions if version >= 0]
        if max(ages) > staleness:
            problems.append(f"step {step} has tokens that are {max(ages)} versions old")
    if staleness:
        found, expected = ([sorted(name for names in each for name in names)] for each in (found, expected))
    problems += [f"the trajectories are {ours}, not {theirs}" for ours, theirs in zip(found, expected, strict=True)
                 if ours != theirs]  # fmt: skip
    rates = {row["step"]: row["actor/lr"] for row in run.read_metrics() if "actor/lr" in row}
    updates = sorted(rates.values(), reverse=True)
    # The learning rate falls with each optimizer step, in a straight line.
    falls = [
        round((before - after) / (updates[0] / steps)) for before, after in zip(updates, updates[1:], strict=False)
    ]
    if list(rates.values()) != updates or set(falls) - {1}:
        problems.append(f"the learning rates are not those of one update a step: {list(rates.values())}")
    return problems


def _open_files(pid: int) -> list[str]:
    """What the descriptors of a process are; those that are closed meanwhile are left out."""
    links = []
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                links.append(os.readlink(descriptor))
    return links


def _listening() -> dict[str, str]:
    """Every listening socket of this network namespace: address, as the kernel writes it, by inode."""
    found = {}
    for protocol in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
            fields, listens = line.split(), "0A"
            if fields[3] == listens:
                host, port = fields[1].split(":")
                found[fields[9]] = f"{protocol} {host}:{int(port, 16)}"
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields, accepts = line.split(maxsplit=7), 0x10000
        if int(fields[3], 16) & accepts:
            found[fields[6]] = f"unix {''.join(fields[7:])}"
    return found


def _verify(checkpoint: Path) -> None:
    from agentrl_core.trainer.checkpoint import checkpoint_path

    checkpoint_path(checkpoint)


class _noted:  # noqa: N801 - used like a function
    def __init__(self, problems: list[str], what: Path) -> None:
        self._problems, self._what = problems, what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, AgentRLError | OSError | ValueError | EOFError):
            self._problems.append(f"{self._what} cannot be read: {error}")
            return True
        return False


def _superseded(run: RunDir) -> Iterator[Path]:
    return run.superseded_dir.glob("*")


def _names(pid: int, role: str) -> bool:
    command = _command(pid)
    return command.startswith(f"ray::{role}") or Path(command.split(" ")[0]).name == role


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _config(steps: int) -> dict[str, Any]:
    return {
        "model": {"path": "model"},
        "data": {
            "train_files": ["train.jsonl"], "validation_files": ["validation.jsonl"], "batch_size": PROMPTS,
            "max_prompt_length": 600,
        },
        "rollout": {
            "engine": {"name": "hf", "health_interval": 0.5, "restarts": 100, "health_timeout": 30.0,
                       "start_timeout": 120.0},
            "agent": {"loops": ["./parts.py:Talk"]}, "n": SAMPLES, "max_response_length": 200, "retries": 5,
            "turn_timeout": 60.0, "trajectory_timeout": 150.0,
        },
        "tools": [{"name": "./parts.py:Look", "timeout": 5.0}],
        "reward": {"functions": [{"name": "./parts.py:score", "timeout": 5.0}], "timeout": 40.0},
        "actor": {"optimizer": {"lr": 1e-3, "schedule": "linear"}},
        "trainer": {
            "name": NAME, "steps": steps, "trackers": ["jsonl", "./parts.py:Phases"],
            "checkpoint": {"interval": 2, "keep": 2}, "validation": {"interval": 5, "max_prompts": 2},
        },
        "cluster": {"device": "cpu"},
    }  # fmt: skip


def _with(tree: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        *above, last = key.split(".")
        section = tree
        for name in above:
            section = section.setdefault(name, {})
        section[last] = value
    return tree
