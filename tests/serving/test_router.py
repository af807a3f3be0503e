"""Routing to engine replicas."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agentrl_core.api import DeadlineError, EngineError, PolicySpan, SamplingParams, TokenOutput, WorkerError
from agentrl_core.plugins.boundary import deadline
from agentrl_core.serving import router
from agentrl_core.serving.router import AsyncLLMServerManager

OUTPUT = TokenOutput([1], [-1.0], "stop", [PolicySpan(0, 0, 1)])
PARAMS = SamplingParams(max_tokens=4)


class Replica:
    """An engine server that may die, or hold its answers back."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.alive = True
        self.gate: asyncio.Event | None = None

    async def call(self, method: str, *args: Any) -> Any:
        if not self.alive:
            raise WorkerError("the replica died")
        request_id = args[-1]
        self.calls.append((method, request_id))
        if method != "generate":
            return None
        if self.gate is not None:
            await self.gate.wait()
        return OUTPUT

    @property
    def requests(self) -> list[str]:
        return [request for method, request in self.calls if method == "generate"]


def make(count: int, **changes: Any) -> tuple[AsyncLLMServerManager, list[Replica]]:
    replicas = [Replica() for _ in range(count)]
    settings: dict[str, Any] = {"turn_timeout": 60.0, "max_model_len": 16, "vocab_size": 10, "capabilities": ()}
    return AsyncLLMServerManager(replicas, **{**settings, **changes}), replicas


def drive(manager: AsyncLLMServerManager, *requests: str) -> None:
    async def all_in_order() -> None:
        for request in requests:
            await manager.generate(request, [1, 2], PARAMS)

    asyncio.run(all_in_order())


def test_a_request_id_stays_with_its_replica() -> None:
    manager, replicas = make(3)
    drive(manager, "a", "b", "c", "b", "a", "c", "a")
    homes = [set(replica.requests) for replica in replicas]
    assert sorted(map(len, homes)) == [1, 1, 1] and sum(len(replica.requests) for replica in replicas) == 7


def test_a_new_request_goes_to_the_replica_with_the_least_in_flight() -> None:
    manager, replicas = make(2)

    async def scenario() -> None:
        replicas[0].gate = replicas[1].gate = gate = asyncio.Event()
        waiting = [asyncio.create_task(manager.generate(name, [1], PARAMS)) for name in ("a", "b", "c")]
        await asyncio.sleep(0)
        assert sorted(len(replica.requests) for replica in replicas) == [1, 2]
        waiting.append(asyncio.create_task(manager.generate("d", [1], PARAMS)))
        await asyncio.sleep(0)
        assert [len(replica.requests) for replica in replicas] == [2, 2]
        gate.set()
        await asyncio.gather(*waiting)

    asyncio.run(scenario())


def test_routers_begin_with_different_replicas_and_repeat_their_choice() -> None:
    """Each worker has a router: were ties the first replica's, all would load that one."""

    def first(seed: str) -> int:
        manager, replicas = make(4, seed=seed)
        drive(manager, "a")
        return next(index for index, replica in enumerate(replicas) if replica.requests)

    firsts = [first(f"0/{worker}") for worker in range(32)]
    assert set(firsts) == {0, 1, 2, 3}
    assert firsts == [first(f"0/{worker}") for worker in range(32)]


def test_a_dead_replica_hands_its_requests_to_the_others() -> None:
    manager, replicas = make(2, capabilities={"sessions"})
    drive(manager, "a", "b")
    home = 0 if "a" in replicas[0].requests else 1
    replicas[home].alive = False
    drive(manager, "a", "c")
    other = replicas[1 - home]
    assert other.requests == ["b", "a", "c"]
    # The engine there learns of the trajectory before its first request.
    assert other.calls.index(("open_session", "a")) < other.calls.index(("generate", "a"))


