import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import textarena
from textarena.envs.registration import ENV_REGISTRY

from agentrl_core.api import ConfigError, Engines, EnvironmentContext, RewardTrajectory
from agentrl_env_textarena.config import GameConfig, TextArenaConfig
from agentrl_env_textarena.environment import TWO_PLAYERS, WORKING, TextArena
from agentrl_env_textarena.game import Game
from agentrl_env_textarena.plugin import ENVIRONMENT
from agentrl_testing.contracts import EnvironmentCase, EnvironmentContract
from agentrl_testing.contracts.case import run

FINISHED = RewardTrajectory([], "", "", "")


def made(games: Mapping[str, GameConfig], **options: Any) -> TextArena:
    return TextArena(TextArenaConfig(games=dict(games), **options), EnvironmentContext("textarena"))


def guess(task: Mapping[str, Any], seed: int, messages: Any) -> list[str]:
    """Python's own generator gives the number that the game draws first."""
    return [f"I say [{random.Random(seed % 2**32).randint(1, 20)}]"]


def hanoi(task: Mapping[str, Any], seed: int, messages: Any) -> list[str]:
    def moved(disks: int, source: str, target: str, spare: str) -> list[str]:
        if not disks:
            return []
        before, after = moved(disks - 1, source, spare, target), moved(disks - 1, spare, target, source)
        return [*before, f"[{source} {target}]", *after]

    return moved(3, "A", "C", "B")


class TestGuess(EnvironmentContract):
    @pytest.fixture
    def plugin(self) -> EnvironmentCase:
        config = TextArenaConfig(games={"GuessTheNumber-v0": GameConfig()}, tasks=10)
        return EnvironmentCase(ENVIRONMENT, config=config, oracle=guess)


class TestHanoi(EnvironmentContract):
    @pytest.fixture
    def plugin(self) -> EnvironmentCase:
        config = TextArenaConfig(games={"TowerOfHanoi-v0": GameConfig()}, tasks=10)
        return EnvironmentCase(ENVIRONMENT, config=config, oracle=hanoi)


class TestGamesThatDrawInEveryMove(EnvironmentContract):
    @pytest.fixture(params=["2048-v0", "Bandit-v0", "Blackjack-v0"])
    def plugin(self, request: pytest.FixtureRequest) -> EnvironmentCase:
        config = TextArenaConfig(games={request.param: GameConfig()}, tasks=10)
        moves = {"2048-v0": ["up", "left", "down", "right"] * 3, "Bandit-v0": ["red"] * 10, "Blackjack-v0": ["Hit"] * 9}
        return EnvironmentCase(ENVIRONMENT, config=config, moves=moves[request.param])


@pytest.mark.parametrize("name", WORKING)
def test_every_game_that_is_said_to_work_is_textarenas_own(name: str) -> None:
    """Against textarena played directly: what it says after a move that is probably invalid, and its reward."""
    game, theirs = Game(name, {}, 5), textarena.make(f"{name}-raw")
    random.seed(5)
    theirs.reset(num_players=1, seed=5)

    def said() -> str:
        return "".join(message for _, message, _ in theirs.get_observation()[1] if isinstance(message, str))

    first = game.news()
    assert first and first.replace("\n", "") == said().replace("\n", "")
    for _ in range(3):
        over, (done, _) = game.step("[no move]"), theirs.step("[no move]")
        assert over == done
        news = said().replace("\n", "").removeprefix("[no move]")
        assert game.news().replace("\n", "") == news
        if done:
            break
    reward, info = game.result()
    rewards, their_info = theirs.close()
    assert info["invalid_move"] == their_info[0]["invalid_move"]
    if rewards is None or isinstance(rewards[0], str):
        assert reward is None or np.isnan(reward)
    else:
        assert reward == rewards[0]


def test_a_game_does_not_touch_the_random_numbers_of_the_process() -> None:
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr, index]
    game = Game("2048-v0", {}, 3)
    game.step("[up]")
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[union-attr, index]


def test_games_in_turns_draw_what_each_alone_draws() -> None:
    """Against textarena alone, whose tiles come from the generator of the process."""
    random.seed(3)
    theirs = textarena.make("2048-v0-raw")
    theirs.reset(num_players=1, seed=3)
    moves = ["[up]", "[left]", "[down]", "[right]"] * 5
    for move in moves:
        theirs.step(move)
    game, other = Game("2048-v0", {}, 3), Game("2048-v0", {}, 4)
    for move in moves:
        random.random()
        game.step(move)
        other.step(move)
    board = theirs.get_observation()[1][-1][1]
    assert game.news().endswith(board) and not other.news().endswith(board)


