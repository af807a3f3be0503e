"""The planner and worker example: its environment keeps the contract, and neither role can make up for the other."""

import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl_core.api import EnvironmentContext, NoConfig, RewardTrajectory
from agentrl_core.plugins.resolution import resolve
from agentrl_testing.contracts import EnvironmentCase, EnvironmentContract
from agentrl_testing.contracts.case import PluginContract, run

FOLDER = Path(__file__).parents[2] / "examples/planner_worker"
MODULES = ("environment", "prepare")
CHECKS = sorted(name for name in set(dir(EnvironmentContract)) - set(dir(PluginContract)) if name.startswith("test_"))


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The example's modules by name, imported as its script imports them."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    yield {name: import_module(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name)
    sys.modules.update(before)


class Example(EnvironmentCase):
    def make(self) -> Any:
        plugin = resolve("environment", "./environment.py:Workshop", base_dir=FOLDER)
        return plugin.build(NoConfig(), EnvironmentContext("Workshop"))


def solved(task: dict[str, int], seed: int, messages: Any) -> list[str]:
    """By hand: part 3 a + b needs operations a and b, and each machine shifts the buttons by one."""
    operations = divmod(task["part"], 3)
    pressed = [("red", "green", "blue")[(number + task["machine"]) % 3] for number in operations]
    return [" ".join(("cut", "drill", "bend")[number] for number in operations), " ".join(pressed)]


@pytest.mark.parametrize("check", CHECKS)
def test_the_environment_keeps_the_contract(check: str) -> None:
    spec = resolve("environment", "./environment.py:Workshop", base_dir=FOLDER).spec
    getattr(EnvironmentContract(), check)(Example(spec, tasks=(0, 5, 26), oracle=solved, high=1.0, low=0.0))


@pytest.mark.parametrize(
    ("said", "made", "planned", "carried_out"),
    [
        (["cut bend", "green red"], 1, 1, 1),
        (["cut bend", "green blue"], 0, 1, 0),
        (["cut drill", "green blue"], 0, 0, 1),
        (["cut drill", "green red"], 1, 0, 0),
        (["cut", None], 0, 0, 0),
        (["cut weld", None], 0, 0, 0),
        (["cut bend cut", None], 0, 0, 0),
        (["cut bend", ""], 0, 1, 0),
    ],
)
def test_a_part_is_made_by_the_right_buttons(
    said: list[str | None], made: float, planned: float, carried_out: float
) -> None:
    """Part 2 is cut and bent; on machine 1 the buttons green, blue and red start cut, drill and bend."""
    spec = resolve("environment", "./environment.py:Workshop", base_dir=FOLDER).spec
    order = run(Example(spec).make().open({"part": 2, "machine": 1}, 0))
    assert (order.agent, order.messages) == ("planner", [{"role": "user", "content": "part 2"}])
    turns = [run(order.reply([{"role": "assistant", "content": text}])) for text in said if text is not None]
    assert [turn.terminate for turn in turns] == [False, True][-len(turns) :]
    if len(turns) == 2:
        assert (turns[0].agent, turns[0].text) == ("worker", f"machine 1 {said[0]}")
    for agent in ("planner", "worker"):
        result = run(order.score(RewardTrajectory([], "", "", "", agent=agent)))
        assert result.score == made, "both get the reward of the team"
        assert result.components == {"planned": planned, "carried_out": carried_out}


@torch.no_grad()
def chances(model: Any, tokenizer: Any, asked: str, words: tuple[str, ...]) -> dict[tuple[str, str], float]:
    """The probability of each pair of words as an answer, with the end after it."""
    message = [{"role": "user", "content": asked}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
    said = list(product(words, repeat=2))
    turns = torch.tensor([[*tokenizer.encode(" ".join(pair)), tokenizer.eos_token_id] for pair in said])
    logits = model(torch.tensor([ids + turn.tolist() for turn in turns])).logits
    log_probs = logits[:, len(ids) - 1 : -1].log_softmax(-1).gather(-1, turns[..., None]).sum((1, 2))
    return dict(zip(said, log_probs.exp().tolist(), strict=True))


def test_neither_role_can_make_up_for_the_other(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the model of the script makes, and what the best planner and the best worker make with it as their partner.

    Both partners answer right with probability 0.7 ** 2. The best planner knows the part, but not the machine; the best
    worker knows plan and machine, but not the part.
    """
    monkeypatch.setattr("sys.argv", ["prepare.py", "--output", str(tmp_path), "--steps", "100"])
    modules["prepare"].main()
    shop = modules["environment"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    parts, machines = [tuple(part) for part in shop.PARTS], list(shop.MACHINES)
    plans = {part: chances(model, tokenizer, f"part {n}", shop.OPERATIONS) for n, part in enumerate(parts)}
    presses = {
        (machine, plan): chances(model, tokenizer, f"machine {machine} {' '.join(plan)}", shop.BUTTONS)
        for machine, plan in product(machines, parts)
    }

    def makes(part: tuple[str, str], machine: int, plan: tuple[str, str]) -> float:
        return presses[machine, plan][tuple(shop.buttons(machine, part))]

    count = len(parts) * len(machines)
    before = sum(plans[part][plan] * makes(part, m, plan) for part, m, plan in product(parts, machines, parts)) / count
    planner = sum(max(sum(makes(part, m, plan) for m in machines) for plan in parts) for part in parts) / count
    # Each pair of buttons makes one part: the worker's best guess is the part for which this plan is said most often.
    worker = sum(max(plans[part][plan] for part in parts) for plan in parts) / len(parts)
    assert planner == pytest.approx(0.49, abs=0.02) and worker == pytest.approx(0.49, abs=0.02)
    # Two wrongs can make a right: a word is right if both are, or if the worker's error undoes the planner's.
    assert before == pytest.approx((0.7**2 + 0.3 * 0.15) ** 2, abs=0.02)
