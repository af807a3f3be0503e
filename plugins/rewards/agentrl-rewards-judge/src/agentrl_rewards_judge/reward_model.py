"""A discriminative reward model: a transformers model that reads a conversation and returns a number.

Shapes: N conversations of a batch, L tokens.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from agentrl_core.api import (
    ConfigError,
    RewardError,
    RewardFunctionContext,
    RewardResult,
    RewardTrajectory,
    together,
)
from agentrl_core.engine_kit.media import without_images
from agentrl_rewards_judge.config import RewardModelConfig

Pending = tuple[list[int], "asyncio.Future[Any]"]


class RewardModel:
    """Scores a conversation with ``AutoModelForSequenceClassification``, at its last token.

    The conversation is rendered with the chat template of the model's own tokenizer. A model with one label scores its
    logit; of several labels ``label`` says which one's log-probability counts.

    With ``scores: turns``, what the k-th turn of the policy earns is by how much the score after it is higher than
    after the turn before; the first turn earns its whole score. The sum is the score of the whole conversation.

    With ``scores: tokens`` the model is an ``AutoModelForTokenClassification`` that reads the policy's own tokens: each
    token that the policy sampled earns its score. Both must have the same tokenizer. The sum is the trajectory's score.

    Conversations that wait while a batch is computed make the next batch, so none waits for others to come. A batch is
    the conversation that has waited longest with those that are nearest to it in length.

    Raises:
        RewardError: the conversation is longer than ``max_length``, the policy said nothing, or it has another
            tokenizer than ``scores: tokens`` needs.
    """

    isolation: ClassVar[str] = "inline"

    def __init__(self, config: RewardModelConfig, context: RewardFunctionContext) -> None:
        known_config = _check(config)
        self._config = config
        self._tokenizer: Any = AutoTokenizer.from_pretrained(config.model)
        if self._tokenizer.chat_template is None and config.scores != "tokens":
            raise ConfigError(f"model: the tokenizer of {config.model} has no chat template")
        kind = AutoModelForTokenClassification if config.scores == "tokens" else AutoModelForSequenceClassification
        # The model takes the last token that is no padding as the end of the conversation.
        known = (
            getattr(known_config, "pad_token_id", None), self._tokenizer.pad_token_id, self._tokenizer.eos_token_id
        )  # fmt: skip
        self._padding = next((token for token in known if token is not None), 0)
        self._model: Any = None
        if not context.check_only:
            self._model = kind.from_pretrained(config.model, dtype=config.dtype).eval()
            self._model.config.pad_token_id = self._padding
        self._waiting: list[Pending] = []
        self._working: asyncio.Task[None] | None = None

    async def __call__(self, trajectory: RewardTrajectory) -> RewardResult:
        if self._config.scores == "tokens":
            return await self._score_tokens(trajectory)
        turns = [index for index, message in enumerate(trajectory.messages) if message["role"] == "assistant"]
        if not turns:
            raise RewardError(f"the reward model {self._config.model} has nothing to score: the policy said nothing")
        ends = turns if self._config.scores == "turns" else turns[-1:]
        ids = [self._ids(trajectory.messages[: end + 1]) for end in ends]
        scores = await together(map(self._score, ids))
        if self._config.scores == "last":
            return RewardResult(scores[0])
        earned = [after - before for before, after in zip([0.0, *scores], scores, strict=False)]
        return RewardResult(scores[-1], turn_rewards=earned)

    async def _score_tokens(self, trajectory: RewardTrajectory) -> RewardResult:
        if not any(any(mask) for _, _, mask in trajectory.token_rows):
            raise RewardError(f"the reward model {self._config.model} has nothing to score: the policy said nothing")
        self._check_tokenizer(trajectory)
        rows = [([*prompt, *response], len(prompt), mask) for prompt, response, mask in trajectory.token_rows]
        scores = await together(self._score(ids) for ids, _, _ in rows)
        earned = [
            score
            for scores_L, (_, start, mask) in zip(scores, rows, strict=True)
            for score, sampled in zip(scores_L[start:], mask, strict=True)
            if sampled
        ]
        return RewardResult(sum(earned), token_rewards=earned)

    def _check_tokenizer(self, trajectory: RewardTrajectory) -> None:
        """Compare the policy's last turn with what its ids mean to this tokenizer."""
        _, ids, mask = trajectory.token_rows[-1]
        end = max((index + 1 for index, sampled in enumerate(mask) if sampled), default=0)
        start = max((index + 1 for index in range(end) if not mask[index]), default=0)
        turn = list(ids[start:end])
        known = max(turn, default=0) < self._model.config.vocab_size
        if not known or self._bare(trajectory.last_text) != self._bare(self._tokenizer.decode(turn)):
            raise RewardError(
                f"the reward model {self._config.model} has another tokenizer than the policy: scores=tokens needs the "
                "same one; use scores=last or scores=turns"
            )

    def _bare(self, text: str) -> str:
        for token in self._tokenizer.get_added_vocab():
            text = text.replace(token, "")
        return "".join(text.split())

    def _ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        ids: list[int] = self._tokenizer.apply_chat_template(without_images(messages), tokenize=True, return_dict=False)
        return ids

    async def _score(self, ids: list[int]) -> Any:
        """The score at the last token, or with ``scores: tokens`` those of all tokens."""
        if len(ids) > self._config.max_length:
            raise RewardError(
                f"the conversation has {len(ids)} tokens for the reward model {self._config.model}, allowed are "
                f"max_length={self._config.max_length}"
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((ids, future))
        if self._working is None or self._working.done():
            self._working = loop.create_task(self._work())
        return await future

    async def _work(self) -> None:
        """Batches of what waits, until nothing does."""
        while self._waiting:
            # The oldest first, or long ones would wait while short ones come. With those of similar length, because
            # padding is computed too.
            waiting = [each for each in self._waiting if not each[1].done()]
            batch = sorted(waiting, key=lambda each: abs(len(each[0]) - len(waiting[0][0])))[: self._config.batch_size]
            taken = {id(future) for _, future in batch}
            self._waiting = [each for each in waiting if id(each[1]) not in taken]
            if not batch:
                return
            try:
                scores = await asyncio.to_thread(self._compute, [ids for ids, _ in batch])
            except Exception as error:  # noqa: BLE001 - whoever waits for the batch gets it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(RewardError(f"the reward model failed: {type(error).__name__}: {error}"))
                continue
            for (_, future), score in zip(batch, scores, strict=True):
                if not future.done():
                    future.set_result(score)

    @torch.inference_mode()
    def _compute(self, conversations: Sequence[list[int]]) -> list[Any]:
        longest = max(map(len, conversations))
        ids_NL = torch.full((len(conversations), longest), self._padding)
        mask_NL = torch.zeros_like(ids_NL)
        for row, ids in enumerate(conversations):
            ids_NL[row, : len(ids)], mask_NL[row, : len(ids)] = torch.tensor(ids), 1
        automatic = "cuda" if torch.cuda.is_available() else "cpu"
        device = automatic if self._config.device == "auto" else self._config.device
        self._model.to(device)
        logits = self._model(input_ids=ids_NL.to(device), attention_mask=mask_NL.to(device)).logits.float()
        chosen = logits[..., 0] if logits.shape[-1] == 1 else logits.log_softmax(-1)[..., self._config.label]
        scores: list[Any] = chosen.tolist()
        if self._config.scores == "tokens":
            return [each[: len(ids)] for each, ids in zip(scores, conversations, strict=True)]
        return scores


def _check(config: RewardModelConfig) -> Any:
    """The model's own configuration. Raises ConfigError, before weights are read."""
    try:
        model: Any = AutoConfig.from_pretrained(config.model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: cannot read {config.model}: {' '.join(str(error).split())}") from error
    kind = "token" if config.scores == "tokens" else "sequence"
    if not any(f"{kind.title()}Classification" in name for name in model.architectures or ()):
        found = ", ".join(model.architectures or ()) or "none"
        raise ConfigError(
            f"model: {config.model} has the architecture {found}; expected one for {kind} classification with "
            f"scores={config.scores}. A model that generates text judges with the function 'judge'"
        )
    if model.num_labels > 1 and config.label is None:
        raise ConfigError(f"label: {config.model} has {model.num_labels} labels; say which one is the good one")
    if config.label is not None and config.label >= model.num_labels:
        raise ConfigError(f"label: found {config.label}; allowed are 0 to {model.num_labels - 1}")
    return model