def test_a_replica_found_dead_when_a_session_opens_is_left_out() -> None:
    """A dead replica has nothing in flight: without this every new trajectory would be sent to it."""
    manager, replicas = make(2, capabilities={"sessions"})
    replicas[0].alive = False

    async def scenario() -> None:
        for name in ("a", "b", "c"):
            await manager.open_session(name)
            await manager.generate(name, [1], PARAMS)
            await manager.close_session(name)

    asyncio.run(scenario())
    assert replicas[1].requests == ["a", "b", "c"]
    assert [call for call in replicas[1].calls if call[1] == "a"] == [
        ("open_session", "a"), ("generate", "a"), ("close_session", "a"),
    ]  # fmt: skip


def test_without_a_living_replica_requests_fail() -> None:
    manager, replicas = make(2, capabilities={"sessions"})
    for replica in replicas:
        replica.alive = False
    for _ in range(2):
        with pytest.raises(EngineError, match="no engine replica is alive"):
            drive(manager, "a")
    with pytest.raises(EngineError, match="no engine replica is alive"):
        asyncio.run(manager.open_session("b"))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 4, "the prompt is empty"),
        ([1], 0, "max_tokens is 0"),
        ([1], -3, "max_tokens is -3"),
        ([1] * 13, 4, "fit the context of 16"),
        ([1, 10], 4, r"token id 10 is outside the vocabulary 0\.\.9"),
        ([-1], 4, r"token id -1 is outside the vocabulary 0\.\.9"),
    ],
)
def test_impossible_requests_are_refused_before_they_reach_an_engine(prompt, max_tokens, message) -> None:
    manager, replicas = make(1)
    with pytest.raises(EngineError, match=message):
        asyncio.run(manager.generate("a", prompt, SamplingParams(max_tokens=max_tokens)))
    assert replicas[0].calls == []


def test_a_request_that_fits_exactly_is_served() -> None:
    manager, replicas = make(1)
    asyncio.run(manager.generate("a", [1] * 12, PARAMS))
    assert replicas[0].requests == ["a"]


def test_the_oldest_homes_are_forgotten() -> None:
    manager, replicas = make(2, max_sticky=2)
    drive(manager, "a", "b", "a", "c")
    assert set(manager._sticky) == {"a", "c"}
    assigned = [replica.assigned for replica in manager._replicas]
    assert assigned == [sum(home == index for home in manager._sticky.values()) for index in range(2)]


def test_nothing_is_counted_as_in_flight_or_assigned_after_the_end() -> None:
    manager, _ = make(2, capabilities={"sessions"})

    async def scenario() -> None:
        for name in ("a", "b", "c"):
            await manager.open_session(name)
            await manager.generate(name, [1], PARAMS)
            await manager.close_session(name)
        await manager.close_session("unknown")

    asyncio.run(scenario())
    assert all(replica.in_flight == replica.assigned == 0 for replica in manager._replicas) and not manager._sticky


def test_a_request_has_a_deadline() -> None:
    manager, replicas = make(1, turn_timeout=0.01)

    async def scenario() -> None:
        replicas[0].gate = asyncio.Event()
        await manager.generate("a", [1], PARAMS)

    with pytest.raises(DeadlineError, match="request a: no answer within 0.01 s"):
        asyncio.run(scenario())
    assert manager._replicas[0].in_flight == 0


@pytest.mark.parametrize("method", ["open_session", "close_session"])
def test_opening_and_closing_a_session_have_a_deadline(method: str) -> None:
    manager, replicas = make(1, turn_timeout=0.01, capabilities={"sessions"})

    async def never(method_called: str, *args: Any) -> None:
        if method_called == method:
            await asyncio.Event().wait()

    async def scenario() -> None:
        replicas[0].call = never  # type: ignore[method-assign]
        await manager.open_session("a")
        await manager.close_session("a")

    with pytest.raises(DeadlineError, match=f"{method} of a"):
        asyncio.run(scenario())


