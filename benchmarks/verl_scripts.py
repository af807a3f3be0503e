"""What `agentrl from-verl` makes of verl's example scripts, as the table of docs/coming-from-verl.md.

    python benchmarks/verl_scripts.py VERL_CHECKOUT examples recipe

reads the shell scripts below these folders whose task has tools, several turns, loops of its own or images. Nothing is
run, and nothing is written. A checkout of verl-recipe belongs into the folder `recipe`.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentrl_compat_verl import keys
from agentrl_compat_verl.conversion import Conversion
from agentrl_compat_verl.convert import convert
from agentrl_compat_verl.reading import Reading, read
from agentrl_core.api import AgentRLError


def of_interest(reading: Reading, result: Conversion) -> bool:
    """Tools, several turns, a loop or images."""
    loop = result.values["rollout.agent.loops"] != ["single_turn"]
    media = "data.image_key" in reading.values or "videos" in result.incomplete
    return loop or media or any(key in reading.values for key in keys.TASK)


def row(script: str, result: Conversion) -> str:
    """One line of the table."""
    lost = [text for text in result.incomplete.values() if text.startswith("no counterpart")]
    ports = re.findall(r"port ([\w.]+) into", " ".join(result.decisions.values()))
    open_points = [f"port `{path.rpartition('.')[2]}`" for path in dict.fromkeys(ports)]
    unknown = [key.rpartition(".")[2] for key, text in result.incomplete.items() if text not in lost]
    open_points += [f"`{key}` is not known" for key in unknown]
    signs = ("the script has several values", "only the running script knows", "is not read")
    open_points += [f"`{key}`" for key, text in result.decisions.items() if any(sign in text for sign in signs)]
    own_program = any("is not read" in text for text in result.decisions.values())
    kind = "no counterpart" if lost else "to decide" if result.incomplete or ports or own_program else "converted"
    slots = [slot if isinstance(slot, str) else slot["name"] for slot in result.values.get("tools", [])]
    tools = ", ".join(f"`{name}`" for name in slots if not name.startswith("./"))
    note = "videos" if "videos" in result.incomplete else "; ".join([*([tools] if tools else []), *open_points])
    return f"| `{script}` | {kind} | {note or '-'} |"


def rows(checkout: Path, folders: Sequence[str]) -> Iterator[str]:
    """One line for each script."""
    for script in sorted(path for folder in folders for path in (checkout / folder).rglob("*.sh")):
        name = str(script.relative_to(checkout))
        try:
            reading = read([str(script)], {"HOME": "~"})
            result = convert(reading)
        except AgentRLError as error:
            if "found no override" not in str(error):
                yield f"| `{name}` | failed | {str(error).splitlines()[-1]} |"
            continue
        if of_interest(reading, result):
            yield row(name, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("folders", nargs="+")
    options = parser.parse_args()
    checkout = options.checkout.absolute()
    os.chdir(checkout)
    sys.stdout.write("| script | result | what is left |\n|---|---|---|\n")
    for line in rows(checkout, options.folders):
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
