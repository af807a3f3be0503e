"""Each estimator against its paper's equation, in float64 and with loops over plain Python objects."""

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_algorithms import plugin as plugins
from agentrl_algorithms.optimal_token_baseline import score_norms
from agentrl_core.api import AdvantageEstimator, AdvantageInput, AlgorithmContext, ConfigError, PluginSpec
from agentrl_testing.contracts.case import factory_of

SPECS = {
    spec.name: spec
    for spec in vars(plugins).values()
    if isinstance(spec, PluginSpec) and spec.kind == "advantage_estimator"
}
FILLER = 7.0
"""What stands under mask 0."""


@dataclass
class Token:
    old: float
    teacher: float
    entropy: float
    value: float
    extra: float = 0.0
    """Reward of this token alone."""
    weight: float = 1.0
    """Of its loss."""


@dataclass
class Turn:
    tokens: list[Token]
    reward: float
    row: int = 0


@dataclass
class Sample:
    group: str
    outcome: float
    turns: list[Turn]
    baseline: float = 0.0
    components: dict[str, float] = field(default_factory=dict)
    empty_rows: int = 0

    @property
    def score(self) -> float:
        extras = sum(token.extra for turn in self.turns for token in turn.tokens)
        return self.outcome + sum(turn.reward for turn in self.turns) + extras

    @property
    def tokens(self) -> list[Token]:
        return [token for turn in self.turns for token in turn.tokens]

    def rows(self) -> list[list[int]]:
        """Numbers of the turns in each row."""
        rows = sorted({turn.row for turn in self.turns})
        return [[k for k, turn in enumerate(self.turns) if turn.row == row] for row in rows]


Samples = list[Sample]
Advantages = list[list[list[float]]]
"""Of each sample's turns' tokens."""


def batch_of(samples: Samples) -> tuple[AdvantageInput, dict[tuple[int, int], tuple[int, int, int]]]:
    """The batch, with two tool tokens before each turn, and (sample, turn, token) of each sampled (row, position)."""
    rows = [(number, turns) for number, sample in enumerate(samples) for turns in sample.rows()]
    rows += [(number, []) for number, sample in enumerate(samples) for _ in range(sample.empty_rows)]
    width = max([sum(len(samples[n].turns[k].tokens) + 2 for k in turns) for n, turns in rows] + [1]) + 1
    count = max(len(sample.turns) for sample in samples)
    shape = (len(rows), width)
    mask, turn_ids = torch.zeros(shape, dtype=torch.bool), torch.full(shape, -1)
    columns = {name: torch.full(shape, FILLER) for name in ("rewards", "old", "teacher", "entropy", "value", "weight")}
    places = {}
    for row, (number, turns) in enumerate(rows):
        position = 0
        for k in turns:
            position += 2
            turn = samples[number].turns[k]
            for t, token in enumerate(turn.tokens):
                mask[row, position], turn_ids[row, position] = True, k
                places[row, position] = number, k, t
                for name in ("old", "teacher", "entropy", "value", "weight"):
                    columns[name][row, position] = getattr(token, name)
                columns["rewards"][row, position] = token.extra + turn.reward * (t == len(turn.tokens) - 1)
                position += 1
        if turns:
            columns["rewards"][row, position - 1] += samples[number].outcome
    of_rows = [samples[number] for number, _ in rows]
    names = {name for sample in samples for name in sample.components}
    groups, ids = np.empty(len(rows), object), np.empty(len(rows), object)
    groups[:] = [sample.group for sample in of_rows]
    ids[:] = [f"t{number}" for number, _ in rows]
    turn_rewards = [[turn.reward for turn in s.turns] + [0.0] * (count - len(s.turns)) for s in of_rows]
    return AdvantageInput(
        columns["rewards"], mask, groups, ids, columns["value"],
        outcomes=torch.tensor([sample.outcome for sample in of_rows]),
        scores=torch.tensor([sample.score for sample in of_rows]),
        turn_ids=turn_ids, turn_rewards=torch.tensor(turn_rewards).reshape(len(rows), count),
        components={n: torch.tensor([s.components.get(n, math.nan) for s in of_rows]) for n in names},
        old_log_probs=columns["old"], entropies=columns["entropy"], teacher_log_probs=columns["teacher"],
        baselines=torch.tensor([sample.baseline for sample in of_rows]), correction_weights=columns["weight"],
    ), places  # fmt: skip


