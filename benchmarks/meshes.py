"""The mesh that agentrl plan proposes for models and clusters.

    OMP_NUM_THREADS=1 python benchmarks/meshes.py [--write] [MODEL ...]

Prints a table; ``--write`` puts it into docs/training-on-many-gpus.md. Without models: all of them.
"""

import argparse
import sys
from itertools import product
from pathlib import Path

from _plan_documented import PAGE as FILES
from _plan_documented import config_in

from agentrl_plan.devices import DEVICES, GIB
from agentrl_plan.meshes import Tried, best_mesh, in_seconds, with_options
from agentrl_plan.prediction import predict

GPU = "h100-80g"
PER_NODE = 8
GPUS = (1, 8, 64, 256)
MODELS = {"Qwen2.5-0.5B": 1, "Qwen3-8B": 1, "Qwen3-30B-A3B": 2, "Llama-3.3-70B": 4, "Qwen3-235B-A22B": 16}
"""GPUs of an engine replica."""
ROWS = ("data.batch_size=128", "rollout.n=8")
PAGE = Path(__file__).parents[1] / "docs/training-on-many-gpus.md"
START, END = "<!-- benchmarks/meshes.py -->\n", "<!-- end -->\n"
HEAD = "| model | GPUs | mesh | GiB | time, at least | FSDP2 alone |\n" + 6 * "|---" + "|\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = HEAD
    sys.stdout.write(HEAD)
    for model, gpus in product(arguments.models or MODELS, GPUS):
        rows += (row := _row(model, gpus))
        sys.stdout.write(row)
        sys.stdout.flush()
        if arguments.write:
            before, _, rest = PAGE.read_text().partition(START)
            PAGE.write_text(f"{before}{START}{rows}{END}{rest.partition(END)[2]}")


def _row(model: str, gpus: int) -> str:
    nodes, engine = max(gpus // PER_NODE, 1), min(MODELS[model], gpus)
    keys = (
        *ROWS, f"cluster.nodes={nodes}", f"cluster.processes_per_node={gpus // nodes}",
        f"rollout.engine.tensor_parallel={engine}", f"rollout.engine.nodes={max(engine // PER_NODE, 1)}",
    )  # fmt: skip
    with config_in(FILES, model, True, keys) as config:
        tried, _ = best_mesh(config, lambda options: predict(with_options(config, options), DEVICES[GPU]))
    best, plain = tried[0], next(each for each in tried if not _split(each))
    if not best.prediction.fits:
        return f"| {model} | {gpus} | does not fit | {best.peak / GIB:.0f} | | {_alone(plain)} |\n"
    mesh = ", ".join(f"`{name}={value}`" for name, value in _split(best).items()) or "FSDP2 alone"
    return f"| {model} | {gpus} | {mesh} | {best.peak / GIB:.1f} | {in_seconds(best.seconds)} | {_alone(plain)} |\n"


def _split(tried: Tried) -> dict[str, int]:
    return {name: value for name, value in vars(tried.options).items() if value != 1}


def _alone(plain: Tried) -> str:
    return f"{plain.peak / GIB:.1f} GiB, " + (in_seconds(plain.seconds) if plain.prediction.fits else "does not fit")


if __name__ == "__main__":
    main()
