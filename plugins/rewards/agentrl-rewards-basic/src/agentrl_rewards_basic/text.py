"""Reward functions that compare the answer with the ground truth as text."""

import re
import string
import unicodedata
from difflib import SequenceMatcher
from typing import Any, ClassVar

from agentrl_core.api import RewardFunctionContext, RewardResult, RewardTrajectory
from agentrl_rewards_basic.config import ExactMatchConfig, FuzzyMatchConfig
from agentrl_rewards_basic.rows import answer_text, ground_truth, row_of

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class ExactMatch:
    """1.0 if the answer is one of the accepted answers after normalisation, else 0.0.

    The ground truth is a text, or a list of accepted ones. ``normalize``: ``text`` compares in Unicode's form NFKC,
    without case and with single spaces; ``squad`` also leaves out ASCII punctuation and English articles, as the
    evaluation of SQuAD does (arXiv 1606.05250).

    Raises:
        ValueError: the row has no ground truth, or one of which normalisation leaves nothing.
    """

    isolation: ClassVar[str] = "inline"

    def __init__(self, config: ExactMatchConfig, context: RewardFunctionContext) -> None:
        self.config = config
        self.name = context.name

    def __call__(self, trajectory: RewardTrajectory) -> RewardResult:
        truths = self.truths(trajectory)
        answer = self.normal_form(answer_text(trajectory, self.config.tag) or "")
        return RewardResult(float(answer in truths), answer=answer)

    def truths(self, trajectory: RewardTrajectory) -> list[str]:
        """The accepted answers in normal form."""
        found: Any = trajectory.ground_truth
        several = isinstance(found, list | tuple) and found
        texts = [str(each) for each in found] if several else [ground_truth(trajectory, self.name)]
        truths = [self.normal_form(text) for text in texts]
        if "" in truths:
            raise ValueError(
                f"{self.name}: nothing is left of the ground truth {texts[truths.index('')]!r} of {row_of(trajectory)} "
                f"with normalize={self.config.normalize!r}; correct the row or set another `normalize`"
            )
        return truths

    def normal_form(self, text: str) -> str:
        """A text as it is compared."""
        text = unicodedata.normalize("NFKC", text).casefold()
        if self.config.normalize == "squad":
            text = _ARTICLES.sub(" ", text.translate(_NO_PUNCTUATION))
        return " ".join(text.split())


class FuzzyMatch(ExactMatch):
    """How similar the answer is to the nearest accepted answer, from 0 to 1; 0.0 below ``threshold``.

    The similarity is difflib's ratio 2 M / T of the normal forms: M characters match, T is the length of both texts.
    Answers and normal forms are those of :class:`ExactMatch`.

    Raises:
        ValueError: as :class:`ExactMatch`.
    """

    # The time grows with the product of both lengths, and the policy chooses one of them.
    isolation: ClassVar[str] = "process"
    config: FuzzyMatchConfig

    def __call__(self, trajectory: RewardTrajectory) -> RewardResult:
        truths = self.truths(trajectory)
        answer = self.normal_form(answer_text(trajectory, self.config.tag) or "")
        ratio = max(self._ratio(answer, truth) for truth in truths)
        return RewardResult(ratio if ratio >= self.config.threshold else 0.0, {"ratio": ratio}, answer=answer)

    def _ratio(self, answer: str, truth: str) -> float:
        return SequenceMatcher(None, answer, truth, autojunk=False).ratio()
