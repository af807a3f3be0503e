"""Kill the training of a LoRA adapter at random moments, resume it, and compare its end with an uninterrupted run.

    OMP_NUM_THREADS=1 python benchmarks/kills.py --kills 20 --steps 40

Both runs train the calculator example with ``rollout.deterministic=true``. Sampled tokens, log-probs, metrics (without
times), the adapter and the training state must be the same bit for bit. Moments are spread over the start of the
process and the first steps after it; ``--seed`` repeats the choice.
"""

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from calculator import prepare
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir

SETTINGS = (
    "model.adapter.rank=8",
    "actor.optimizer.lr=3e-3",
    "rollout.deterministic=true",
    "data.batch_size=4",
    "rollout.n=4",
    "trainer.checkpoint.interval=2",
    "trainer.validation.interval=0",
    "trainer.validation.max_prompts=4",
)


def start(directory: Path, name: str, *options: str) -> subprocess.Popen[str]:
    """``agentrl train`` in a process of its own."""
    agentrl = str(Path(sys.executable).parent / "agentrl")
    command = [agentrl, "train", "config.yaml", *SETTINGS, f"trainer.name={name}", *options]
    return subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def killed(process: subprocess.Popen[str], moments: random.Random) -> tuple[bool, str]:
    """Kill a run within its start, or a moment after one of its next steps; False: it ended before."""
    assert process.stdout is not None
    output, steps = "", moments.randrange(4)
    for line in process.stdout if steps else ():
        output += line
        steps -= line.startswith("step ")
        if not steps:
            break
    time.sleep(moments.uniform(0, 1 if output else 15))
    process.kill()
    output += process.stdout.read()
    return process.wait() < 0, output


def contents(run: RunDir, steps: int) -> dict[str, object]:
    """All that must not depend on kills, by name."""
    found: dict[str, object] = {}
    for row in run.read_metrics():
        for key, value in row.items():
            if key != "time" and not key.startswith(("timing/", "perf/")):
                found[f"step {row['step']}: {key}"] = value
    for step in range(1, steps + 1):
        for number, record in enumerate(read_rollouts(run.rollout_file(step, "train"))):
            found[f"step {step}: trajectory {number}"] = [record.uid, record.response_ids, record.response_logprobs]
    actor = run.checkpoints_dir / "latest" / "actor"
    state = run.path / "state.pt"
    dcp_to_torch_save(actor / "training", state)
    return found | load_file(actor / "adapter_model.safetensors") | torch.load(state)


def differences(one: dict[str, object], other: dict[str, object]) -> list[str]:
    """Names of what differs."""

    def equal(name: str) -> bool:
        a, b = one.get(name), other.get(name)
        return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b

    return [name for name in sorted(one.keys() | other.keys()) if not equal(name)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 1 where the two runs differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-kills"), help="for model, data and runs")
    parser.add_argument("overrides", nargs="*", help="key=value of the configuration")
    options = parser.parse_args(arguments)
    overrides = [f"trainer.steps={options.steps}", *options.overrides]
    work: Path = options.work.resolve()
    if not (work / "data").exists():
        prepare(0, work)
    moments, kills, code = random.Random(options.seed), 0, -1
    while code:
        process = start(work, "killed", *overrides, *(["--resume"] if (work / "runs" / "killed").exists() else []))
        if kills < options.kills:
            was_killed, output = killed(process, moments)
            kills += was_killed
        else:
            output, was_killed = process.communicate()[0], False
        code = process.returncode
        sys.stdout.write(f"kill {kills}: {(output.strip() or '(starting)').splitlines()[-1]}\n")
        if code and not was_killed:
            sys.stdout.write(output)
            return 1
    if start(work, "whole", *overrides).communicate() and not (work / "runs" / "whole" / "checkpoints").exists():
        return 1
    whole, resumed = (contents(RunDir(work / "runs" / name), options.steps) for name in ("whole", "killed"))
    different = differences(whole, resumed)
    sys.stdout.write(f"{kills} kills, {options.steps} steps, {len(whole)} values: {len(different)} differ\n")
    sys.stdout.writelines(f"  {name}\n" for name in different[:20])
    return int(bool(different))


if __name__ == "__main__":
    raise SystemExit(main())
