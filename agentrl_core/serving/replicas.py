"""The engine replicas of a run: started, watched, given new weights, and replaced where they die."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from agentrl_core.api import (
    AgentRLError,
    EngineContext,
    EngineError,
    SamplingParams,
    TokenOutput,
    WorkerError,
    together,
)
from agentrl_core.config.schema import ResolvedConfig, ServedSlot
from agentrl_core.controller.runtime import ActorHandle, ActorOptions, Runtime
from agentrl_core.plugins.boundary import deadline, wait_reported
from agentrl_core.serving.placement import GpuAssignments, assign_anywhere, sleep_level
from agentrl_core.serving.replica_changes import ChangeRequests
from agentrl_core.serving.server import EngineServer, Progress, tail_of
from agentrl_core.serving.weight_transport import ReplicaState, WeightDelivery, Weights

logger = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")
CLOSE_TIMEOUT = 30.0
"""Seconds that an actor may take to close before it is killed."""
START_GRACE = 60.0
"""Extra seconds for a server's process to start and import; after ``start_timeout`` and these it counts as failed."""


def blocking(
    method: "Callable[Concatenate[EngineReplicas, P], Coroutine[Any, Any, T]]",
) -> "Callable[Concatenate[EngineReplicas, P], T]":
    """Run a coroutine method to its end in the runtime's event loop, for the trainer, which is no coroutine."""

    @wraps(method)
    def call(self: "EngineReplicas", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.runtime.run(method(self, *args, **kwargs))

    return call


async def close_actors(actors: Sequence[ActorHandle]) -> None:
    """Close and kill them; a failure to close one does not keep the others open."""

    async def close(actor: ActorHandle) -> None:
        try:
            async with deadline(CLOSE_TIMEOUT, f"no answer within {CLOSE_TIMEOUT:g} s"):
                await actor.call("close")
        except Exception:  # noqa: BLE001 - the run is over, and its own error matters more
            logger.warning("closing %s failed", actor.name, exc_info=True)
        finally:
            actor.kill()

    await asyncio.gather(*map(close, actors))


class EngineReplicas:
    """Owns the engine servers.

    A replica that dies is restarted and gets the current weights before it serves again. That happens while
    trajectories run; the actor is asked for weights only then, in :meth:`sleep` and in :meth:`update_weights`, so that
    it may train between them. :meth:`_bring` knows which weights a replica must have and whether it
    must sleep, and brings every replica there: those that serve, and those that have just been restarted.

    Args:
        runtime: where they live. It closes them when it shuts down, at the latest.
        config: resolved.
        context: of replica 0; ``shared_module`` set only if the engine may use the actor's module.
        assignments: of each replica; default: any host, on the CPU.
        name: key in ``engines`` of an engine with a frozen model, which never gets weights; empty: the policy's.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: ResolvedConfig,
        context: EngineContext,
        assignments: GpuAssignments | None = None,
        name: str = "",
    ) -> None:
        slot: ServedSlot = config.engines[name] if name else config.rollout.engine
        self._slot = slot
        self.sleep_level = 0 if name else sleep_level(config, context.device != "cpu")
        """What replicas release in :meth:`sleep`; 0: nothing."""
        self._name = name
        self._label = f"engine {name!r}" if name else "engine"
        self.runtime = runtime
        self.context = context
        self.has_sessions = slot.has("sessions")
        replicas = config.engines[name].replicas if name else config.engine_replicas
        self._assignments = assign_anywhere(slot, replicas) if assignments is None else assignments
        # In addition to the requests there must be room for health checks and for updates.
        self._concurrency = config.agent_workers * config.rollout.agent.max_concurrent + 100
        self._members: list[ReplicaState] = []
        self._routers: Sequence[ActorHandle] = ()
        self._delivery = WeightDelivery(slot.devices, config.rollout.on_new_weights, self._in_time)
        self._is_asleep = self._is_closed = False
        self._restarting: dict[int, asyncio.Task[None]] = {}
        self._restarts = 0
        self._last_death = ""
        self._hopeless = ""
        self._changes: ChangeRequests | None = None
        self._watches = 0
        self._watcher: asyncio.Task[None] | None = None
        runtime.started.callback(self.close)
        for replica in range(len(self._assignments)):
            self._members.append(ReplicaState([], slot.restarts))
            self._make(replica)

    @property
    def servers(self) -> list[ActorHandle]:
        """The present handles, in the order of the replicas; none once they are closed."""
        return [member.server for member in self._members if member.servers]

    def introduce(self, routers: Sequence[ActorHandle]) -> None:
        """Set the workers whose routers learn which replicas came back, or will not."""
        self._routers = routers

    def _make(self, replica: int) -> None:
        """Give a replica new servers. Each is known as soon as it exists, so that :meth:`close` finds it."""
        slot, member = self._slot, self._members[replica]
        member.servers, member.newest, member.sleeping = [], None, ()
        for host, assigned in enumerate(self._assignments[replica]):
            server = self.runtime.actor(
                EngineServer, slot, replace(self.context, replica=replica, node_rank=host),
                assigned.devices, name=f"{self._name or 'engine'}-{replica}" + (f".{host}" if host else ""),
                options=ActorOptions(
                    num_gpus=assigned.num_gpus, node=assigned.node, python=slot.python,
                    max_concurrency=self._concurrency,
                ),
            )  # fmt: skip
            member.servers.append(server)

    # Start ------------------------------------------------------------------------------------------------------

    @blocking
    async def start(self) -> None:
        """Start every replica. Raises EngineError where one does not."""
        await together(self._boot(member) for member in self._members)

    async def _boot(self, member: ReplicaState) -> None:
        try:
            # Hosts wait for each other as they start.
            rendezvous = ""
            if len(member.servers) > 1:
                rendezvous = str(await self._in_time("rendezvous", member.server.call("rendezvous")))
        except WorkerError as error:
            raise EngineError(f"{member.server.name} died as it started: {error}") from error
        await together(self._boot_server(server, rendezvous) for server in member.servers)

    async def _boot_server(self, server: ActorHandle, rendezvous: str) -> None:
        limit = self._slot.start_timeout + START_GRACE
        files: tuple[str, ...] = ()
        phase = "its process to start"

        def waits() -> str:
            words = tail_of(files, 1)
            return f"{server.name}: {phase}" + (f"; the last line of its log: {words}" if words else "")

        def late() -> str:
            return (
                f"{server.name} has not answered for {limit:g} s (start_timeout="
                f"{self._slot.start_timeout:g}).\n{_last_words(files)}"
            )

        try:
            with wait_reported(waits):
                async with deadline(limit, late, EngineError):
                    _, files = await server.call("process")
                    phase = f"{self._slot.name} to load the model and to be healthy"
                    await server.call("start", rendezvous)
        except WorkerError as error:
            raise EngineError(f"{server.name} died as it started: {error}\n{_last_words(files)}") from error

    # Watch ------------------------------------------------------------------------------------------------------

    async def watched(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, with the replicas watched and replaced meanwhile. Calls may overlap.

        The actor is free meanwhile, unless calls of the trainer overlap with it: then it is in :meth:`update_weights`
        only.

        Raises:
            EngineError: every replica is dead, and none has a new start left.
        """
        self._watches += 1
        if not self.runtime.overlaps:
            await self._delivery.actor.release()
        if self._watcher is None:
            for member in self._members:
                member.looked = None
            self._watcher = asyncio.create_task(self._watch())
        try:
            if self._changes is not None:
                self._changes.begin()
            result = await work
            # A rollout may be over before the watcher has looked at a replica that was lost on the way.
            await self._look()
            return result
        finally:
            self._watches -= 1
            if not self._watches:
                watcher, self._watcher = self._watcher, None
                watcher.cancel()
                with suppress(asyncio.CancelledError):
                    await watcher
                await self._delivery.actor.hold()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._slot.health_interval)
            if self._changes is not None:
                self._changes.begin()
            await self._look(everywhere=True)

    async def _look(self, everywhere: bool = False) -> None:
        """Examine the replicas that the routers have left out, or all that are alive."""
        alive = [index for index, each in enumerate(self._members) if each.is_alive]
        leaving = [index for index, each in enumerate(self._members) if each.leaves]
        lost = {index for each in await self._tell("know", self.servers, leaving) for index in each}
        if self._hopeless:
            # Again, because a worker that was restarted, or was slow to answer, does not know it.
            await self._tell("give_up", self._hopeless)
        await together(self._examine(index, index in lost) for index in alive if everywhere or index in lost)

    async def _examine(self, index: int, is_left_out: bool) -> None:
        """Replace a replica that is not healthy, or that computes nothing although it has requests.

        Processes behind the engine may hang although it answers. A request of our own would say so only after those
        that wait before it, however long they take.
        """
        member = self._members[index]
        limit = self._slot.health_timeout
        try:
            async with deadline(limit, f"no answer within {limit:g} s"):
                await together(server.call("health") for server in member.servers)
                look: Progress = await member.server.call("progress")
            # A deterministic engine waits for trajectories that wait on tools.
            if not self.context.deterministic:
                self._note_progress(member, look)
                if is_left_out:
                    await self._see_progress(index, look)
        except AgentRLError as error:
            self._replace(index, str(error))
            return
        if is_left_out:
            await self._tell("put_server", index, member.server)

    def _note_progress(self, member: ReplicaState, look: Progress) -> None:
        """Raises EngineError where the engine has computed nothing for ``health_timeout`` while it had requests."""
        now, limit = asyncio.get_running_loop().time(), self._slot.health_timeout
        before = member.looked
        stands = before is not None and before[0].number == look.number and before[0].in_flight and look.in_flight
        if before is None or not stands:
            member.looked = look, now
        elif look.is_measured and now - before[1] > limit:
            raise EngineError(f"it has computed nothing for {now - before[1]:.0f} s, with {look.in_flight} requests")

    async def _see_progress(self, index: int, before: Progress) -> None:
        """Return as soon as a replica computes something; with no request of its own it gets one.

        Raises:
            EngineError: it does not within ``health_timeout``, or the request fails.
        """
        limit, server = self._slot.health_timeout, self._members[index].server
        probe: asyncio.Future[Any] | None = None
        late = f"it has computed nothing for {limit:g} s, with {before.in_flight} requests"
        try:
            async with deadline(limit, late, EngineError):
                look = before
                while look.number == before.number and not (probe is not None and probe.done()):
                    if probe is None and not (look.is_measured and look.in_flight):
                        probe = asyncio.ensure_future(self.sample(index, [0], SamplingParams(1), f"check-{index}"))
                    await asyncio.wait([probe] if probe else [asyncio.ensure_future(asyncio.sleep(limit / 20))],
                                       timeout=limit / 20)  # fmt: skip
                    look = await server.call("progress")
                if probe is not None and probe.done():
                    probe.result()
        finally:
            if probe is not None:
                probe.cancel()
                await asyncio.gather(probe, return_exceptions=True)

    def _replace(self, index: int, reason: str) -> None:
        """Begin to replace a dead replica."""
        if index not in self._restarting and not self._is_closed:
            self._members[index].is_alive = False
            task = asyncio.get_running_loop().create_task(self._restart(index, reason))
            self._restarting[index] = task
            task.add_done_callback(lambda _: self._restarting.pop(index, None))

    async def _restart(self, index: int, reason: str) -> None:
        member = self._members[index]
        while member.restarts_left > 0:
            member.restarts_left -= 1
            logger.error(
                "%s replica %d died (%s); restarting it, %d restarts left",
                self._label, index, reason, member.restarts_left,
            )  # fmt: skip
            try:
                for server in member.servers:
                    server.kill()
                self._make(index)
                # Requests that wait to hear whether this replica still works move to the others now, whether or not
                # it boots: hence no together().
                await asyncio.gather(self._boot(member), self._tell("drop_server", index))
                await self._serve(index)
            except (EngineError, WorkerError) as error:
                reason = str(error)
                continue
            self._restarts += 1
            weights = "" if self._name else f" with weights {member.version}"
            logger.warning("%s replica %d is back%s", self._label, index, weights)
            return
        self._last_death = f"; the last one failed: {reason}"
        logger.error("%s replica %d failed permanently (%s)", self._label, index, reason)
        if not any(each.is_alive or each.restarts_left for each in self._members):
            self._hopeless = f"no {self._label} replica is alive and none can be started: {reason}"
            await self._tell("give_up", self._hopeless)

    async def _serve(self, index: int) -> None:
        """Let a replica that has booted take requests, in the state that all must be in."""
        member = self._members[index]
        while not self._is_brought(member):
            await self._bring(member)
        member.is_alive = True
        await self._tell("put_server", index, member.server)

    # Changes ----------------------------------------------------------------------------------------------------

    def accept_changes(self, run: Path) -> None:
        """Add and drain replicas as ``agentrl engines`` asks for it in the directory of the run."""
        self._changes = ChangeRequests(run, self.add, self.drain)

    async def add(self) -> int:
        """Start one more replica with the current weights, and let it serve; its number.

        Raises:
            EngineError: this run's replicas are where no other has room, or it does not start.
            WorkerError: it died as it got its weights.
        """
        if self.context.deterministic:
            raise EngineError("rollout.deterministic=true needs one replica; set it to false")
        first = self._assignments[0]
        if any(each.node or each.devices is not None for each in first):
            raise EngineError(
                "rollout.engine.placement: found colocated, and all GPUs of the training processes have an engine; "
                "only with placement=standalone can replicas be added"
            )
        index, member = len(self._members), ReplicaState([], self._slot.restarts, is_alive=False)
        self._assignments = [*self._assignments, first]
        self._members.append(member)
        try:
            self._make(index)
            await self._boot(member)
            await self._serve(index)
        except BaseException:
            member.leaves = True
            for server in member.servers:
                server.kill()
            raise
        return index

    async def drain(self, index: int) -> None:
        """Send a replica no new requests, let it answer those that it has, and close it.

        Raises:
            EngineError: there is no such replica, or no other one.
        """
        serving = [number for number, each in enumerate(self._members) if each.is_alive and not each.leaves]
        if index not in serving:
            raise EngineError(f"replica {index} does not serve; those that do are {', '.join(map(str, serving))}")
        if len(serving) == 1:
            raise EngineError(f"replica {index} is the only one that serves; add another one first")
        member = self._members[index]
        member.leaves, member.restarts_left = True, 0
        await self._look()
        while member.is_alive and any(await self._tell("in_flight", index)):
            await asyncio.sleep(min(1.0, self._slot.health_interval))
        member.is_alive = False
        await self._tell("drop_server", index)
        await close_actors(member.servers)

    async def _tell(self, method: str, *args: Any) -> list[Any]:
        """The answers of the routers; those that are dead or do not answer in time are left out."""

        async def one(router: ActorHandle) -> Any:
            async with deadline(self._slot.health_timeout, "no answer"):
                return await router.call("route", self._name, method, *args)

        answers = await asyncio.gather(*map(one, self._routers), return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    # Weights and sleep ------------------------------------------------------------------------------------------

    def _is_brought(self, member: ReplicaState) -> bool:
        """A replica is in the state that all must be in, which may have changed while it was brought there."""
        if bool(member.sleeping) != self._is_asleep:
            return False
        return (self._is_asleep and self.sleep_level == 2) or self._delivery.is_newest(member)

    async def _bring(self, member: ReplicaState) -> None:
        """Bring a replica that runs to the state that all must be in: asleep, or awake with the newest weights.

        Raises:
            EngineError: it refuses.
            WorkerError: it died, or does not answer.
        """
        if self._is_asleep:
            if self.sleep_level < 2:
                # A sleeper of level 1 keeps its weights, and must have the newest ones when it wakes.
                await self._delivery.load(member)
            else:
                member.newest = None
            if not member.sleeping:
                # Before the call: a sleeper that does not answer may sleep nevertheless.
                member.sleeping = ("weights", "kv_cache")
                try:
                    await self._in_time("sleep", member.server.call("sleep", self.sleep_level))
                except WorkerError as error:
                    logger.warning("engine %s does not answer to 'sleep': %s", member.server.name, error)
            return
        # The KV cache waits: while weights are loaded there may be no room for both.
        await self._wake(member, "weights")
        await self._delivery.load(member)
        await self._wake(member, "kv_cache")

    async def _wake(self, member: ReplicaState, tag: str) -> None:
        if tag in member.sleeping:
            await self._in_time("wake_up", member.server.call("wake_up", [tag]))
            member.sleeping = tuple(each for each in member.sleeping if each != tag)

    async def _bring_all(self) -> None:
        """Bring every living replica to the state that all must be in; those that die on the way are replaced."""
        alive = [(index, member) for index, member in enumerate(self._members) if member.is_alive]
        results = await asyncio.gather(*(self._bring(member) for _, member in alive), return_exceptions=True)
        for (index, _), result in zip(alive, results, strict=True):
            if isinstance(result, WorkerError):
                self._replace(index, str(result))
            elif isinstance(result, BaseException):
                raise result

    @blocking
    async def sleep(self) -> None:
        """Let every replica release what its level of sleep says, until it gets new weights.

        Waits for replicas that are being restarted: they take the memory that the others release for the trainer.
        """
        if not self.sleep_level:
            return
        self._is_asleep = True
        await self._delivery.actor.release()
        try:
            await self._bring_all()
            while self._restarting:
                await asyncio.wait(self._restarting.values())
        finally:
            await self._delivery.actor.hold()

    @blocking
    async def update_weights(self, weights: Weights) -> None:
        """Give every replica the new weights, and wake those that sleep.

        Raises:
            EngineError: a replica refuses them, or none is alive.
            WorkerError: the actor, or a replica that weights are broadcast to, died in the middle of it.
        """
        await self._delivery.note(weights)
        async with self._awake():
            if weights.sender is not None:
                members = [member for member in self._members if member.is_alive]
                await together(self._wake(member, "weights") for member in members)
                await self._in_time("receive weights", self._delivery.broadcast(weights, members))

    @blocking
    async def wake_up(self) -> None:
        """Wake replicas that sleep; their weights are the newest ones."""
        async with self._awake():
            pass

    @asynccontextmanager
    async def _awake(self) -> AsyncIterator[None]:
        """After the block all replicas are awake with the newest weights, and at least one is alive."""
        self._is_asleep = False
        await self._delivery.actor.release()
        try:
            yield
            await self._bring_all()
            while not any(member.is_alive for member in self._members):
                if not self._restarting:
                    raise EngineError(f"no engine replica is alive to take the new weights{self._last_death}")
                await asyncio.wait(self._restarting.values(), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self.runtime.overlaps or not self._watches:
                await self._delivery.actor.hold()

    async def _in_time(self, what: str, call: Coroutine[Any, Any, T]) -> T:
        """A frozen process cannot keep its own deadline: this one is kept from outside."""
        limit = self._slot.start_timeout + START_GRACE
        async with deadline(limit, f"{what}: no answer within {limit:g} s, the process may be frozen", WorkerError):
            return await call

    # Questions --------------------------------------------------------------------------------------------------

    @blocking
    async def probe(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[TokenOutput]:
        """What each replica answers to one request, in their order; no trajectory, tool or reward takes part."""
        replicas = (replica for replica, member in enumerate(self._members) if not member.leaves)
        return await together(self.sample(replica, prompt_ids, params, "probe") for replica in replicas)

    async def sample(
        self, replica: int, prompt_ids: Sequence[int], params: SamplingParams, request_id: str
    ) -> TokenOutput:
        """One request to one replica, without routing."""
        server = self._members[replica].server
        limit = self._slot.start_timeout
        async with deadline(limit, f"{server.name}: no answer within {limit:g} s", EngineError):
            if self.has_sessions:
                await server.call("open_session", request_id)
            output: TokenOutput = await server.call("generate", prompt_ids, params, request_id)
            if self.has_sessions:
                await server.call("close_session", request_id)
        return output

    @blocking
    async def memory(self) -> int | None:
        """Bytes of host memory of all replicas and the processes that they started; None where it is unknown."""
        found = await self._ask("memory", every_host=True)
        return None if None in found else sum(found)

    @blocking
    async def metrics(self) -> dict[str, float]:
        """Counters of all replicas added up, ``restarts``, ``tokens_per_second`` and ``cache_hit_rate``; the longest
        pause of each replica for new weights, and of all."""
        totals: dict[str, float] = defaultdict(float)
        rate = 0.0
        for replica, metrics in enumerate(await self._ask("metrics")):
            if metrics and (pause := metrics.pop("pause_seconds", 0.0)):
                totals[f"pause/replica_{replica}_seconds"] = pause
                totals["pause_seconds"] = max(pause, totals["pause_seconds"])
            for name, value in (metrics or {}).items():
                totals[name] += value
            if metrics and metrics.get("serving_seconds"):
                rate += metrics["generated_tokens"] / metrics["serving_seconds"]
        if rate:
            totals["tokens_per_second"] = rate
        if totals.get("prompt_tokens"):
            totals["cache_hit_rate"] = totals["cached_tokens"] / totals["prompt_tokens"]
        if self._restarts:
            totals["restarts"] = float(self._restarts)
        return dict(totals)

    @blocking
    async def close(self) -> None:
        """Close the servers on every host of every replica, those of a replica that is being restarted too."""
        self._is_closed = True
        restarting = [*self._restarting.values(), *(self._changes.tasks if self._changes is not None else ())]
        for task in restarting:
            task.cancel()
        await asyncio.gather(*restarting, return_exceptions=True)
        if self._changes is not None:
            self._changes.close()
        servers = [
            server for member in self._members if member.is_alive or not member.leaves for server in member.servers
        ]
        for member in self._members:
            member.servers, member.is_alive = [], False
        await close_actors(servers)

    async def _ask(self, method: str, *args: Any, every_host: bool = False) -> list[Any]:
        """The answers of all replicas, or of all their hosts; None of those that are dead."""

        async def one(member: ReplicaState, server: ActorHandle) -> Any:
            if not member.is_alive:
                return None
            try:
                return await self._in_time(method, server.call(method, *args))
            except WorkerError as error:
                logger.warning("engine %s does not answer to %r: %s", server.name, method, error)
                return None

        asked = ((member, member.servers if every_host else member.servers[:1]) for member in self._members)
        return await together(one(member, server) for member, servers in asked for server in servers)


def _last_words(files: Sequence[str]) -> str:
    text = tail_of(files)
    return f"The last lines of its log:\n{text}" if text else ""
