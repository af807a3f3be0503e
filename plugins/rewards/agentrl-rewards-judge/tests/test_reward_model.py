import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from agentrl_core.api import ConfigError, RewardError, RewardFunctionContext, RewardResult, RewardTrajectory
from agentrl_rewards_judge.config import RewardModelConfig
from agentrl_rewards_judge.reward_model import RewardModel

LONG = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "let me see"},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "four"},
]
CONVERSATIONS = [LONG, LONG[:2], [*LONG, {"role": "user", "content": "and 3?"}, {"role": "assistant", "content": "7"}]]


def trajectory(messages: Any) -> RewardTrajectory:
    return RewardTrajectory(messages, "", "", "")


def alone(path: Path, messages: Any) -> torch.Tensor:
    """The logits of one conversation without padding, by transformers itself."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(path).apply_chat_template(messages, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        return model(ids).logits[0]


def make(path: Path, **config: Any) -> RewardModel:
    return RewardModel(RewardModelConfig(model=str(path), **config), RewardFunctionContext("reward_model"))


def scored(function: RewardModel, conversations: Any) -> list[RewardResult]:
    async def play() -> list[RewardResult]:
        return list(await asyncio.gather(*(function(trajectory(each)) for each in conversations)))

    return asyncio.run(play())


def test_a_batch_scores_what_each_conversation_scores_alone(
    reward_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, sizes = make(reward_model, batch_size=2), []
    compute = function._compute

    def counted(batch: Any) -> list[float]:
        sizes.append(len(batch))
        return compute(batch)

    monkeypatch.setattr(function, "_compute", counted)
    results = scored(function, CONVERSATIONS)
    expected = [float(alone(reward_model, each)) for each in CONVERSATIONS]
    assert [each.score for each in results] == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 3) for score in expected}) == 3, "the conversations differ"
    assert sizes == [2, 1]
    assert [each.score for each in scored(function, CONVERSATIONS)] == pytest.approx(expected, abs=1e-5)


def test_a_model_of_text_reads_that_there_is_an_image(reward_model: Path) -> None:
    shown = [{"type": "text", "text": "see "}, {"type": "image", "image": "0" * 32 + "-4x3.png"}]
    answer = {"role": "assistant", "content": "four"}
    found = scored(make(reward_model), [[{"role": "user", "content": each}, answer] for each in (shown, "see <image>")])
    assert found[0].score == found[1].score


def test_nobody_waits_longer_than_those_that_came_before(reward_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a long conversation waits, short ones keep coming: it is the second to be computed, not the last."""
    function, order, gone_on = make(reward_model, batch_size=1), [], []

    def compute(batch: Any) -> list[float]:
        order.append(len(batch[0]))
        return [0.0]

    monkeypatch.setattr(function, "_compute", compute)
    monkeypatch.setattr(function, "_ids", lambda messages: [1] * len(messages[-1]["content"]))

    def says(length: int) -> RewardTrajectory:
        return trajectory([{"role": "assistant", "content": "x" * length}])

    async def short(left: int) -> None:
        await function(says(1))
        if left:
            await short(left - 1)

    async def play() -> None:
        streams = [asyncio.ensure_future(short(20)) for _ in range(2)]
        while not order:
            await asyncio.sleep(0)
        await function(says(50))
        gone_on.append(len(order))
        await asyncio.gather(*streams)

    asyncio.run(play())
    assert order.count(50) == 1 and len(order) == 43
    assert order.index(50) <= 3, f"it was computed as number {order.index(50) + 1}"