def estimator(name: str, **config: Any) -> AdvantageEstimator:
    made: AdvantageEstimator = factory_of(SPECS[name])(SPECS[name].config(**config), AlgorithmContext(4))
    return made


def draw(seed: int, sizes: list[int], max_turns: int = 1, rows: int = 1, signed: bool = False) -> Samples:
    """Groups of these sizes; scores of a group often coincide."""
    rng = np.random.default_rng(seed)
    offset = 0.5 if signed else 0.0

    def token() -> Token:
        old, teacher = -2 * rng.random(2)
        extra = rng.choice([0.0, 0.0, 0.25]) if signed else 0.0
        return Token(old, teacher, 0.3 + 2 * rng.random(), rng.normal(), extra, rng.choice([0.0, 0.5, 2.0]))

    samples = []
    for group, size in enumerate(sizes):
        for _ in range(size):
            turns = []
            for k in range(rng.integers(1, max_turns + 1)):
                reward = rng.choice([0.0, 0.5, 1.0]) - offset if max_turns > 1 else 0.0
                turns.append(Turn([token() for _ in range(rng.integers(1, 5))], reward, k % rows))
            components = {"format": rng.choice([0.0, 1.0])} | ({"answer": rng.normal()} if rng.random() < 0.7 else {})
            outcome = rng.choice([0.0, 0.5, 1.0]) - offset
            samples.append(Sample(f"g{group}", outcome, turns, rng.random(), components))
    return samples


def with_empty_rows() -> Samples:
    samples = draw(5, [4, 3], max_turns=3, rows=2)
    samples[0].empty_rows = 2
    for number in (1, 5):
        samples[number].turns, samples[number].outcome, samples[number].empty_rows = [], 100.0, 1
    return samples


def all_equal(value: float = 0.5) -> Samples:
    samples = draw(6, [5, 3, 1], max_turns=3, rows=2)
    for sample in samples:
        sample.outcome, sample.components = value, {"format": value, "answer": value}
        for turn in sample.turns:
            turn.reward = 0.0
    return samples


BATCHES: dict[str, Callable[[], Samples]] = {
    "single turn": lambda: draw(1, [4, 4, 3]),
    "turns with tool results": lambda: draw(2, [4, 5], max_turns=3),
    "negative and token rewards": lambda: draw(3, [4, 4], max_turns=3, signed=True),
    "several rows": lambda: draw(4, [4, 4], max_turns=4, rows=3),
    "groups of one": lambda: draw(7, [1, 4, 1, 2], max_turns=2),
    "empty rows": with_empty_rows,
    "equal scores": all_equal,
    "one trajectory": lambda: draw(8, [1]),
}


def voters(samples: Samples) -> Samples:
    return [sample for sample in samples if sample.turns]


def group(samples: Samples, sample: Sample) -> Samples:
    return [other for other in voters(samples) if other.group == sample.group]


def deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def flat(of_sample: Callable[[Samples, Sample], float]) -> Callable[[Samples], Advantages]:
    """One advantage for all tokens of a trajectory."""

    def reference(samples: Samples) -> Advantages:
        return [
            [[of_sample(samples, sample)] * len(turn.tokens) for turn in sample.turns] if sample.turns else []
            for sample in samples
        ]

    return reference


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def grpo(samples: Samples, sample: Sample) -> float:
    scores = [other.score for other in group(samples, sample)]
    return (sample.score - mean(scores)) / (deviation(scores) + 1e-6)


def dr_grpo(samples: Samples, sample: Sample) -> float:
    return sample.score - mean([other.score for other in group(samples, sample)])


def rloo(samples: Samples, sample: Sample) -> float:
    others = [other.score for other in group(samples, sample) if other is not sample]
    return sample.score - mean(others) if others else 0.0


def reinforce_plus_plus(samples: Samples, sample: Sample) -> float:
    scores = [other.score for other in voters(samples)]
    return (sample.score - mean(scores)) / (deviation(scores) + 1e-6)


def reinforce_plus_plus_baseline(samples: Samples, sample: Sample) -> float:
    centred = [dr_grpo(samples, other) for other in voters(samples)]
    return (dr_grpo(samples, sample) - mean(centred)) / (deviation(centred) + 1e-6)


