"""The reward function for mathematical answers."""

import logging
import re
from typing import Any, ClassVar

from math_verify import parse, verify

from agentrl_core.api import RewardFunctionContext, RewardResult, RewardTrajectory
from agentrl_rewards_math.plugin import MathConfig

_BRACE = re.compile(r"[{}]")


class Math:
    r"""1.0 if math-verify finds the answer of the last turn equal to the ground truth, else 0.0.

    math-verify prefers ``\boxed{…}`` and "the answer is …" to other expressions, and treats several boxes as a set.
    With ``boxed``, only the last ``\boxed{…}`` counts. A text without an expression scores 0.0. The ground truth is
    LaTeX or plain text, with or without ``$`` or ``\boxed``.

    Every right answer is reported as the ground truth, so that votes count ``0.5`` and ``\frac12`` as one answer;
    others are reported as SymPy writes them.

    Raises:
        ValueError: the row has no ground truth, or one without an expression.
    """

    # Some expressions take SymPy forever; the process is killed when the function's timeout has passed.
    isolation: ClassVar[str] = "process"

    def __init__(self, config: MathConfig, context: RewardFunctionContext) -> None:
        self.config = config
        self.name = context.name
        # It warns in each process that timeouts are left to the caller, as they are.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def __call__(self, trajectory: RewardTrajectory) -> RewardResult:
        truth = "" if trajectory.ground_truth is None else str(trajectory.ground_truth).strip()
        gold = _parse(truth if "\\boxed" in truth else f"\\boxed{{{truth}}}")
        if not truth or not gold:
            row = f"row {trajectory.extra_info.get('index', '(without extra_info.index)')}"
            problem = f"is {truth!r}, in which math-verify finds no expression" if truth else "is missing"
            raise ValueError(f"{self.name}: reward_model.ground_truth of {row} {problem}")
        text = last_boxed(trajectory.last_text) if self.config.boxed else trajectory.last_text
        found = _parse(text)
        if not found:
            return RewardResult(0.0, answer="")
        right = bool(verify(gold, found, timeout_seconds=None))
        return RewardResult(float(right), answer=truth if right else str(found[0]))


def last_boxed(text: str) -> str:
    r"""The last ``\boxed{…}`` whose braces are closed; empty where there is none."""
    start = text.rfind("\\boxed{")
    depth = 0
    for brace in _BRACE.finditer(text, max(start, 0)):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start : brace.end()] if start >= 0 else ""
    return ""


def _parse(text: str) -> list[Any]:
    return list(parse(text, parsing_timeout=None))