@pytest.mark.parametrize("error", [EngineError("out of memory"), TimeoutError("of the engine's own")])
def test_an_error_of_the_engine_comes_through_and_the_replica_lives_on(error: Exception) -> None:
    manager, replicas = make(1)
    works: Callable[..., Any] = replicas[0].call

    async def fails(method: str, *args: Any) -> None:
        raise error

    replicas[0].call = fails  # type: ignore[method-assign]
    with pytest.raises(type(error), match=str(error)):
        drive(manager, "a")
    replicas[0].call = works  # type: ignore[method-assign]
    drive(manager, "a")


def test_a_replica_that_came_back_is_used_again() -> None:
    manager, replicas = make(2, restarts=True)
    replicas[0].alive = False
    drive(manager, "a", "b")
    assert manager.know((), ()) == [0] and replicas[1].requests == ["a", "b"]
    replicas[0].alive = True
    manager.put_server(0, replicas[0])
    drive(manager, "c")
    assert manager.know((), ()) == [] and replicas[0].requests == ["c"]


def test_requests_wait_for_the_return_of_a_replica_where_all_are_dead() -> None:
    manager, replicas = make(1, restarts=True)
    replicas[0].alive = False
    fresh = Replica()

    async def scenario() -> None:
        waiting = [asyncio.create_task(manager.generate(name, [1], PARAMS)) for name in ("a", "b")]
        while not manager.know((), ()):
            await asyncio.sleep(0)
        manager.put_server(0, fresh)
        assert await asyncio.gather(*waiting) == [OUTPUT, OUTPUT]

    asyncio.run(scenario())
    assert sorted(fresh.requests) == ["a", "b"]


def test_requests_that_wait_in_vain_fail_with_the_reason() -> None:
    manager, replicas = make(1, restarts=True)
    replicas[0].alive = False

    async def scenario() -> None:
        waiting = asyncio.create_task(manager.generate("a", [1], PARAMS))
        while not manager.know((), ()):
            await asyncio.sleep(0)
        manager.give_up("the GPU has fallen off the bus")
        await waiting

    with pytest.raises(EngineError, match="fallen off the bus"):
        asyncio.run(scenario())


class SkippingLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer whenever there is nothing else to do."""

    skipped = 0.0

    def time(self) -> float:
        return self.skipped

    def _run_once(self) -> None:
        timers = [each.when() for each in self._scheduled if not each.cancelled()]  # type: ignore[attr-defined]
        if timers and not self._ready:  # type: ignore[attr-defined]
            self.skipped = max(self.skipped, min(timers))
        super()._run_once()  # type: ignore[misc]


@pytest.fixture
def run_skipping(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Runs a coroutine in no time; the router's clock is the loop's."""

    def run(work: Any) -> Any:
        with asyncio.Runner(loop_factory=SkippingLoop) as runner:
            monkeypatch.setattr(router.time, "monotonic", runner.get_loop().time)
            return runner.run(work)

    return run


def test_time_in_which_no_replica_is_up_does_not_count(run_skipping: Callable[[Any], Any]) -> None:
    manager, replicas = make(1, restarts=True, turn_timeout=300.0)
    replicas[0].alive = False
    fresh = Replica()

    async def scenario() -> None:
        async with deadline(1800.0, "the trajectory is late", paused=manager.outage):
            waiting = asyncio.create_task(manager.generate("a", [1], PARAMS))
            await asyncio.sleep(3000)
            assert not waiting.done()
            fresh.gate = asyncio.Event()
            manager.put_server(0, fresh)
            await asyncio.sleep(299)
            fresh.gate.set()
            assert await waiting == OUTPUT
        # With a replica the time counts again.
        with pytest.raises(DeadlineError, match="the trajectory is late"):
            async with deadline(1800.0, "the trajectory is late", paused=manager.outage):
                await asyncio.sleep(1801)

    run_skipping(scenario())
    assert manager.outage() == 3000