def discounted_reinforce(samples: Samples) -> Advantages:
    """Returns are GAE's without values; all tokens have a vote."""

    def without_values(turn: Turn) -> Turn:
        return replace(turn, tokens=[replace(token, value=0.0) for token in turn.tokens])

    plain = [replace(sample, turns=[without_values(turn) for turn in sample.turns]) for sample in samples]
    return whitened(turn_gae(0.9, 1.0, 0.9, 1.0)(plain))


def opo(samples: Samples, sample: Sample) -> float:
    members = group(samples, sample)
    total = sum(len(other.tokens) for other in members)
    return sample.score - sum(len(other.tokens) * other.score for other in members) / total


def gpg(samples: Samples, sample: Sample) -> float:
    everyone = voters(samples)
    silent = [s for s in everyone if len({round(other.score, 9) for other in group(samples, s)}) == 1]
    if len(silent) == len(everyone):
        return 0.0
    return len(everyone) / (len(everyone) - len(silent)) * dr_grpo(samples, sample)


def grpo_passk(samples: Samples, sample: Sample) -> float:
    others = [other.score for other in group(samples, sample) if other is not sample]
    return max([sample.score, *others]) - max(others) if others else 0.0


def maxrl(samples: Samples, sample: Sample) -> float:
    scores = [other.score for other in group(samples, sample)]
    return (sample.score - mean(scores)) / mean(scores) if min(scores) >= 0 and max(scores) > 0 else 0.0


def gdpo(samples: Samples, sample: Sample) -> float:
    weights = {"format": 2.0, "answer": 1.0}

    def total(one: Sample) -> float:
        result = 0.0
        for name, value in one.components.items():
            values = [other.components[name] for other in group(samples, one) if name in other.components]
            result += weights[name] * (value - mean(values)) / (deviation(values) + 1e-6)
        return result

    totals = [total(other) for other in voters(samples)]
    return (total(sample) - mean(totals)) / (deviation(totals) + 1e-6)


def turn_gae(gamma: float, lam: float, turn_gamma: float, turn_lam: float) -> Callable[[Samples], Advantages]:
    """The sum that the recursion stands for, over the tokens of a row."""

    def row_advantages(sample: Sample, row: list[int]) -> dict[tuple[int, int], float]:
        steps = [(k, t) for k in row for t in range(len(sample.turns[k].tokens))]
        rewards = [sample.turns[k].tokens[t].extra for k, t in steps]
        for number, (k, t) in enumerate(steps):
            rewards[number] += sample.turns[k].reward * (t == len(sample.turns[k].tokens) - 1)
        rewards[-1] += sample.outcome
        values = [sample.turns[k].tokens[t].value for k, t in steps] + [0.0]
        same = [now[0] == then[0] for now, then in itertools.pairwise(steps)] + [True]
        discounts = [(gamma, lam) if stays else (turn_gamma, turn_lam) for stays in same]
        deltas = [rewards[n] + discounts[n][0] * values[n + 1] - values[n] for n in range(len(steps))]
        return {
            step: sum(
                deltas[later] * math.prod(g * one for g, one in discounts[n:later]) for later in range(n, len(steps))
            )
            for n, step in enumerate(steps)
        }

    def reference(samples: Samples) -> Advantages:
        results = []
        for sample in samples:
            found = {step: value for row in sample.rows() for step, value in row_advantages(sample, row).items()}
            results.append([[found[k, t] for t in range(len(turn.tokens))] for k, turn in enumerate(sample.turns)])
        return results

    return reference


def whitened(plain: Advantages) -> Advantages:
    values = [value for turns in plain for tokens in turns for value in tokens]
    if len(values) < 2:
        return plain
    centre, scale = mean(values), math.sqrt(statistics.pvariance(values) + 1e-8)
    return [[[(value - centre) / scale for value in tokens] for tokens in turns] for turns in plain]


def turn_rloo(turn_gamma: float) -> Callable[[Samples], Advantages]:
    def from_turn(sample: Sample, k: int) -> float:
        rest = sample.score - sum(turn.reward for turn in sample.turns)
        earned = [turn.reward for turn in sample.turns[:-1]] + [sample.turns[-1].reward + rest]
        return sum(turn_gamma**later * reward for later, reward in enumerate(earned[k:]))

    def reference(samples: Samples) -> Advantages:
        results = []
        for sample in samples:
            others = [other for other in group(samples, sample) if other is not sample]
            of_turns = []
            for k, turn in enumerate(sample.turns):
                returns = [from_turn(other, min(k, len(other.turns) - 1)) for other in others]
                of_turns.append([from_turn(sample, k) - mean(returns) if others else 0.0] * len(turn.tokens))
            results.append(of_turns)
        return results

    return reference


