"""Predicted peaks of memory against those of real updates on the CPU.

    OMP_NUM_THREADS=1 python benchmarks/plan.py [--largest]

Prints a table. ``--largest`` adds a model of about 100 million parameters.
"""

import argparse
import sys
from itertools import product

from _plan_cases import Case, config_of, measured_peak, predicted_peak

SIZES = {"1M": (128, 3), "8M": (256, 8), "30M": (512, 8)}
LARGEST = {"100M": (768, 12)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", action="store_true")
    sizes = SIZES | (LARGEST if parser.parse_args().largest else {})
    sys.stdout.write("| model | rows | checkpointing | ranks | predicted MiB | measured MiB | difference |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|\n")
    for (name, (width, layers)), packing, checkpointing, ranks in product(
        sizes.items(), (False, True), (False, True), (1, 4)
    ):
        with config_of(Case(width, layers, packing, checkpointing, ranks)) as config:
            predicted, measured = predicted_peak(config, ranks), measured_peak(config, ranks)
        rows = "packed" if packing else "padded"
        sys.stdout.write(
            f"| {name} | {rows} | {'yes' if checkpointing else 'no'} | {ranks} | {predicted / 2**20:.1f} | "
            f"{measured / 2**20:.1f} | {predicted / measured - 1:+.1%} |\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
