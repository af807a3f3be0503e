"""What k of a prompt's n sampled answers are worth: pass@k, best@k, maj@k.

All three are expectations over the subsets of k answers out of n, without replacement.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from math import comb, sqrt

import numpy as np

MOST_SUBSETS = 256
"""Subsets of a vote that are all counted; where there are more, as many are drawn."""


def group_sizes(n: int) -> list[int]:
    """The k of n answers: powers of two from 2, and n; empty for n < 2."""
    return sorted({2**power for power in range(1, n.bit_length()) if 2**power <= n} | ({n} if n > 1 else set()))


def pass_at_k(correct: Sequence[bool], k: int) -> float:
    """1 - C(n - c, k) / C(n, k) for c correct answers of n >= k: Chen et al. 2021 (arXiv 2107.03374), equation 1."""
    n = len(correct)
    return 1 - comb(n - sum(correct), k) / comb(n, k)


def best_at_k(scores: Sequence[float], k: int) -> float:
    """Expected highest score among k of n >= k answers: the i-th lowest is the highest of C(i - 1, k - 1) subsets."""
    ordered = sorted(scores)
    return sum(comb(i, k - 1) * score for i, score in enumerate(ordered)) / comb(len(ordered), k)


def maj_at_k(answers: Sequence[str], correct: Sequence[bool], k: int, seed: int = 0) -> float:
    """Probability that the answer which most of k answers give is correct (Wang et al. 2022, arXiv 2203.11171).

    Answers that tie share the vote equally. With more than ``MOST_SUBSETS`` subsets it is an average over as many of
    them, drawn with ``seed``.
    """
    if all(correct) or not any(correct):
        return float(correct[0])
    return float(np.mean([_vote(answers, correct, subset) for subset in _subsets(len(answers), k, seed)]))


def _subsets(n: int, k: int, seed: int) -> Iterator[Sequence[int]]:
    if comb(n, k) <= MOST_SUBSETS:
        yield from combinations(range(n), k)
        return
    random = np.random.default_rng(seed)
    for _ in range(MOST_SUBSETS):
        yield random.choice(n, k, replace=False).tolist()


def _vote(answers: Sequence[str], correct: Sequence[bool], subset: Sequence[int]) -> float:
    votes: dict[str, list[bool]] = defaultdict(list)
    for index in subset:
        votes[answers[index]].append(correct[index])
    most = max(map(len, votes.values()))
    return float(np.mean([np.mean(group) for group in votes.values() if len(group) == most]))


def standard_error(by_prompt: Sequence[float]) -> float:
    """Bootstrap standard error of the mean over prompts, in the limit of many resamples: std / sqrt(prompts).

    Prompts are resampled, not answers: those of one prompt depend on each other (Efron and Tibshirani 1993, eq. 5.12).
    """
    return float(np.std(by_prompt)) / sqrt(len(by_prompt))