def test_a_batch_is_of_similar_length(reward_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, batches = make(reward_model, batch_size=3), []

    def compute(batch: Any) -> list[float]:
        batches.append([len(ids) for ids in batch])
        return [0.0] * len(batch)

    monkeypatch.setattr(function, "_compute", compute)

    async def play() -> None:
        lengths = [50, 10, 49, 11, 51, 9, 30]
        await asyncio.gather(*(function._score([1] * length) for length in lengths))

    asyncio.run(play())
    assert [sorted(batch) for batch in batches] == [[49, 50, 51], [9, 10, 11], [30]]


def test_what_is_only_checked_has_no_weights(reward_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    load = AutoModelForSequenceClassification.from_pretrained
    monkeypatch.setattr(
        AutoModelForSequenceClassification, "from_pretrained",
        lambda *args, **kwargs: loaded.append(args) or load(*args, **kwargs),
    )  # fmt: skip
    config = RewardModelConfig(model=str(reward_model))
    RewardModel(config, RewardFunctionContext("reward_model", check_only=True))
    assert loaded == []
    with pytest.raises(ConfigError, match="label: found 3"):
        RewardModel(RewardModelConfig(model=str(reward_model), label=3), RewardFunctionContext("r", check_only=True))
    RewardModel(config, RewardFunctionContext("reward_model"))
    assert len(loaded) == 1


def test_turns_earn_what_they_change(reward_model: Path) -> None:
    (result,) = scored(make(reward_model, scores="turns"), [LONG])
    first, last = float(alone(reward_model, LONG[:2])), float(alone(reward_model, LONG))
    assert result.score == pytest.approx(last, abs=1e-5)
    assert result.turn_rewards == pytest.approx([first, last - first], abs=1e-5)


def test_the_log_probability_of_a_label_is_the_score(two_labels: Path) -> None:
    (result,) = scored(make(two_labels, label=1), [LONG])
    assert result.score == pytest.approx(float(alone(two_labels, LONG).log_softmax(-1)[1]), abs=1e-5)


def rows_of(path: Path, *rows: list[tuple[str, int]]) -> RewardTrajectory:
    """A trajectory of rows; each has a prompt, and pieces of text with their mask."""
    tokenizer, last = AutoTokenizer.from_pretrained(path), rows[-1]
    encoded = []
    for row in rows:
        (prompt, _), *pieces = [(tokenizer.encode(text, add_special_tokens=False), mask) for text, mask in row]
        mask = [mask for ids, mask in pieces for _ in ids]
        encoded.append((prompt, [token for ids, _ in pieces for token in ids], mask))
    text = next(text for text, mask in reversed(last) if mask)
    return RewardTrajectory((), text, text, "", token_rows=encoded)


def test_each_sampled_token_earns_its_score(token_model: Path) -> None:
    trajectories = [
        rows_of(token_model, [("2 + 2?", 0), ("let me see", 1), ("<tool>4</tool>", 0), ("four", 1), (" ", 0)]),
        rows_of(token_model, [("a", 0), ("b", 1)], [("a longer prompt", 0), ("cd", 1)]),
    ]
    model = AutoModelForTokenClassification.from_pretrained(token_model, dtype=torch.float32).eval()
    expected = []
    for each in trajectories:
        with torch.no_grad():
            logits = [model(torch.tensor([[*prompt, *ids]])).logits[0, :, 0] for prompt, ids, _ in each.token_rows]
        expected.append(
            [
                float(score)
                for scores, (prompt, _, mask) in zip(logits, each.token_rows, strict=True)
                for score in scores[len(prompt) :][torch.tensor(mask).bool()]
            ]
        )
    function = make(token_model, scores="tokens", batch_size=3)

    async def play() -> list[RewardResult]:
        return list(await asyncio.gather(*map(function, trajectories)))

    for result, scores in zip(asyncio.run(play()), expected, strict=True):
        assert result.token_rewards == pytest.approx(scores, abs=1e-5)
        assert result.score == pytest.approx(sum(scores), abs=1e-5)
    assert len({round(score, 3) for score in expected[0]}) > 3, "the tokens differ"


def test_tokens_of_another_tokenizer_are_not_scored(token_model: Path) -> None:
    function = make(token_model, scores="tokens")
    ((prompt, ids, mask),) = rows_of(token_model, [("a", 0), ("four", 1)]).token_rows
    for other in ([*ids[:-1], ids[-1] + 1], [*ids[:-1], 10**6]):
        seen = RewardTrajectory((), "four", "four", "", token_rows=[(prompt, other, mask)])
        with pytest.raises(RewardError, match="has another tokenizer than the policy: scores=tokens needs the same"):
            asyncio.run(function(seen))
    with pytest.raises(RewardError, match="the policy said nothing"):
        asyncio.run(function(RewardTrajectory((), "", "", "", token_rows=[(prompt, [], [])])))


@pytest.mark.parametrize("scores", ["tokens", "last"])
def test_a_model_of_the_other_kind_is_refused(reward_model: Path, token_model: Path, scores: str) -> None:
    kind = "token" if scores == "tokens" else "sequence"
    with pytest.raises(ConfigError, match=f"expected one for {kind} classification with scores={scores}"):
        make(reward_model if scores == "tokens" else token_model, scores=scores)


def test_what_cannot_be_scored_is_a_reward_error_of_that_trajectory(reward_model: Path) -> None:
    function = make(reward_model, max_length=60)
    with pytest.raises(RewardError, match="has [0-9]+ tokens for the reward model .*, allowed are max_length=60"):
        scored(function, [CONVERSATIONS[2]])
    with pytest.raises(RewardError, match="the policy said nothing"):
        scored(function, [LONG[:1]])
    assert scored(function, [LONG[:2]])


def test_a_batch_that_fails_is_reported_to_all_that_wait_and_the_next_one_works(
    reward_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = make(reward_model)

    def fail(batch: Any) -> list[float]:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(function, "_compute", fail)
        with pytest.raises(RewardError, match="the reward model failed: MemoryError: no memory"):
            scored(function, CONVERSATIONS)
    assert len(scored(function, CONVERSATIONS)) == 3


@pytest.mark.parametrize(
    ("labels", "config", "message"),
    [
        (1, {"label": 1}, "label: found 1; allowed are 0 to 0"),
        (2, {}, "has 2 labels; say which one is the good one"),
    ],
)
def test_a_wrong_label_is_refused(
    reward_model: Path, two_labels: Path, labels: int, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(reward_model if labels == 1 else two_labels, **config)


def test_a_model_that_generates_or_is_not_there_is_refused(tmp_path: Path) -> None:
    from agentrl_testing.tiny_model import save_tiny_model

    save_tiny_model(tmp_path / "causal")
    with pytest.raises(ConfigError, match="has the architecture Qwen3ForCausalLM; expected one for sequence"):
        make(tmp_path / "causal")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="model: cannot read .*empty"):
        make(tmp_path / "empty")