@pytest.mark.parametrize("verdict", ["replaced", "dropped", "works"])
def test_a_request_of_a_frozen_replica_is_repeated_and_a_slow_one_fails(
    run_skipping: Callable[[Any], Any], verdict: str
) -> None:
    manager, replicas = make(2, restarts=True)
    replicas[0].gate = asyncio.Event()
    replicas[1].gate = asyncio.Event()
    fresh = Replica()

    async def scenario() -> Any:
        waiting = asyncio.create_task(manager.generate("a", [1], PARAMS))
        while not manager.know((), ()):
            await asyncio.sleep(1)
        (index,) = manager.know((), ())
        replicas[1 - index].gate = None
        # Nothing happens until the owner of the replicas has looked.
        await asyncio.sleep(1000)
        assert not waiting.done() and not replicas[1 - index].requests
        match verdict:
            case "replaced":
                manager.put_server(index, fresh)
            case "dropped":
                manager.drop_server(index)
            case "works":
                manager.put_server(index, replicas[index])
        return await waiting

    if verdict == "works":
        with pytest.raises(DeadlineError, match="request a: no answer within 60 s"):
            run_skipping(scenario())
    else:
        assert run_skipping(scenario()) == OUTPUT
        assert fresh.requests == ([] if verdict == "dropped" else ["a"]) or replicas[1].requests == ["a"]


def test_a_request_that_freezes_two_replicas_fails(run_skipping: Callable[[Any], Any]) -> None:
    manager, replicas = make(1, restarts=True)
    replicas[0].gate = asyncio.Event()
    fresh = Replica()
    fresh.gate = asyncio.Event()

    async def scenario() -> None:
        waiting = asyncio.create_task(manager.generate("a", [1], PARAMS))
        for _ in range(2):
            while not manager.know((), ()):
                await asyncio.sleep(1)
            manager.drop_server(0)
            manager.put_server(0, fresh)
        await waiting

    with pytest.raises(DeadlineError, match="request a"):
        run_skipping(scenario())


def test_a_late_failure_of_the_process_before_does_not_take_the_new_one_out() -> None:
    manager, replicas = make(1, restarts=True)
    old, fresh = replicas[0], Replica()

    async def scenario() -> None:
        old.gate = asyncio.Event()
        waiting = asyncio.create_task(manager.generate("a", [1], PARAMS))
        while not old.requests:
            await asyncio.sleep(0)
        manager.put_server(0, fresh)

        old.gate.set()
        manager._lose(0, old, "b", WorkerError("late"))
        await waiting

    asyncio.run(scenario())
    assert manager.know((), ()) == []


def test_a_request_that_kills_one_replica_after_the_other_is_given_up() -> None:
    manager, replicas = make(1, restarts=True)

    async def dies(method: str, *args: Any) -> Any:
        manager.put_server(0, replicas[0] if manager._replicas[0].server is not replicas[0] else other)
        raise WorkerError("out of memory")

    other = Replica()
    replicas[0].call = other.call = dies  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="request a has lost 4 engine replicas.*2 prompt tokens"):
        drive(manager, "a")


PARTIAL = TokenOutput([5, 6], [-0.5, -0.6], "abort", [PolicySpan(3, 0, 2)])


@pytest.mark.parametrize(
    ("retry", "prompt", "left", "whole"),
    [
        ("continue", [1, 2, 5, 6], 2, TokenOutput([5, 6, 1], [-0.5, -0.6, -1.0], "stop",
                                                  [PolicySpan(3, 0, 2), PolicySpan(0, 2, 3)])),
        ("restart", [1, 2], 4, OUTPUT),
    ],
)  # fmt: skip
def test_a_request_that_was_ended_early_is_taken_up_again(retry, prompt, left, whole) -> None:
    manager, replicas = make(1, retry=retry)
    seen: list[tuple[list[int], SamplingParams]] = []

    async def call(method: str, prompt_ids: list[int], params: SamplingParams, request_id: str) -> TokenOutput:
        seen.append((list(prompt_ids), params))
        return PARTIAL if len(seen) == 1 else OUTPUT

    replicas[0].call = call  # type: ignore[method-assign]
    assert asyncio.run(manager.generate("a", [1, 2], SamplingParams(4, seed=9))) == whole
    assert (seen[1][0], seen[1][1].max_tokens) == (prompt, left)
    # The continuation does not draw the beginning's random numbers again.
    assert (seen[1][1].seed == 9) == (retry == "restart")