def energy(token: Token) -> float:
    """Of the gradient that the token's loss has."""
    p = math.exp(token.old)
    rest = 1 - p
    entropy_of_rest = max((token.entropy + p * math.log(p) + rest * math.log(rest)) / rest, 0.0)
    return token.weight**2 * rest**2 * (1 + math.exp(-entropy_of_rest))


def optimal_baseline(by_turn: bool) -> Callable[[Samples], Advantages]:
    def steps(sample: Sample) -> list[list[tuple[Turn, Token]]]:
        by_token = [[(turn, token)] for turn in sample.turns for token in turn.tokens]
        return [[(turn, token) for token in turn.tokens] for turn in sample.turns] if by_turn else by_token

    def weight(sample: Sample, number: int) -> float:
        # Steps that are all rejected count alike.
        return sum(energy(token) for step in steps(sample)[: number + 1] for _, token in step) + 1e-12

    def from_step(sample: Sample, number: int) -> float:
        gone = 0.0
        for step in steps(sample)[:number]:
            gone += sum(token.extra + turn.reward * (token is turn.tokens[-1]) for turn, token in step)
        return sample.score - gone

    def baseline(members: Samples, number: int) -> float:
        there = [other for other in members if len(steps(other)) > number]
        if len(there) == 1:
            return baseline(members, number - 1)
        weights = [weight(other, number) for other in there]
        returns = [from_step(other, number) for other in there]
        return sum(w * g for w, g in zip(weights, returns, strict=True)) / sum(weights)

    def reference(samples: Samples) -> Advantages:
        results = []
        for sample in samples:
            members = group(samples, sample)
            values = [
                from_step(sample, number) - baseline(members, number) if len(members) > 1 else 0.0
                for number, _ in enumerate(steps(sample))
            ]
            numbers = iter(range(len(sample.tokens)))
            results.append(
                [[values[k if by_turn else next(numbers)] for _ in turn.tokens] for k, turn in enumerate(sample.turns)]
            )
        return results

    return reference


def distillation(samples: Samples) -> Advantages:
    return [
        [[t.teacher - t.old + 0.5 * grpo(samples, sample) for t in turn.tokens] for turn in sample.turns]
        for sample in samples
    ]


TABLE: list[tuple[str, dict[str, Any], Callable[[Samples], Advantages]]] = [
    ("grpo", {}, flat(grpo)),
    ("grpo", {"norm_by_std": False}, flat(dr_grpo)),
    ("rloo", {}, flat(rloo)),
    ("turn_rloo", {}, turn_rloo(1.0)),
    ("turn_rloo", {"turn_gamma": 0.5}, turn_rloo(0.5)),
    ("turn_rloo", {"turn_gamma": 0.0}, turn_rloo(0.0)),
    ("reinforce_plus_plus", {}, flat(reinforce_plus_plus)),
    ("reinforce_plus_plus", {"gamma": 0.9}, discounted_reinforce),
    ("reinforce_plus_plus_baseline", {}, flat(reinforce_plus_plus_baseline)),
    ("remax", {}, flat(lambda samples, sample: sample.score - sample.baseline)),
    ("opo", {}, flat(opo)),
    ("gpg", {}, flat(gpg)),
    ("gdpo", {"weights": {"format": 2.0}}, flat(gdpo)),
    ("grpo_passk", {}, flat(grpo_passk)),
    ("maxrl", {}, flat(maxrl)),
    ("optimal_token_baseline", {}, optimal_baseline(by_turn=False)),
    ("optimal_turn_baseline", {}, optimal_baseline(by_turn=True)),
    ("on_policy_distillation", {"reward_coef": 0.5}, distillation),
    ("gae", {"gamma": 0.95, "lam": 0.7, "whiten": False}, turn_gae(0.95, 0.7, 0.95, 0.7)),
    ("gae", {"gamma": 0.95, "lam": 0.7}, lambda samples: whitened(turn_gae(0.95, 0.7, 0.95, 0.7)(samples))),
    (
        "turn_gae",
        {"gamma": 0.99, "lam": 0.9, "turn_gamma": 0.8, "turn_lam": 0.6, "whiten": False},
        turn_gae(0.99, 0.9, 0.8, 0.6),
    ),
]


