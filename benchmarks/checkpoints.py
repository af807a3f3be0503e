"""What checkpoints cost: the time that training waits, the time in the background, bytes on disk, memory, restoring and
`agentrl export`.

1 and 2 processes over gloo hold a dense model with random weights; all of them are trained, or half of its layers are
frozen. AdamW takes a step on made-up gradients, so that moments exist; nothing else of training runs. Each process
takes a checkpoint several times, in the way that a run does: copy, write, checksum, and links to the last one.
Files are cut at 1/16 of the model, so that there are as many as a large model has.
"""

import argparse
import ctypes
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _memory import PeakMemory
from _report import Figure, report, write_markdown

import agentrl_testing.ranks
from agentrl_testing.ranks import on_ranks

FILES = 16
LARGE = {"parameters": 70.6e9, "gpus": 64, "wait": 20.0}
"""Llama 3 70B. Bytes per second: of a copy from a GPU over PCIe 5."""
DISKS = (1e9, 2e9, 5e9)
"""Bytes per second that one process writes."""
GIB, GB = 2**30, 1e9
Times = dict[str, float]


def make_model(folder: Path, mib: int) -> None:
    """A Qwen3 of this size in float32, of 16 layers and more."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    # Of a layer: 12 width². Half a layer are the embeddings.
    width = max(64, round((mib * 2**20 / 4 / (FILES * 12 + 6)) ** 0.5) // 64 * 64)
    config = Qwen3Config(
        vocab_size=3 * width, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=FILES,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, head_dim=64, tie_word_embeddings=False,
        max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_backend(path: str, frozen: bool, rank: int, ranks: int, file_bytes: int) -> Any:
    """The model on this rank, after a step."""
    from agentrl_core.api.training_backend import TrainingContext
    from agentrl_core.config.schema import ActorConfig, ModelConfig
    from agentrl_core.fsdp2 import model_files
    from agentrl_core.fsdp2.backend import Fsdp2
    from agentrl_core.fsdp2.config import Fsdp2Config

    class Half(Fsdp2):
        """`model.freeze` knows the vision tower alone; this freezes half of the layers."""

        def _trained(self, language_model: Any) -> Any:
            for layer in language_model.model.layers[: FILES // 2] if frozen else ():
                layer.requires_grad_(False)
            return super()._trained(language_model)

    model_files.FILE_BYTES = file_bytes
    context = TrainingContext(
        "actor", "tokens", True, path, "model.path", ModelConfig(path=path), ActorConfig(), rank=rank, world_size=ranks,
        longest=32,
    )  # fmt: skip
    backend = Half(Fsdp2Config(), context)
    backend.load()
    for parameter in backend._optimizer.parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    backend.optimizer_step(1e-3, 1.0)
    return backend


def checkpoints(
    rank: int, ranks: int, path: str, frozen: bool, folder: str, repetitions: int, file_bytes: int
) -> tuple[list[Times], list[float]]:
    """Times and bytes of each checkpoint on this rank, and the seconds that each restoring takes."""
    from agentrl_core.fsdp2 import backend as module
    from agentrl_core.runs.atomic import flushed_checksum
    from agentrl_core.trainer.checkpoint import share_files

    backend = make_backend(path, frozen, rank, ranks, file_bytes)
    own = sum(each.nbytes for each in locals_of(backend))
    found, last, names = [], None, list[str]()
    for number in range(repetitions + 1):
        times, target = Times(), Path(folder) / str(number)
        together(ranks)
        give_back()
        with PeakMemory([os.getpid()]) as memory, torch.no_grad():
            backend.last_files = names
            with timed(times, "wait"):
                write = backend.snapshot()
            with timed(times, "background"):
                with timed_calls(module, times, save_model="hub layout", save_training_state="training state"):
                    files = write(str(target))
                with timed(times, "checksums"):
                    for file in files:
                        if (target / file).exists():
                            flushed_checksum(target / file)
        del write
        times |= {"memory": memory.growth, "state": own, "copy": own - (frozen_bytes(backend) if number else 0)}
        names = [*gathered(files, ranks), *backend.kept_files]
        if rank == 0 and last is not None:
            share_files(last, target, backend.kept_files)
        together(ranks)
        times["bytes"] = sum(
            file.stat().st_size for file in target.rglob("*") if file.is_file() and file.stat().st_nlink == 1
        )  # fmt: skip
        together(ranks)
        if rank == 0 and number > 1:
            remove(Path(folder) / str(number - 2))
        found.append(times)
        last = target
    restored = []
    for _ in range(repetitions):
        together(ranks)
        times = Times()
        with timed(times, "restore"):
            backend.restore(str(last))
        restored.append(times["restore"])
    together(ranks)
    backend.close()
    return found, restored


def locals_of(backend: Any) -> Iterator[torch.Tensor]:
    """This rank's parts of weights and moments."""
    return map(local, (*backend._model.parameters(), *backend._optimizer.moments().values()))


