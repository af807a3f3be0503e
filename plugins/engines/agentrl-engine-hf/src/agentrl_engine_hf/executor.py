"""One step of the engine, and what may happen between two steps. Everything here runs in the engine's thread."""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import isfinite

from agentrl_core.api import EngineContext, TokenOutput, WeightUpdate
from agentrl_core.api.engine import FinishReason, PauseMode
from agentrl_core.api.errors import EngineError
from agentrl_core.engine_kit.adapters import AdapterVersions, check_adapter
from agentrl_engine_hf.config import HFEngineConfig
from agentrl_engine_hf.counters import Counters
from agentrl_engine_hf.lora import Entry, Pairs, move
from agentrl_engine_hf.model import Model
from agentrl_engine_hf.sampler import Sampler
from agentrl_engine_hf.scheduler import Scheduler
from agentrl_engine_hf.sequence import Sequence
from agentrl_engine_hf.weights import WeightLoader


@dataclass
class _Chunk:
    """Rows that are prefilled in one forward, and how many ids of each."""

    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


class Executor:
    """Admits, prefills, decodes, delivers."""

    def __init__(self, model: Model, config: HFEngineConfig, context: EngineContext, counters: Counters) -> None:
        self.model = model
        self.version = 0
        self._context = context
        self._counters = counters
        self._max_prefill_tokens = config.max_prefill_tokens
        self._scheduler = Scheduler(
            model.new_cache(),
            config.max_num_seqs,
            context.max_model_len,
            config.kv_cache_tokens,
            sort=context.deterministic,
        )
        self._open_sessions: dict[str, None] = {}
        self._held: list[Sequence] = []
        self._paused = False
        self._asleep: set[str] = set()
        self._draining: list[Future[None]] = []
        self._sampler = Sampler([], model.device)
        self._loader: WeightLoader | None = None
        self._adapters: AdapterVersions[Pairs | None] = AdapterVersions(context.adapters)
        self._results: list[tuple[Sequence, TokenOutput | BaseException]] = []

    # The step -----------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a step would do anything now."""
        if not self._scheduler.live or self._paused or self._asleep:
            return False
        if not self._context.deterministic or self._draining:
            return True
        return self._open_sessions.keys() <= self._scheduler.live.keys()

    @property
    def running(self) -> int:
        return self._scheduler.active

    def step(self) -> None:
        """One token for every running request; those who wait join first."""
        started = time.perf_counter()
        try:
            self.model.begin()
            self._admit()
            self._prefill()
            self._decode()
        except Exception as error:  # noqa: BLE001 - no request can be trusted any more, but the next ones can
            self._abandon(error)
        self._counters.add(steps=1, busy_seconds=time.perf_counter() - started)
        self.settle()

    def _admit(self) -> None:
        joined = self._scheduler.admit()
        self._counters.add(
            prompt_tokens=sum(sequence.prompt_length for sequence in joined if not sequence.marks),
            cached_tokens=sum(sequence.cached for sequence in joined if not sequence.marks),
        )

    def _prefill(self) -> None:
        scheduler = self._scheduler
        budget = self._max_prefill_tokens
        while budget > 0 and scheduler.decoding < scheduler.active:
            scheduler.reserve()
            self._copy_prefixes()
            chunk = self._next_chunk(budget)
            if not chunk.sequences:
                continue
            budget -= len(chunk.counts) * max(chunk.counts)
            try:
                self.model.prefill(scheduler.store, scheduler.decoding, chunk.sequences, chunk.counts)
            except Exception as error:  # noqa: BLE001 - whatever a forward raises belongs to the requests in it
                self._fail(chunk.sequences, error)
                continue
            for sequence, count in zip(chunk.sequences, chunk.counts, strict=True):
                sequence.cached += count
                if sequence.remaining == 0:
                    self._promote(sequence)

    def _promote(self, sequence: Sequence) -> None:
        sequence.mark(self.version)
        self._scheduler.promote()

    def _copy_prefixes(self) -> None:
        """Promote the first prefilling rows that need no forward: complete ones, and copies of a known prompt."""
        scheduler = self._scheduler
        sources: list[int] = []
        targets: list[int] = []
        length = copied = 0
        for sequence in scheduler.running()[scheduler.decoding :]:
            donor = scheduler.donor(sequence)
            if donor is not None and donor.row not in targets:
                count = len(sequence.ids) - 1
                sources.append(donor.row)
                targets.append(sequence.row)
                length = max(length, count)
                sequence.cached = count
                copied += count
            if sequence.remaining:
                break
            self._promote(sequence)
        if targets:
            scheduler.store.copy(sources, targets, length)
            self._counters.add(cached_tokens=copied)

    def _next_chunk(self, budget: int) -> _Chunk:
        """The first prefilling rows of similar length, as many as the budget allows; at least one, in part."""
        chunk = _Chunk()
        prefixes = set()
        shortest = longest = 0
        for sequence in self._scheduler.running()[self._scheduler.decoding :]:
            count = sequence.remaining
            if not chunk.sequences:
                start = sequence.cached
                count = sequence.pictures.undivided(start, start + min(count, budget)) - start
                shortest = longest = count
            shortest, longest = min(shortest, count), max(longest, count)
            waits_for_another = sequence.prefix is not None and sequence.prefix in prefixes
            if count == 0 or waits_for_another or longest > 2 * shortest:
                break
            if chunk.sequences and (len(chunk.sequences) + 1) * longest > budget:
                break
            chunk.sequences.append(sequence)
            chunk.counts.append(count)
            if sequence.prefix is not None:
                prefixes.add(sequence.prefix)
            if count < sequence.remaining:
                break
        return chunk

    def _decode(self) -> None:
        scheduler = self._scheduler
        scheduler.reserve()
        sequences = scheduler.running()[: scheduler.decoding]
        if not sequences:
            return
        try:
            logits = self.model.decode(scheduler.store, sequences)
            if self._sampler.sequences != sequences:
                self._sampler = Sampler(sequences, self.model.device, self._context.reserved_ids)
            ids, log_probs = self._sampler.sample(logits)
        except Exception as error:  # noqa: BLE001 - whatever a forward raises belongs to the requests in it
            self._fail(sequences, error)
            return
        ended: list[tuple[Sequence, FinishReason]] = []
        broken: list[Sequence] = []
        for sequence, token, log_prob in zip(sequences, ids, log_probs, strict=True):
            if not isfinite(log_prob):
                broken.append(sequence)
                continue
            reason = sequence.append(token, log_prob)
            if reason is not None:
                ended.append((sequence, reason))
        if broken:
            self._fail_broken(broken, len(sequences))
        for sequence, reason in ended:
            self._end(sequence, reason)

    # Ends ---------------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, reason: FinishReason) -> TokenOutput:
        output = sequence.output(reason)
        if output.token_ids:
            output.routed_experts = self.model.experts(self._scheduler.store, sequence)
        self._scheduler.remove(sequence)
        self._results.append((sequence, output))
        return output

    def _fail(self, sequences: list[Sequence], error: BaseException) -> None:
        for sequence in sequences:
            sequence.keep = False
            self._scheduler.remove(sequence)
            self._results.append((sequence, error))

    def _fail_broken(self, sequences: list[Sequence], running: int) -> None:
        # What a row with nan in it leaves behind would reach its next owner through the mask: 0 x nan is nan.
        self._scheduler.store.clear_rows([sequence.row for sequence in sequences])
        self._fail(
            sequences,
            EngineError(
                f"the model's logits are not finite for {len(sequences)} of {running} running requests (weights "
                f"version {self.version}): check the last update of the weights"
            ),
        )

    def settle(self) -> None:
        """Deliver what has ended; before that, give the module back where nothing runs any more."""
        if not self._scheduler.live:
            self.model.end()
            self._paused = self._paused or bool(self._draining)
            self._finish_draining()
        results, self._results = self._results, []
        for sequence, result in results:
            if self._adapters.leave(sequence.adapter):
                self._forget_adapter(sequence.adapter)
            if isinstance(result, BaseException):
                sequence.future.set_exception(result)
            else:
                sequence.future.set_result(result)

    def fail_all(self, error: BaseException) -> None:
        """The engine ends: so does every request in it."""
        self._results += [(sequence, error) for sequence in self._held]
        self._held.clear()
        self._abandon(error)
        self.settle()

    def _abandon(self, error: BaseException) -> None:
        self._results += [(sequence, error) for sequence in self._scheduler.live.values()]
        self._scheduler.abandon()

    # Commands -----------------------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        if sequence.request_id in self._scheduler.live or any(
            held.request_id == sequence.request_id for held in self._held
        ):
            error = ValueError(f"request {sequence.request_id!r} is running already: a session has one at a time")
            self._results.append((sequence, error))
            return
        try:
            sequence.adapter = self._adapters.enter(sequence.params)
        except ValueError as problem:
            error = ValueError(f"request {sequence.request_id!r}: {problem}")
            self._results.append((sequence, error))
            return
        if self._draining:
            self._held.append(sequence)
        else:
            self._scheduler.add(sequence)

    def abort(self, request_id: str) -> TokenOutput | None:
        sequence = self._scheduler.live.get(request_id)
        if sequence is not None:
            return self._end(sequence, "abort")
        for held in self._held:
            if held.request_id == request_id:
                self._held.remove(held)
                output = held.output("abort")
                self._results.append((held, output))
                return output
        return None

    def drop(self, sequence: Sequence) -> None:
        """Nobody waits for this request any more."""
        if self._scheduler.live.get(sequence.request_id) is sequence:
            sequence.keep = False
            self._end(sequence, "abort")
        elif sequence in self._held:
            self._held.remove(sequence)
            self._results.append((sequence, sequence.output("abort")))

    def open_session(self, session_id: str) -> None:
        # A rollout that starts from an empty cache repeats exactly, whatever ran before it.
        if self._context.deterministic and not self._open_sessions and not self._scheduler.live:
            self._scheduler.abandon()
        self._open_sessions[session_id] = None

    def close_session(self, session_id: str) -> None:
        self._open_sessions.pop(session_id, None)
        self._scheduler.forget(session_id)

    def update_weights(self, update: WeightUpdate, version: int) -> None:
        if update.adapter is not None:
            self._update_adapter(update, version)
            return
        if not update.shared:
            self._get_loader().load(update)
        self._scheduler.invalidate(but_decoding=update.running == "continue")
        self.version = version
        for sequence in self._scheduler.running()[: self._scheduler.decoding]:
            sequence.mark(version)

    def _update_adapter(self, update: WeightUpdate, version: int) -> None:
        lora = self.model.lora
        adapter = check_adapter(update, self._context.adapters, {} if lora is None else lora.modules)
        assert lora is not None
        if not update.shared:
            held = lora.load(update, self._get_loader().tensors(update))
            for entry in self._adapters.add(adapter.name, version, held):
                self._forget_adapter(entry)
            return
        # The actor's module holds one version, which has changed in place, also for requests that run.
        lora.forget()
        self._scheduler.invalidate(but_decoding=update.running == "continue")
        newest = self._adapters.newest(adapter.name)
        if newest is None:
            self._adapters.add(adapter.name, version, None)
        else:
            newest.version = version
        for sequence in self._scheduler.running()[: self._scheduler.decoding]:
            sequence.mark(self.version)

    def _forget_adapter(self, entry: Entry) -> None:
        self._scheduler.forget_adapter(entry)
        if self.model.lora is not None:
            self.model.lora.forget(entry)

    def _get_loader(self) -> WeightLoader:
        if self._loader is None:
            self._loader = WeightLoader(self.model.module)
        return self._loader

    def pause(self, mode: PauseMode, done: "Future[None]") -> None:
        """``done`` is set when nothing is computed any more."""
        if mode == "drain" and self._scheduler.live and not self._paused:
            self._draining.append(done)
            return
        if mode == "abort":
            for request_id in [*self._scheduler.live, *(sequence.request_id for sequence in self._held)]:
                self.abort(request_id)
        self._paused = True
        self.model.end()
        self.settle()
        done.set_result(None)

    def resume(self) -> None:
        self._paused = False
        self._finish_draining()
        for sequence in self._held:
            self._scheduler.add(sequence)
        self._held.clear()

    def _finish_draining(self) -> None:
        draining, self._draining = self._draining, []
        for done in draining:
            done.set_result(None)

    def sleep(self, level: int) -> None:
        self._scheduler.invalidate()
        self._scheduler.store.release()
        self._asleep.add("kv_cache")
        self.model.end()
        if level >= 2 and self.model.owned:
            self._asleep.add("weights")
            self.model.move("cpu")
            move(self._adapters, "cpu")
        self.model.give_memory_back()

    def wake_up(self, tags: set[str]) -> None:
        if "weights" in self._asleep & tags:
            self.model.move(self.model.device)
            move(self._adapters, self.model.device)
        self._asleep -= tags
