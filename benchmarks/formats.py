"""How long the tool parsers take for hostile turns: fragments of calls, repeated to the length of a long turn.

python benchmarks/formats.py [--characters 200000] [--every 1] [NAME ...]
"""

import argparse
import importlib.util
import time
from pathlib import Path
from typing import Any

from agentrl_core.api import ToolParser
from agentrl_core.cli._shared import say

CONTRACT = Path(__file__).parents[1] / "plugins/tools/agentrl-tool-parsers/tests/test_contract.py"
PIECES = [
    "{", "[", "(", "<", '"', "'", "\\", "\n", " ", ";", "<think>", "</think>", "[f(", "[f(a=[", '[f(a="', '{"name":',
    '{"name":[', '{"name":\n', '<|"|>', " to=", "<|channel|>", "<|start|>", "<|message|>", "9", "-",
]  # fmt: skip


def fragments(call: str, every: int) -> list[str]:
    """Every head of a call, also with something put behind it."""
    heads = [call[:end] for end in range(1, len(call) + 1, every)]
    return [*PIECES, *heads, *(head + piece for head in heads[:: 7 // every or 1] for piece in PIECES)]


def cpu(parser: ToolParser, text: str, tools: list[dict[str, Any]]) -> float:
    """The least of three CPU times: others' work on the machine only adds."""
    times = []
    for _ in range(3):
        start = time.process_time()
        parser.parse_turn(text, tools)
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("names", nargs="*", metavar="NAME")
    arguments.add_argument("--characters", type=int, default=200_000)
    arguments.add_argument("--every", type=int, default=1, help="try only every n-th head of a call")
    options = arguments.parse_args()
    spec = importlib.util.spec_from_file_location("contract", CONTRACT)
    assert spec is not None and spec.loader is not None, CONTRACT
    contract = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(contract)
    size = options.characters
    say("format            texts  slowest  ratio to a tenth of the text  fragment")
    for name in options.names or sorted(contract.SPECS):
        parser = contract.case(name).make()
        call = contract.WRITERS[name]("look_up", {"query": "weather in Oslo", "days": 3})
        texts = fragments(call, options.every)
        slowest, ratio, text = 0.0, 0.0, ""
        for fragment in texts:
            whole = (fragment * (size // len(fragment) + 1))[:size]
            seconds = cpu(parser, whole, contract.TOOLS)
            if seconds > slowest:
                slowest, text = seconds, fragment
                ratio = seconds / max(cpu(parser, whole[: size // 10], contract.TOOLS), 1e-6)
        say(f"{name:<16}{len(texts):>7}{slowest:>8.3f} s{ratio:>12.1f}                    {text[-40:]!r}")


if __name__ == "__main__":
    main()
