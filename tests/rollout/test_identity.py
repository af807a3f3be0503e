"""Names and seeds of trajectories."""

import dataclasses

from agentrl_core.rollout.identity import TrajectoryKey

KEY = TrajectoryKey(run_seed=1, split="train", step=2, prompt=3, sample=4)


def test_seeds_are_a_function_of_run_split_step_prompt_sample_turn_and_branch_only() -> None:
    seeds = {KEY.seed(0), KEY.seed(1), KEY.seed(0, branch=1)}
    for change in ({"run_seed": 2}, {"split": "x"}, {"step": 3}, {"prompt": 4}, {"sample": 5}):
        seeds.add(dataclasses.replace(KEY, **change).seed(0))
    assert len(seeds) == 8 and all(0 <= seed < 2**63 for seed in seeds)
    assert KEY.next_attempt().seed(0) == KEY.seed(0) == 5309385118405978521


def test_the_seed_of_a_row_stands_for_run_step_and_prompt() -> None:
    other = dataclasses.replace(KEY, run_seed=9, split="validation.sampled", step=9, prompt=9)
    assert KEY.seed(0, row_seed=7) == other.seed(0, row_seed=7) != KEY.seed(0)
    seeds = {KEY.seed(0, row_seed=7), KEY.seed(1, row_seed=7), KEY.seed(0, 1, row_seed=7), KEY.seed(0, row_seed=8)}
    assert len(seeds | {dataclasses.replace(KEY, sample=5).seed(0, row_seed=7)}) == 5


def test_an_attempt_has_a_request_id_of_its_own_and_the_same_trajectory_id() -> None:
    again = KEY.next_attempt()
    assert again.trajectory_id == KEY.trajectory_id and again.request_id != KEY.request_id


def test_request_ids_sort_in_the_order_of_the_prompts() -> None:
    ids = [dataclasses.replace(KEY, prompt=prompt, sample=sample).request_id for prompt in (2, 10) for sample in (1, 9)]
    assert ids == sorted(ids)