def test_every_estimator_has_a_reference() -> None:
    assert {name for name, _, _ in TABLE} == set(SPECS)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize(("name", "config", "reference"), TABLE, ids=[f"{row[0]}{row[1] or ''}" for row in TABLE])
def test_estimator_equals_the_equation(name, config, reference, kind) -> None:
    samples = BATCHES[kind]()
    batch, places = batch_of(samples)
    expected = torch.zeros(batch.response_mask.shape, dtype=torch.float64)
    values = reference(samples)
    for place, (number, turn, token) in places.items():
        expected[place] = values[number][turn][token]
    found = estimator(name, **config)(batch).advantages.double()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if "groups" in spec.capabilities])
def test_equal_scores_and_groups_of_one_give_exactly_zero(name) -> None:
    output = estimator(name)(batch_of(all_equal(0.1))[0])
    assert not output.advantages.any()
    mixed = batch_of(BATCHES["groups of one"]())[0]
    output = estimator(name)(mixed)
    assert not output.advantages[torch.tensor([group in ("g0", "g2") for group in mixed.group_ids])].any()


@pytest.mark.parametrize("name", SPECS)
def test_a_batch_without_sampled_tokens_has_no_advantages(name) -> None:
    batch, _ = batch_of(with_empty_rows())
    empty = torch.zeros_like(batch.response_mask)
    output = estimator(name)(
        AdvantageInput(
            batch.token_rewards, empty, batch.group_ids, batch.trajectory_ids, batch.values,
            components=batch.components, old_log_probs=batch.old_log_probs, entropies=batch.entropies,
            teacher_log_probs=batch.teacher_log_probs, baselines=batch.baselines,
        )
    )  # fmt: skip
    assert not output.advantages.any() and not output.returns.any()


def run(name: str) -> Callable[[Samples], Advantages]:
    """The estimator, from samples to advantages of their tokens."""

    def advantages_of(samples: Samples) -> Advantages:
        batch, places = batch_of(samples)
        advantages = estimator(name)(batch).advantages
        results: Advantages = [[[math.nan] * len(turn.tokens) for turn in sample.turns] for sample in samples]
        for place, (number, turn, token) in places.items():
            results[number][turn][token] = float(advantages[place])
        return results

    return advantages_of


Outcome = tuple[Sample, float, list[float]]
"""What a tiny policy can do: the sample, its probability, and the score of each turn's logit."""


def expected_gradient(advantages_of: Callable[[Samples], Advantages], outcomes: list[Outcome], size: int) -> np.ndarray:
    """Of the logits of all turns, over all groups of this size with their probabilities."""
    total = np.zeros(max(len(scores) for _, _, scores in outcomes))
    for drawn in itertools.product(outcomes, repeat=size):
        probability = math.prod(p for _, p, _ in drawn)
        samples = [Sample("g", one.outcome, one.turns) for one, _, _ in drawn]
        for turns, (_, _, scores) in zip(advantages_of(samples), drawn, strict=True):
            for logit, (tokens, score) in enumerate(zip(turns, scores, strict=True)):
                total[logit] += probability * tokens[0] * score / size
    return total


TOKEN = Token(-1.0, -1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("rloo", lambda p, n: p),
        ("grpo_passk", lambda p, n: (1 - (1 - p) ** n) / n),
        ("maxrl", lambda p, n: -sum((1 - p) ** k / k for k in range(1, n))),
    ],
)
def test_expected_gradient_is_that_of_the_objective(name, objective) -> None:
    p, size, step = 0.3, 4, 1e-5
    outcomes = [
        (Sample("g", 1.0, [Turn([TOKEN], 0.0)]), p, [1 - p]),
        (Sample("g", 0.0, [Turn([TOKEN], 0.0)]), 1 - p, [-p]),
    ]
    slope = (objective(p + step, size) - objective(p - step, size)) / (2 * step)
    np.testing.assert_allclose(expected_gradient(run(name), outcomes, size), [slope * p * (1 - p)], atol=1e-6)


P_CONTINUE, P_GOOD = 0.3, 0.6
"""A policy with two logits: to take a second turn or stop, and to do well in it."""


def by_turn_index(samples: Samples) -> Advantages:
    """Rewards of a turn minus their mean over the other samples that have the turn, summed over what remains."""
    results = []
    for sample in samples:
        differences = []
        for k, turn in enumerate(sample.turns):
            others = [other.turns[k].reward for other in samples if other is not sample and len(other.turns) > k]
            differences.append(turn.reward - (mean(others) if others else 0.0))
        of_outcome = sample.outcome - mean([other.outcome for other in samples if other is not sample])
        results.append([[of_outcome + sum(differences[k:])] for k in range(len(sample.turns))])
    return results