def local(tensor: Any) -> torch.Tensor:
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor


def frozen_bytes(backend: Any) -> int:
    return sum(local(each).nbytes for each in backend._model.parameters() if not each.requires_grad)


def remove(folder: Path) -> None:
    for file in sorted(folder.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()


def give_back() -> None:
    """What the allocator keeps of earlier work would hide what the next needs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def together(ranks: int) -> None:
    if ranks > 1:
        dist.barrier()


def gathered(names: Any, ranks: int) -> list[str]:
    parts: list[list[str]] = [list(names)] * ranks
    if ranks > 1:
        dist.all_gather_object(parts, list(names))
    return [name for part in parts for name in part]


@contextmanager
def timed(times: Times, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    times[name] = times.get(name, 0.0) + time.perf_counter() - start


@contextmanager
def timed_calls(module: Any, times: Times, **names: str) -> Iterator[None]:
    """Measure functions of a module, by the names of the figures."""
    kept = {name: getattr(module, name) for name in names}

    def measured(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with timed(times, name):
                return function(*args, **kwargs)

        return call

    for name, figure in names.items():
        setattr(module, name, measured(kept[name], figure))
    yield
    for name, function in kept.items():
        setattr(module, name, function)


def exports(rank: int, ranks: int, base: str, folder: str, repetitions: int, file_bytes: int) -> dict[str, list[Times]]:
    """Seconds and memory of `agentrl export`: of a model, and of an adapter with --merge."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from typer.testing import CliRunner

    from agentrl_core.cli.main import app
    from agentrl_core.fsdp2 import model_files
    from agentrl_core.trainer.checkpoint import CheckpointStore, TrainerState

    model_files.FILE_BYTES = file_bytes
    checkpoint = Path(folder) / "checkpoint"

    def write(target: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(base)
        model.save_pretrained(target / "policies" / "whole")
        lora = LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)
        get_peft_model(model, lora).save_pretrained(target / "policies" / "adapter")
        for name in ("config.yaml", "plugins.lock.json"):
            (target / name).write_text("{}")

    CheckpointStore(checkpoint, 1).save(TrainerState(1, None, None, ""), write)
    found: dict[str, list[Times]] = {"whole": [], "adapter": []}
    for policy, more in {"whole": [], "adapter": ["--merge", "--base", base]}.items():
        for number in range(repetitions):
            give_back()
            times, output = Times(), Path(folder) / f"{policy}-{number}"
            arguments = ["export", str(checkpoint / "latest"), str(output), "--policy", policy, *more]
            with PeakMemory([os.getpid()]) as memory, timed(times, "seconds"):
                result = CliRunner().invoke(app, arguments)
            if result.exit_code:
                raise RuntimeError(result.output)
            found[policy].append(times | {"memory": memory.growth})
            remove(output)
    return found


def measure(mib: int, repetitions: int, most_ranks: int) -> Iterator[Figure]:
    """All figures, the prediction last."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        base = Path(folder) / "model"
        make_model(base, mib)
        nbytes = sum(file.stat().st_size for file in base.glob("*.safetensors"))
        file_bytes = nbytes // FILES
        yield Figure("model", "size in float32", nbytes / GIB, "GiB")
        rates: dict[str, float] = {}
        for ranks in range(1, most_ranks + 1):
            for frozen in (False, True):
                target = Path(folder) / f"{ranks}-{frozen}"
                results = on_ranks(ranks, checkpoints, str(base), frozen, str(target), repetitions, file_bytes)
                case = (
                    f"{ranks} {'process' if ranks == 1 else 'processes'}, {'half frozen' if frozen else 'all trained'}"
                )
                yield from figures_of(case, results)
                if not frozen:
                    rates = rates_of([times for times, _ in results], nbytes)
                remove(target)
        for policy, times in on_ranks(1, exports, str(base), folder, repetitions, file_bytes)[0].items():
            case = "agentrl export" if policy == "whole" else "agentrl export --merge"
            yield Figure(case, "time", middle(times, "seconds"), "s")
            yield Figure(case, "memory, at most", max(each["memory"] for each in times) / GIB, "GiB")
        yield from predicted(rates)


def figures_of(case: str, results: list[tuple[list[Times], list[float]]]) -> Iterator[Figure]:
    """Of a rank the slowest counts; the first checkpoint stands apart from the later ones."""
    slowest = [{name: max(own[number][name] for own, _ in results) for name in results[0][0][number]}
               for number in range(len(results[0][0]))]  # fmt: skip
    first, *later = slowest
    yield Figure(case, "training waits, first", first["wait"], "s")
    yield Figure(case, "training waits, later", middle(later, "wait"), "s")
    yield Figure(case, "in the background, first", first["background"], "s")
    yield Figure(case, "in the background, later", middle(later, "background"), "s")
    for name in ("hub layout", "training state", "checksums"):
        yield Figure(case, f"of these: {name}", middle(later, name), "s")
    yield Figure(case, "new bytes on disk, first", first["bytes"] / GIB, "GiB")
    yield Figure(case, "new bytes on disk, later", later[-1]["bytes"] / GIB, "GiB")
    yield Figure(case, "weights and moments of a process", first["state"] / GIB, "GiB")
    yield Figure(case, "memory next to these, first", first["memory"] / GIB, "GiB")
    yield Figure(case, "memory next to these, later", max(each["memory"] for each in later) / GIB, "GiB")
    yield Figure(case, "of this: the host copy, later", later[0]["copy"] / GIB, "GiB")
    yield Figure(
        case, "restore", statistics.median(max(times) for times in zip(*(own for _, own in results), strict=True)), "s"
    )


def middle(times: list[Times], name: str) -> float:
    return statistics.median(each[name] for each in times)


def rates_of(results: list[list[Times]], nbytes: int) -> dict[str, float]:
    """Bytes per second of rank 0's parts: the model gathered and written, its state written, all of it hashed."""
    later, state = results[0][1:], results[0][0]["state"]
    return {
        "gathering and writing the hub layout": nbytes / middle(later, "hub layout"),
        "writing a process's state": state / middle(later, "training state"),
        "checksums": (nbytes + state) / middle(later, "checksums"),
    }


def predicted(rates: Mapping[str, float]) -> Iterator[Figure]:
    """Of :data:`LARGE`, all trained in float32: weights 4 bytes and moments 8 bytes of each parameter."""
    hub, state = 4 * LARGE["parameters"], 12 * LARGE["parameters"] / LARGE["gpus"]
    case = "PREDICTED, 70B on 64 GPUs"
    yield Figure(case, "a process's copy and its state on disk", state / GB, "GB")
    yield Figure(case, "hub layout, written by the first process", hub / GB, "GB")
    yield Figure(case, "a checkpoint", (hub + LARGE["gpus"] * state) / GB, "GB")
    yield Figure(case, f"training waits, at {LARGE['wait']:.0f} GB/s to the host", state / GB / LARGE["wait"], "s")
    for name, rate in rates.items():
        yield Figure(case, f"rate here: {name}", rate / GB, "GB/s")
    write, store, check = rates.values()
    seconds = hub / write + state / store + (hub + state) / check
    yield Figure(case, "in the background, at the rates here", seconds / 60, "min")
    for disk in DISKS:
        seconds = (hub + state) * (1 / disk + 1 / check)
        yield Figure(case, f"in the background, at {disk / GB:.0f} GB/s to the disk", seconds / 60, "min")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the model in float32")
    parser.add_argument("--repetitions", type=int, default=3, help="checkpoints after the first one")
    parser.add_argument("--ranks", type=int, default=2, help="at most so many processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="and as a page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    agentrl_testing.ranks.DEADLINE = 3600.0
    title = "Checkpoints"
    figures = report(title, measure(options.mib, options.repetitions, options.ranks), options.json)
    if options.markdown is not None:
        write_markdown(options.markdown, title, "python benchmarks/checkpoints.py " + " ".join(sys.argv[1:]), figures)


if __name__ == "__main__":
    main()