def test_weights_are_shares_of_the_tasks() -> None:
    environment = made(
        {"2048-v0": GameConfig(3.0), "Set-v0": GameConfig(1.0), "PegJump-v0": GameConfig(2.0)}, tasks=1001
    )
    counts = Counter(task["data_source"] for task in environment.tasks("train"))
    assert sum(counts.values()) == 1001
    assert counts == pytest.approx({"2048-v0": 500.5, "Set-v0": 166.8, "PegJump-v0": 333.7}, abs=1)


def test_a_fixed_seed_gives_a_task_the_same_game_in_every_step() -> None:
    def boards(fixed: int | None, seed: int) -> list[Any]:
        environment = made({"Minesweeper-v0-small": GameConfig(), "Set-v0": GameConfig()}, seed=fixed, tasks=4)
        tasks = [*environment.tasks("train"), *environment.tasks("validation")[-2:]]
        return [run(environment.open(task, seed)).messages for task in tasks if task["data_source"] == "Set-v0"]

    assert boards(7, 1) == boards(7, 2)
    assert boards(None, 1) != boards(None, 2)
    assert len({str(each) for each in boards(7, 1)}) == len(boards(7, 1))


def test_limits_prompts_and_tags() -> None:
    environment = made(
        {"GuessTheNumber-v0": GameConfig(config={"max_number": 3})},
        max_turns=2,
        unfinished=-0.5,
        system_prompt="Move in <answer>.",
        answer_tag="answer",
    )
    episode = run(environment.open(environment.tasks("train")[0], 4))
    secret = random.Random(4).randint(1, 3)
    wrong = secret % 3 + 1
    assert episode.messages[0] == {"role": "system", "content": "Move in <answer>."}

    def turn(text: str) -> Any:
        return run(episode.reply([*episode.messages, {"role": "assistant", "content": text}]))

    first = turn(f"[{secret}]? No: <answer>{secret}</answer> <answer>{wrong}</answer>")
    assert (first.terminate, first.text) == (False, f"The target number is {'lower' if wrong > secret else 'higher'}.")
    assert turn(f"[{secret}] without the tag is no move").terminate
    result = run(episode.score(FINISHED))
    assert result.score == -0.5
    assert result.components == {"finished": 0.0, "invalid_move": 0.0, "turns": 2.0}


def test_a_reward_that_is_no_number_is_a_counted_zero() -> None:
    environment = made({"Cryptarithm-v0": GameConfig()})
    episode = run(environment.open(environment.tasks("train")[0], 0))
    for _ in range(2):
        turn = run(episode.reply([{"role": "assistant", "content": "[nonsense]"}]))
    result = run(episode.score(FINISHED))
    assert turn.terminate
    assert (result.score, result.metrics) == (0.0, {"reward_errors": 1.0})
    assert result.components["invalid_move"] == 1.0


