"""Kill, freeze and starve a tiny real run again and again, and see that it keeps its promises.

    python benchmarks/chaos.py --parts local --faults 60
    python benchmarks/chaos.py --parts ray --faults 20
    python benchmarks/chaos.py --parts overlap --faults 60 --signals SIGKILL
    python benchmarks/chaos.py --parts disk --write

Every fault hits a random phase of the run; ``--seed`` repeats the choice. After each one the run goes on, or ends and
is resumed. In the end every step and every trajectory must be there once, every file must be readable, and no process,
port, shared memory or temporary file may be left. Results are written after every fault. ``--write`` puts all results
so far into docs/reliability.md, but for faults of runs that were stopped by hand: what is examined at the end is not
known for them.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from _chaos_run import (
    PHASES,
    ChaosRun,
    adopt_orphans,
    left_processes,
    listening,
    lost_or_repeated,
    send,
    shared_memory,
    still_open,
    unreadable,
)

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
GOES_ON = "the run goes on"
RESUMES = "`--resume` continues from the newest checkpoint"
FAILS = "exit 1 with the reason; " + RESUMES
STOPS = "the step is finished and saved, exit {}; `--resume` continues"


@dataclass(frozen=True)
class Fault:
    """A signal to the processes of a role.

    Args:
        exits: codes with which the run may end; empty: it goes on.
        says: what its output must contain then.
        most: times per start of the run, all signals to this role together; 0: any.
    """

    role: str
    signal: signal.Signals
    promise: str
    exits: tuple[int, ...] = ()
    says: str = ""
    most: int = 0
    resumed_after: float = 0.0

    @property
    def title(self) -> str:
        return f"{self.signal.name} to {ROLES[self.role]}"


@dataclass
class Seen:
    """What one fault did.

    Args:
        examined: whether its run came to its end, and what it left was looked at.
    """

    runtime: str
    fault: str
    promise: str
    phase: str
    outcome: str
    problems: list[str]
    examined: bool = True


@dataclass(frozen=True)
class Results:
    """A file with one line for each fault. What was seen before this start of the script stays in it."""

    path: Path
    before: tuple[str, ...]

    @classmethod
    def at(cls, path: Path) -> "Results":
        path.parent.mkdir(parents=True, exist_ok=True)
        return cls(path, tuple(path.read_text(encoding="utf-8").splitlines()) if path.exists() else ())

    def save(self, seen: Sequence[Seen]) -> None:
        """Write all of ``seen``, of which the last ones may have changed since they were written."""
        lines = [*self.before, *(json.dumps(asdict(each)) for each in seen)]
        new = self.path.with_name(f".{self.path.name}")
        new.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        new.replace(self.path)

    def all(self) -> list[Seen]:
        return [Seen(**json.loads(line)) for line in self.before]


ROLES = {
    "driver": "the driver", "tool": "a tool's process", "reward": "a reward's process",
    "EngineServer": "an engine replica", "AgentLoopWorker": "an agent-loop worker", "RewardWorker": "a reward worker",
    "Host": "a training process", "raylet": "Ray's raylet", "gcs_server": "Ray's GCS",
}  # fmt: skip
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
LOCAL = (
    Fault("driver", KILL, RESUMES, (-signal.SIGKILL,)),
    Fault("driver", signal.SIGTERM, STOPS.format(143), (143,), "the run stops after this step"),
    Fault("driver", signal.SIGINT, STOPS.format(130), (130,), "the run stops after this step"),
    Fault("driver", signal.SIGHUP, STOPS.format(129), (129,), "the run stops after this step"),
    Fault("driver", STOP, GOES_ON + " after SIGCONT", resumed_after=3.0),
    Fault("tool", KILL, GOES_ON + "; the call under way fails"),
    Fault("tool", STOP, GOES_ON + "; the process is killed at the tool's `timeout`"),
    Fault("reward", KILL, GOES_ON + "; the trajectory is scored again"),
    Fault("reward", STOP, GOES_ON + "; the process is killed at the reward's `timeout`"),
)
RAY = (
    Fault("driver", KILL, RESUMES, (-signal.SIGKILL,)),
    Fault("EngineServer", KILL, GOES_ON + "; the replica is restarted with the current weights"),
    Fault(
        "EngineServer",
        STOP,
        GOES_ON + "; the replica is restarted after `health_timeout`, in a weight update after `start_timeout`",
    ),
    Fault("AgentLoopWorker", KILL, GOES_ON + "; the worker is restarted, its trajectories run again", most=3),
    Fault("AgentLoopWorker", STOP, GOES_ON + "; the worker is restarted a minute after `trajectory_timeout`", most=3),
    Fault("RewardWorker", KILL, GOES_ON + "; the worker is restarted", most=3),
    Fault("RewardWorker", STOP, GOES_ON + "; the worker is restarted a minute after `reward.timeout`", most=3),
    Fault("tool", KILL, GOES_ON + "; the call under way fails"),
    Fault("tool", STOP, GOES_ON + "; the process is killed at the tool's `timeout`"),
    Fault("reward", KILL, GOES_ON + "; the trajectory is scored again"),
    Fault("reward", STOP, GOES_ON + "; the process is killed at the reward's `timeout`"),
    Fault("Host", KILL, FAILS, (1,), "the worker process died"),
    Fault("Host", STOP, FAILS, (1,), "the worker process is frozen"),
    Fault("raylet", KILL, FAILS, (1,), "raylet died: the run ends here"),
    Fault("gcs_server", KILL, FAILS, (1,), "gcs_server died: the run ends here"),
)


CHANGES: dict[str, dict[str, object]] = {
    "local": {"cluster.runtime": "local"},
    "ray": {"cluster.runtime": "ray"},
    "overlap": {
        "cluster.runtime": "ray", "rollout.engine.placement": "standalone", "rollout.max_staleness": 4,
        "algorithm.loss": "dppo",
    },
}  # fmt: skip
"""What each part changes of the configuration; ``overlap`` samples while it trains."""


class Chaos:
    """Faults at random moments of one run after the other.

    Args:
        runtime: a key of :data:`CHANGES`.
        work: for the folders of the runs.
        steps: of each run.
        seed: of the choices.
        signals: names of those to send; empty: all.
        save: gets all that was seen so far, after every fault and at the end of every run.
    """

    def __init__(
        self,
        runtime: str,
        work: Path,
        steps: int,
        seed: int,
        signals: Sequence[str],
        save: Callable[[Sequence[Seen]], None],
    ) -> None:
        adopt_orphans()
        self.runtime, self.work, self.steps, self._save = runtime, work, steps, save
        self.random = random.Random(seed)
        kinds = LOCAL if runtime == "local" else RAY
        self.faults = [each for each in kinds if not signals or each.signal.name in signals]
        self.seen: list[Seen] = []
        self._memory: set[str] = set()
        """What the runs of the present folder had in /dev/shm."""
        self._sockets: dict[str, str] = {}
        """At which the present start of the run listened: address by inode."""
        self._own: set[int] = set()
        self._since_start = Counter[str]()

    def run(self, count: int) -> list[Seen]:
        """Send ``count`` faults, each kind once and then mostly kills; let the last run end, and examine it."""
        # A start of Ray takes longer than all other faults together.
        kills = [each for each in self.faults if each.signal == KILL and (self.runtime == "local" or not each.exits)]
        cycle = [*self.faults, *kills, *kills, *kills]
        order = [cycle[number % len(cycle)] for number in range(count)]
        self.random.shuffle(order)
        while order:
            self._one_run(order)
        return self.seen

    def _one_run(self, order: list[Fault]) -> None:
        folder = Path(tempfile.mkdtemp(prefix="c", dir=self.work))
        run = ChaosRun(folder / "r", self.steps, CHANGES[self.runtime])
        first = len(self.seen)
        try:
            self._start(run)
            self._own, self._since_start = family_of_this(), Counter[str]()
            while order and run.is_running:
                # A worker is restarted three times in a run: more of these wait until the run was resumed.
                fault = next(
                    (each for each in order if not each.most or self._since_start[each.role] < each.most), None
                )
                if fault is None:
                    break
                if self._hit(run, fault):
                    order.remove(fault)
                    self._save(self.seen)
            code = run.wait()
            problems = [] if code == 0 else [f"the run ended with {code}: {run.output()[-2000:]}"]
            staleness = int(str(CHANGES[self.runtime].get("rollout.max_staleness", 0)))
            problems += lost_or_repeated(run.run_dir, self.steps, staleness) if code == 0 else []
            problems += unreadable(run.run_dir, ended=code == 0) + self._left(run)
        except Exception as error:
            # A run that hangs is what the last fault did.
            for seen in self.seen[first:][-1:]:
                seen.outcome = seen.outcome or "the run hangs"
                seen.problems.append(str(error))
            raise
        finally:
            if run.is_running:
                send([run.pid], signal.SIGKILL)
            self._save(self.seen)
        if len(self.seen) == first:
            raise RuntimeError(f"a run ended before any fault: {run.output()[-2000:]}")
        self.seen[-1].problems += problems
        for seen in self.seen[first:]:
            seen.examined = True
        self._save(self.seen)
        report(f"a run of {self.steps} steps ended: {problems or 'all is there, once'}")
        if not problems:
            shutil.rmtree(folder)

    def _hit(self, run: ChaosRun, fault: Fault) -> bool:
        """Send one fault in a random phase; False if the run ended before."""
        phase = self.random.choice(PHASES)
        if fault.exits != (-signal.SIGKILL,):
            # Before the first step there is nothing to finish or to go on with.
            phase = "rollout" if phase == "start" else phase
            if not run.until(lambda: "score" in run.phases(), "the first step"):
                return False
        delay = self.random.uniform(0, 2.0 if phase == "start" else 0.05)
        if not run.until_phase(phase, delay):
            return False
        if not run.until(lambda: run.pids(fault.role), fault.title):
            return False
        living = family_of(run)
        self._memory |= shared_memory(living)
        self._sockets |= listening(living)
        # The run holds still meanwhile: the steps that follow must be ones after the fault, and it must not be over.
        send([run.pid], signal.SIGSTOP)
        hit, before = run.pids(fault.role), run.step()
        if not hit or not run.is_running or before >= self.steps:
            send([run.pid], signal.SIGCONT)
            return False
        send(hit, fault.signal)
        time.sleep(fault.resumed_after)
        send([run.pid], signal.SIGCONT)
        seen = Seen(self.runtime, fault.title, fault.promise, phase, "", [], examined=False)
        self.seen.append(seen)
        self._since_start[fault.role] += 1
        if fault.exits:
            self._resume(run, fault, seen, before)
        else:
            # The step under way may not need the process any more; the one after the next does.
            aim = min(before + 3, self.steps)
            went_on = run.until(lambda: run.step() >= aim, "the next steps")
            seen.outcome = GOES_ON if went_on else "the run ended"
            if fault.signal == KILL and (alive := set(hit) & set(run.pids(fault.role))):
                seen.problems.append(f"{alive} still live")
            if not went_on:
                seen.problems.append(f"the run ended: {run.output()[-2000:]}")
        report(f"{len(self.seen)}: {fault.title} in {phase}: {seen.outcome} {' '.join(seen.problems)}")
        return True

    def _resume(self, run: ChaosRun, fault: Fault, seen: Seen, before: int) -> None:
        code = run.wait()
        if code == 0:
            # With the last step there is nothing to resume.
            seen.outcome = "the last step was under way"
            if before < self.steps - 1:
                seen.problems.append(f"it ran on from step {before}: {run.output()[-2000:]}")
            return
        output = run.output()
        if code not in fault.exits:
            seen.problems.append(f"exit {code}, not {fault.exits}: {output[-2000:]}")
        if fault.says not in output:
            seen.problems.append(f"its output does not say {fault.says!r}: {output[-2000:]}")
        seen.problems += unreadable(run.run_dir, ended=False) + self._left(run)
        had = run.step()
        self._start(run, "--resume")
        self._since_start.clear()
        begun = run.until(lambda: run.step() >= max(had - 2, 0) and "rollout" in run.phases(), "the resumed run")
        seen.outcome = f"exit {code}, resumed" if code > 0 else "resumed"
        if not begun and run.wait() != 0:
            seen.problems.append(f"it could not be resumed: {run.output()[-2000:]}")

    def _start(self, run: ChaosRun, *arguments: str) -> None:
        """Start the run; again where the machine is so busy that Ray gives up its own start."""
        for _ in range(5):
            run.start(*arguments)
            if self.runtime == "local":
                return
            busy = "Ray cannot be started: The current node timed out"
            if run.until(lambda: "phase" in {file.name for file in run.folder.iterdir()}, "the first phase"):
                return
            if busy not in run.output():
                return
            report("Ray did not start within its 30 s; trying again")

    def _left(self, run: ChaosRun) -> list[str]:
        """What a run that has ended left: processes, ports, temporary files and shared memory.

        Ray ends its own processes within two minutes.
        """
        end = time.monotonic() + (30 if self.runtime == "local" else 180)
        while (processes := left_processes(self._own)) and time.monotonic() < end:
            time.sleep(0.2)
        ports = still_open(self._sockets)
        self._sockets.clear()
        temporary = [str(file) for file in (run.folder / "tmp").rglob("*") if not file.is_dir()]
        # What a killed run left is removed by the next start of a run.
        memory = self._memory if run.process is not None and run.process.exitcode == 0 else ()
        shared = [name for name in memory if Path("/dev/shm", name).exists()]
        return [f"left behind: {each}" for each in [*processes, *ports, *temporary, *shared]]


class Disk:
    """Faults of the directory that a run writes to; each with a run of its own on the local runtime."""

    def __init__(self, work: Path, save: Callable[[Sequence[Seen]], None]) -> None:
        adopt_orphans()
        self.work, self._save = work, save

    def run(self) -> list[Seen]:
        seen: list[Seen] = []
        for case in (self.full, self.read_only, self.deleted, self.hung_tracker):
            seen.append(case())
            self._save(seen)
        return seen

    def full(self) -> Seen:
        """A disk with room for three checkpoints."""
        seen = Seen("local", "full disk", FAILS, "any", "", [])
        with self._mounted("size=1500k") as (run, enlarge):
            run.start()
            self._failed(run, seen, "no space left")
            enlarge()
            self._finish(run, seen)
        return seen

    def read_only(self) -> Seen:
        """A run directory in which nothing can be written any more."""
        seen = Seen("local", "read-only directory", FAILS, "any", "", [])
        run = ChaosRun(Path(tempfile.mkdtemp(prefix="c", dir=self.work)) / "r", 40, {})
        run.start()
        run.until(lambda: run.step() >= 3, "step 3")
        folders = [run.run_dir.path, run.run_dir.rollouts_dir, run.run_dir.checkpoints_dir]
        for folder in folders:
            folder.chmod(0o555)
        self._failed(run, seen, "permission denied")
        for folder in folders:
            folder.chmod(0o755)
        self._finish(run, seen)
        return seen

    def deleted(self) -> Seen:
        """A run directory that is deleted under the run."""
        seen = Seen("local", "run directory deleted", "exit 1 with the reason", "any", "", [])
        run = ChaosRun(Path(tempfile.mkdtemp(prefix="c", dir=self.work)) / "r", 40, {})
        run.start()
        run.until(lambda: run.step() >= 3, "step 3")
        while run.run_dir.path.exists() and run.is_running:
            shutil.rmtree(run.run_dir.path, ignore_errors=True)
        self._failed(run, seen, str(run.run_dir.path))
        return seen

    def hung_tracker(self) -> Seen:
        """A tracker that never returns, with a deadline of two seconds in place of two minutes."""
        seen = Seen("local", "hung tracker", GOES_ON + " without it after two minutes", "any", "", [])
        trackers = {"trainer.trackers": ["./parts.py:Sleeps", "jsonl", "./parts.py:Phases"]}
        run = ChaosRun(Path(tempfile.mkdtemp(prefix="c", dir=self.work)) / "r", 4, trackers)
        run.start(tracker_deadline=2.0)
        code, said = run.wait(), "Sleeps' failed"
        seen.outcome = GOES_ON if code == 0 else f"exit {code}"
        if code or said not in run.output():
            seen.problems.append(f"exit {code}: {run.output()[-2000:]}")
        seen.problems += lost_or_repeated(run.run_dir, 4)
        return seen

    @contextmanager
    def _mounted(self, options: str) -> Iterator[tuple[ChaosRun, Callable[[], None]]]:
        folder = Path(tempfile.mkdtemp(prefix="c", dir=self.work)) / "r"
        run = ChaosRun(folder, 40, {"trainer.output_dir": "disk"})
        disk = folder / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], check=True)

        def enlarge() -> None:
            subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)

        try:
            yield run, enlarge
        finally:
            if run.is_running:
                send([run.pid], signal.SIGKILL)
                run.wait()
            subprocess.run(["umount", "-l", disk], check=True)

    def _failed(self, run: ChaosRun, seen: Seen, says: str) -> None:
        code, output = run.wait(), run.output()
        seen.outcome = f"exit {code}"
        if code != 1 or says.lower() not in output.lower():
            seen.problems.append(f"exit {code}, and does it say {says!r}? {output[-2000:]}")
        if len(output.splitlines()) > 60:
            seen.problems.append(f"its output has {len(output.splitlines())} lines")
        report(f"{seen.fault}: {seen.outcome} {' '.join(seen.problems)}")

    def _finish(self, run: ChaosRun, seen: Seen) -> None:
        run.start("--resume")
        code = run.wait()
        seen.outcome += ", resumed" if code == 0 else ""
        problems = lost_or_repeated(run.run_dir, 40) if code == 0 else [f"not resumed: {run.output()[-2000:]}"]
        seen.problems += problems + unreadable(run.run_dir, ended=True)
        report(f"{seen.fault}: {seen.outcome} {' '.join(seen.problems)}")


def family_of(run: ChaosRun) -> set[int]:
    from agentrl_core.hosting.processes import family

    return family(run.pid)


def family_of_this() -> set[int]:
    """The helper processes of multiprocessing: descendants that belong to no run."""
    from agentrl_core.hosting.processes import family

    names = ("forkserver", "resource_tracker")
    with_command = {pid: Path(f"/proc/{pid}/cmdline") for pid in family(os.getpid())}
    return {pid for pid, file in with_command.items() if file.exists() and any(n in file.read_text() for n in names)}


def report(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


def table(seen: Sequence[Seen]) -> list[str]:
    """One row for each fault: how often, what was promised, what was seen. Faults without an end are left out."""
    order = [each.title for each in (*LOCAL, *RAY)]
    seen = [each for each in seen if each.examined or each.problems]
    seen.sort(key=lambda each: (each.runtime, order.index(each.fault) if each.fault in order else len(order)))
    lines = ["| runtime | fault | times | promised | as promised | seen |", "|---|---|---|---|---|---|"]
    for runtime, fault, promise in dict.fromkeys((each.runtime, each.fault, each.promise) for each in seen):
        rows = [each for each in seen if (each.runtime, each.fault) == (runtime, fault)]
        outcomes = Counter(each.outcome for each in rows)
        kept = sum(not each.problems for each in rows)
        said = ", ".join(f"{outcome} ({count})" for outcome, count in outcomes.most_common())
        lines.append(f"| {runtime} | {fault} | {len(rows)} | {promise} | {kept} | {said} |")
    return lines


def put_between(page: Path, name: str, lines: Sequence[str]) -> None:
    """Put lines between the marks of this name in the page."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    page.write_text("\n".join([f"{before}{begin}", *lines, f"{end}{after}"]), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=(*CHANGES, "disk"), default=(*CHANGES, "disk"))
    parser.add_argument("--faults", type=int, default=200, help="number of faults in each of the parts but disk")
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--signals", nargs="*", default=(), help="such as SIGKILL: send only these; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("runs/chaos.jsonl"), help="to which results are added")
    parser.add_argument("--write", action="store_true", help="put all results of that file into docs/reliability.md")
    options = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="chaos"))
    seen: list[Seen] = []
    for part in options.parts:
        save = Results.at(options.results).save
        if part == "disk":
            seen += Disk(work, save).run()
        else:
            seen += Chaos(part, work, options.steps, options.seed, options.signals, save).run(options.faults)
    if options.write:
        put_between(PAGE, "faults", table(Results.at(options.results).all()))
    sys.stdout.write("\n".join(table(seen)) + "\n")
    with suppress(OSError):
        work.rmdir()
    return int(any(each.problems for each in seen))


if __name__ == "__main__":
    sys.exit(main())
