import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl_engine_hf.sampler import mix, uniforms


@given(st.lists(st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 10**6)), min_size=1, max_size=20))
def test_a_uniform_depends_on_its_own_seed_and_index_only(pairs) -> None:
    together = uniforms([seed for seed, _ in pairs], [index for _, index in pairs])
    alone = [uniforms([seed], [index])[0] for seed, index in pairs]
    assert together.tolist() == alone
    assert ((together > 0) & (together < 1)).all()


def test_uniforms_of_neighbouring_seeds_and_indices_are_independent() -> None:
    seeds, indices = np.meshgrid(np.arange(64), np.arange(64), indexing="ij")
    grid = uniforms(seeds.ravel().tolist(), indices.ravel().tolist()).reshape(64, 64)
    counts, _ = np.histogram(grid, bins=16, range=(0, 1))
    # Chi squared with 15 degrees of freedom is below 44.3 in all but 1 of 10,000 cases.
    assert ((counts - 256) ** 2 / 256).sum() < 44.3
    for left, right in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.07


@given(st.integers(0, 2**64), st.integers(0, 64), st.integers(1, 100))
def test_mixed_seeds_differ_by_replica_and_request(seed, replica, request) -> None:
    seeds = {mix(seed, replica, request), mix(seed, replica + 1, request), mix(seed, replica, request + 1)}
    assert len(seeds) == 3