@pytest.mark.parametrize(
    ("games", "message"),
    [
        ({}, "games is empty"),
        ({"GuesTheNumber-v0": GameConfig()}, "no such game; did you mean GuessTheNumber-v0"),
        ({"Go": GameConfig()}, "no such game; there are 2048-v0, "),
        ({"ThreePlayerIPD-v0": GameConfig()}, "only games for one or two players can be played: .* three players"),
        ({"Snake-v0": GameConfig()}, "it is no game for one or two players"),
        ({"Set-v0": GameConfig(config={"cards": 3})}, "games.Set-v0: config does not fit: .*'cards'"),
    ],
)
def test_games_that_cannot_be_played_are_refused(games: dict[str, GameConfig], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(games)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LookupError("Resource words not found. Please use the NLTK Downloader"), "python -m nltk.downloader words"),
        (SyntaxError("f-string: unmatched '['", ("env.py", 25, 1, "")), "does not compile on Python .* line 25"),
        (ValueError("OpenRouter API key not found."), "cannot begin: ValueError: OpenRouter API key not found"),
    ],
)
def test_a_game_that_does_not_work_here_names_the_reason_and_what_works(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def broken(**options: Any) -> None:
        raise error

    monkeypatch.setattr(ENV_REGISTRY["Set-v0"], "entry_point", broken)
    with pytest.raises(ConfigError, match=f"{message}.*GuessTheNumber-v0"):
        made({"Set-v0": GameConfig()})


def test_a_task_of_another_game_says_which_there_are() -> None:
    environment = made({"2048-v0": GameConfig()})
    with pytest.raises(ValueError, match="'Go' is not one of 2048-v0"):
        run(environment.open({"data_source": "Go", "extra_info": {"split": "train", "index": 0}}, 0))


class TestTicTacToe(EnvironmentContract):
    """The first player wins the middle column; moves are those of both."""

    @pytest.fixture
    def plugin(self) -> EnvironmentCase:
        def column(task: Mapping[str, Any], seed: int, messages: Any) -> list[str]:
            return ["[1]", "[0]", "[4]", "[3]", "[7]"]

        config = TextArenaConfig(games={"TicTacToe-v0": GameConfig()}, tasks=10)
        return EnvironmentCase(ENVIRONMENT, config=config, oracle=column)


@pytest.mark.parametrize("name", TWO_PLAYERS)
def test_games_for_two_begin_with_one_of_the_players(name: str) -> None:
    game = Game(name, {}, 5)
    assert game.player in (0, 1) and game.news()
    for _ in range(2):
        if game.step("[no move]"):
            rewards = [game.result(player)[0] for player in (0, 1)]
            assert rewards in ([-1, 1], [1, -1], [0, 0])
            break


def turn(episode: Any, text: str) -> Any:
    return run(episode.reply([{"role": "assistant", "content": text}]))


def scored(agent: str = "") -> RewardTrajectory:
    return RewardTrajectory([], "", "", "", agent=agent)


def test_in_self_play_each_player_reads_its_own_news_and_has_its_own_reward() -> None:
    environment = made({"TicTacToe-v0": GameConfig()})
    episode = run(environment.open(environment.tasks("train")[0], 0))
    assert episode.agent == "player_0" and "You are Player 0" in episode.messages[0]["content"]
    first = turn(episode, "[1]")
    assert first.agent == "player_1" and "You are Player 1" in first.text and "[Player 0] [1]" in first.text
    again = turn(episode, "[1]")
    assert again.agent == "player_1" and "invalid move" in again.text, "who moved wrongly moves again"
    second = turn(episode, "[0]")
    assert second.agent == "player_0" and "[Player 1] [0]" in second.text
    assert "You are Player" not in second.text and "[Player 0]" not in second.text
    assert [turn(episode, move).terminate for move in ("[4]", "[3]", "[7]")] == [False, False, True]
    assert run(episode.score(scored("player_0"))).score == 1
    assert run(episode.score(scored("player_1"))).score == -1


class Column:
    """An opponent that takes the first column from the top, whatever is there."""

    def __init__(self) -> None:
        self.heard: list[list[dict[str, Any]]] = []

    async def chat(self, messages: Any, *, temperature: float = 0.0, max_tokens: int = 512) -> str:
        self.heard.append(list(messages))
        return f"[{(sum(each['role'] == 'assistant' for each in messages)) * 3}]"


def test_an_engine_plays_the_other_side_and_sides_swap_from_task_to_task() -> None:
    opponent = Column()
    context = EnvironmentContext("textarena", engines=Engines({"rival": opponent}))
    config = TextArenaConfig(games={"TicTacToe-v0": GameConfig()}, opponent="rival", system_prompt="Play well.")
    environment = TextArena(config, context)
    even, odd = (run(environment.open(task, 0)) for task in environment.tasks("train")[:2])
    assert even.agent == odd.agent == ""
    assert "You are Player 0" in even.messages[-1]["content"] and "You are Player 1" in odd.messages[-1]["content"]
    assert "[Player 0] [0]" in odd.messages[-1]["content"]
    opponent.heard.clear()
    answers = [turn(even, move) for move in ("[1]", "[4]", "[7]")]
    assert [answer.terminate for answer in answers] == [False, False, True]
    assert "[Player 1] [0]" in answers[0].text and answers[0].agent is None
    assert [message["role"] for message in opponent.heard[1]] == ["system", "user", "assistant", "user"]
    assert run(even.score(scored())).score == 1
    assert [turn(odd, move).terminate for move in ("[1]", "[4]")] == [False, True], "the opponent has its column"
    assert run(odd.score(scored())).score == -1


def test_an_opponent_that_is_no_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="asks for the engine 'rival'"):
        made({"TicTacToe-v0": GameConfig()}, opponent="rival")