def test_json_that_was_ended_early_begins_again() -> None:
    manager, replicas = make(1, retry="continue", capabilities={"json_schema"})
    seen: list[list[int]] = []

    async def call(method: str, prompt_ids: list[int], params: SamplingParams, request_id: str) -> TokenOutput:
        seen.append(list(prompt_ids))
        return PARTIAL if len(seen) == 1 else OUTPUT

    replicas[0].call = call  # type: ignore[method-assign]
    assert asyncio.run(manager.generate("a", [1, 2], SamplingParams(4, json_schema="{}"))) == OUTPUT
    assert seen == [[1, 2], [1, 2]], "the schema would begin again in the middle of the text"


def test_what_the_engine_has_no_capability_for_is_refused() -> None:
    manager, replicas = make(1, capabilities={"min_p"})
    with pytest.raises(EngineError, match="the engine has no json_schema and no logit_bias: it lacks the capability"):
        asyncio.run(manager.generate("a", [1], SamplingParams(4, min_p=0.1, logit_bias={1: 1.0}, json_schema="{}")))
    assert replicas[0].calls == []


def test_a_request_that_was_ended_early_with_its_budget_spent_is_not_asked_again() -> None:
    manager, replicas = make(1)

    async def call(method: str, *args: Any) -> TokenOutput:
        return PARTIAL

    replicas[0].call = call  # type: ignore[method-assign]
    output = asyncio.run(manager.generate("a", [1, 2], SamplingParams(2)))
    assert (output.token_ids, output.finish_reason) == ([5, 6], "length")


def test_a_replica_that_leaves_ends_what_it_has_and_new_ones_join() -> None:
    manager, (first, second) = make(2, seed="s")
    third = Replica()

    async def main() -> None:
        first.gate = second.gate = asyncio.Event()
        running = [asyncio.create_task(manager.generate(name, [1, 2], PARAMS)) for name in "abcd"]
        while len(first.requests) + len(second.requests) < 4:
            await asyncio.sleep(0)
        moving = first.requests[0]
        assert manager.know([first, second], [0]) == [] and manager.in_flight(0) == 2
        # One that this router has not heard of is left out until its owner has seen that it serves.
        assert manager.know([first, second, third], [0]) == [2] and manager.in_flight(7) == 0
        manager.put_server(2, third)
        first.gate.set()
        assert await asyncio.gather(*running) == [OUTPUT] * 4 and manager.in_flight(0) == 0
        for name in (moving, "e", "f"):
            await manager.generate(name, [1, 2], PARAMS)
        assert len(first.requests) == 2 and moving in second.requests + third.requests and third.requests
        manager.put_server(4, fourth := Replica())
        assert manager.know((), ()) == [3] and fourth.calls == []

    asyncio.run(main())


def test_requests_wait_where_only_a_replica_that_leaves_is_alive() -> None:
    manager, (first, second) = make(2, restarts=True)

    async def main() -> None:
        manager.know([first, second], [0])
        manager.drop_server(1)
        waiting = asyncio.create_task(manager.generate("a", [1, 2], PARAMS))
        await asyncio.sleep(0)
        assert manager.outage() > 0 and not first.requests
        manager.put_server(1, second)
        await waiting
        assert second.requests == ["a"]

    asyncio.run(main())
