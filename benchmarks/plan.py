"""Predicted peaks of memory against those of real updates on the CPU.

    OMP_NUM_THREADS=1 python benchmarks/plan.py [--write] [SIZE ...]

Prints a table; ``--write`` puts it into docs/results/plan.md. Without sizes: all of them.
"""

import argparse
import sys
from itertools import product
from pathlib import Path

from _plan_cases import Case, config_of, measured_peak, predicted_peak

SIZES = {"1M": (128, 3), "8M": (256, 8), "30M": (512, 8), "150M": (1024, 12)}
"""Width and layers."""
TOKENS = {"150M": 256}
"""Of a micro-batch; the larger the model, the longer a step takes."""
PAGE = Path(__file__).parents[1] / "docs/results/plan.md"
START, END = "<!-- benchmarks/plan.py -->\n", "<!-- end -->\n"
HEAD = "| model | rows | recomputation | ranks | predicted MiB | measured MiB | difference |\n" + 7 * "|---" + "|\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = HEAD
    sys.stdout.write(HEAD)
    for name, packing, checkpointing, ranks in product(arguments.sizes or SIZES, (False, True), (False, True), (1, 4)):
        rows += (row := _row(name, packing, checkpointing, ranks))
        sys.stdout.write(row)
        sys.stdout.flush()
        if arguments.write:
            before, _, rest = PAGE.read_text().partition(START)
            PAGE.write_text(f"{before}{START}{rows}{END}{rest.partition(END)[2]}")


def _row(name: str, packing: bool, checkpointing: bool, ranks: int) -> str:
    width, layers = SIZES[name]
    tokens = TOKENS.get(name, 1024)
    with config_of(Case(width, layers, packing, checkpointing, tokens=tokens, **_lengths(tokens))) as config:
        predicted, measured = predicted_peak(config, ranks), measured_peak(config, ranks)
    kinds = "packed" if packing else "padded", "yes" if checkpointing else "no"
    figures = f"{predicted / 2**20:.1f} | {measured / 2**20:.1f} | {predicted / measured - 1:+.1%}"
    return f"| {name} | {kinds[0]} | {kinds[1]} | {ranks} | {figures} |\n"


def _lengths(tokens: int) -> dict[str, int]:
    """Four rows of a micro-batch have their full length."""
    return {"prompt": tokens // 4 * 3 // 7, "response": tokens // 4 - tokens // 4 * 3 // 7}


if __name__ == "__main__":
    main()