def test_turn_rloo_is_unbiased_where_the_policy_decides_how_many_turns_there_are() -> None:
    stop = Sample("g", 0.5, [Turn([TOKEN], 0.25)])
    good = Sample("g", 1.0, [Turn([TOKEN], 0.25), Turn([TOKEN], 0.75)])
    bad = Sample("g", 0.0, [Turn([TOKEN], 0.25), Turn([TOKEN], 0.5)])
    outcomes: list[Outcome] = [
        (stop, 1 - P_CONTINUE, [-P_CONTINUE]),
        (good, P_CONTINUE * P_GOOD, [1 - P_CONTINUE, 1 - P_GOOD]),
        (bad, P_CONTINUE * (1 - P_GOOD), [1 - P_CONTINUE, -P_GOOD]),
    ]
    slope = P_CONTINUE * (1 - P_CONTINUE)
    after_continuing = P_GOOD * good.score + (1 - P_GOOD) * bad.score
    true = [slope * (after_continuing - stop.score), P_CONTINUE * P_GOOD * (1 - P_GOOD) * (good.score - bad.score)]
    np.testing.assert_allclose(expected_gradient(run("turn_rloo"), outcomes, 3), true, atol=1e-6)

    someone_else_continues = 1 - (1 - P_CONTINUE) ** 2
    mean_reward = someone_else_continues * (P_GOOD * 0.75 + (1 - P_GOOD) * 0.5)
    biased = expected_gradient(by_turn_index, outcomes, 3)
    np.testing.assert_allclose(biased - true, [-mean_reward * slope, 0.0], atol=1e-12)


def test_turn_rloo_with_outcomes_only_is_rloo() -> None:
    samples = BATCHES["several rows"]()
    for turn in itertools.chain.from_iterable(sample.turns for sample in samples):
        turn.reward = 0.0
    batch, _ = batch_of(samples)
    torch.testing.assert_close(estimator("turn_rloo")(batch).advantages, estimator("rloo")(batch).advantages)


def test_score_norms_are_at_most_the_true_ones_and_at_least_half() -> None:
    probs = torch.randn(500, 12, generator=torch.Generator().manual_seed(0)).mul(3).softmax(-1).double()
    sampled = probs.multinomial(1, generator=torch.Generator().manual_seed(0)).squeeze(-1)
    p = probs.gather(1, sampled[:, None]).squeeze(-1)
    true = (torch.nn.functional.one_hot(sampled, 12) - probs).square().sum(-1)
    found = score_norms(p.log(), -(probs * probs.log()).sum(-1))
    assert (found <= true * (1 + 1e-9)).all() and (found >= true / 2).all()
    uniform = score_norms(torch.tensor([0.25]).double().log(), torch.tensor([4.0]).double().log())
    torch.testing.assert_close(uniform, torch.tensor([1 - 0.5 + 0.25]).double())


def test_gdpo_reports_once_a_weight_without_a_component(caplog) -> None:
    gdpo_with_typo = estimator("gdpo", weights={"fromat": 2.0, "format": 1.0})
    for _ in range(2):
        gdpo_with_typo(batch_of(draw(1, [4]))[0])
    (record,) = caplog.records
    assert "no component 'fromat'" in record.message and "answer, format" in record.message


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("remax", "greedy answers"),
        ("optimal_token_baseline", "entropies"),
        ("on_policy_distillation", "teacher log-probs"),
        ("turn_gae", "critic's values"),
    ],
)
def test_without_its_input_an_estimator_says_what_is_missing(name, missing) -> None:
    batch, _ = batch_of(draw(1, [2]))
    bare = AdvantageInput(batch.token_rewards, batch.response_mask, batch.group_ids, batch.trajectory_ids)
    with pytest.raises(ValueError, match=missing):
        estimator(name)(bare)


def test_scores_count_in_distillation_only_with_several_samples_per_prompt() -> None:
    spec = SPECS["on_policy_distillation"]
    with pytest.raises(ConfigError, match=r"reward_coef: 0\.5 .* rollout\.n is 1"):
        factory_of(spec)(spec.config(reward_coef=0.5), AlgorithmContext(1))
    factory_of(spec)(spec.config(), AlgorithmContext(1))
