"""The guess-the-number example: its environment keeps the contract, and its script makes a model that plays."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoTokenizer

from agentrl_core.api import EnvironmentContext, NoConfig
from agentrl_core.plugins.resolution import resolve
from agentrl_testing.contracts import EnvironmentCase, EnvironmentContract
from agentrl_testing.contracts.case import PluginContract, run
from agentrl_testing.contracts.environment import play

FOLDER = Path(__file__).parents[2] / "examples/guess_number"
LARGEST, GUESSES = 63, 6


def bisect(task: Mapping[str, Any], seed: int, messages: Sequence[Mapping[str, Any]]) -> list[str]:
    secret, low, high, guesses = Random(seed).randint(0, LARGEST), 0, LARGEST, []
    while not guesses or int(guesses[-1]) != secret:
        guess = (low + high) // 2
        guesses.append(str(guess))
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
    return guesses[:GUESSES]


class Example(EnvironmentCase):
    def make(self) -> Any:
        plugin = resolve("environment", "./environment.py:GuessNumber", base_dir=FOLDER)
        return plugin.build(NoConfig(), EnvironmentContext("GuessNumber"))


CASE = Example(
    resolve("environment", "./environment.py:GuessNumber", base_dir=FOLDER).spec, oracle=bisect, high=0.15, low=0.0
)  # fmt: skip
CHECKS = sorted(name for name in set(dir(EnvironmentContract)) - set(dir(PluginContract)) if name.startswith("test_"))


@pytest.mark.parametrize("check", CHECKS)
def test_the_environment_keeps_the_contract(check: str) -> None:
    getattr(EnvironmentContract(), check)(CASE)


def test_the_environment_has_at_most_forty_lines() -> None:
    assert len((FOLDER / "environment.py").read_text().splitlines()) <= 40


def test_bisection_finds_all_but_one_number() -> None:
    """The optimum of the README."""
    hosted = CASE.hosted()
    found = 0
    for secret in range(LARGEST + 1):
        seed = next(seed for seed in range(100_000) if Random(seed).randint(0, LARGEST) == secret)
        moves = bisect({}, seed, [])
        answers = run(play(CASE, hosted, {}, seed, moves)).answers
        assert len(answers) == len(moves) <= GUESSES, "a number that was found ends the game"
        found += moves[-1] == str(secret)
    assert found == LARGEST


def test_a_guess_earns_most_in_the_middle_and_nothing_outside() -> None:
    hosted = CASE.hosted()
    earned = [run(play(CASE, hosted, {}, 1, [str(guess)])).score for guess in range(LARGEST + 2)]
    assert sorted(earned[31:33]) == sorted(earned)[-2:]
    assert earned[: LARGEST + 1] == pytest.approx(earned[LARGEST::-1])
    assert earned[LARGEST + 1] == 0.0


def test_the_script_makes_a_model_with_a_token_for_each_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("guess_number_prepare", FOLDER / "prepare.py")
    assert spec is not None and spec.loader is not None
    prepare: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    monkeypatch.setattr("sys.argv", ["prepare.py", "--output", str(tmp_path), "--steps", "1"])
    prepare.main()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for number in range(LARGEST + 1):
        assert tokenizer.encode(str(number)) == [number]
    talk = [{"role": "user", "content": "higher 32 63"}]
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert len(ids) == 7
    assert prepare.game(tokenizer, Random(0), LARGEST, 1, 0.0)[0][:7] == tokenizer.encode(
        "<|user|>guess 0 63<|end|><|assistant|>"
    )
