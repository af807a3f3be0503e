"""Batches and futures on Ray, through its object store: what workers in processes get is what the model says."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_compat_verl.dispatch import DataProtoFuture
from agentrl_compat_verl.groups import VerlGroup
from agentrl_compat_verl.pools import RayResourcePool
from agentrl_compat_verl.protocol import DataProto
from agentrl_compat_verl.ray_groups import RayWorkerGroup
from agentrl_core.controller import ClassWithInitArgs, Runtime
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.test_batches import Numbering, batches, modelled

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def groups(ray_runtime: Runtime) -> Iterator[dict[int, VerlGroup]]:
    worker = ClassWithInitArgs(Numbering)
    made = {size: RayWorkerGroup(RayResourcePool([size], strategy="PACK"), worker, owns_pool=True) for size in (2, 3)}
    yield made
    for group in made.values():
        group.close()


@pytest.mark.slow
@fuzz
@given(batches(st.integers(0, 13)), st.permutations([2, 3]), st.booleans(), st.integers(1, 3))
def test_futures_reach_the_next_group_as_the_batch_would(
    groups: dict[int, VerlGroup], data: DataProto, sizes: list[int], padding: bool, every: int
) -> None:
    one, two = (groups[size] for size in sizes)
    one.auto_padding = two.auto_padding = padding
    future = one.echo(data)
    assert isinstance(future, DataProtoFuture)
    assert modelled(two.echo(future).get()) == modelled(data)
    expected = (2 * data.batch["n"]).tolist()
    for left, right in ((future, data), (data, future), (future, one.echo(data))):
        assert two.both(left, right).batch["sum"].tolist() == expected
    if not padding and len(data) >= sizes[0]:
        uneven = one.some(data, every)
        kept = [row for chunk in data.chunk(sizes[0]) for row in modelled(chunk)[::every]]
        assert modelled(two.echo(uneven).get()) == kept


@fuzz
@given(batches())
def test_the_object_store_gives_back_what_it_got(groups: dict[int, VerlGroup], data: DataProto) -> None:
    again = groups[2].echo(data).get()
    assert modelled(again) == modelled(data) and again.meta_info == data.meta_info
    assert {name: column.dtype for name, column in again.batch.items()} == {
        name: column.dtype for name, column in data.batch.items()
    }
