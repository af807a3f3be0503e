"""Who holds which row of the KV cache, and who waits for one."""

import time
from collections import deque
from collections.abc import Iterable

from agentrl_engine_hf.kv_cache import KVCache, round_up
from agentrl_engine_hf.lora import Entry
from agentrl_engine_hf.sequence import Prefix, Sequence


class Scheduler:
    """Rows ``0..decoding-1`` sample, rows ``decoding..active-1`` prefill; behind them lie idle sessions and free rows.

    The rows in use are kept together by swapping, so that a forward works on views. ``live`` holds the requests in the
    engine (waiting or in a row), ``idle`` the finished ones whose rows are kept, idle longest first.
    """

    def __init__(self, store: KVCache, max_num_seqs: int, max_model_len: int, kv_cache_tokens: int,
                 sort: bool) -> None:  # fmt: skip
        self.store = store
        self.owners: list[Sequence | None] = []
        self.active = 0
        self.decoding = 0
        self.waiting: deque[Sequence] = deque()
        self.live: dict[str, Sequence] = {}
        self.idle: dict[str, Sequence] = {}
        self.prefixes: dict[Prefix, Sequence] = {}
        self._max_num_seqs = max_num_seqs
        self._max_capacity = round_up(max_model_len)
        self._kv_cache_tokens = kv_cache_tokens or max_num_seqs * self._max_capacity
        self._sort = sort

    # Requests -----------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Let a request wait for its row."""
        self.live[sequence.request_id] = sequence
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A request ends. Its row is kept for the session's next turn where ``sequence.keep`` says so."""
        del self.live[sequence.request_id]
        if sequence.row < 0:
            self.waiting.remove(sequence)
            return
        if sequence.row < self.decoding:
            self._swap(sequence.row, self.decoding - 1)
            self.decoding -= 1
        self._swap(sequence.row, self.active - 1)
        self.active -= 1
        if sequence.keep:
            self.idle[sequence.request_id] = sequence
        else:
            self._free(sequence)

    def forget(self, session_id: str) -> None:
        """Free what is kept for a session, at once or when its request ends."""
        if session_id in self.live:
            self.live[session_id].keep = False
        if session_id in self.idle:
            self._free(self.idle.pop(session_id))

    def forget_adapter(self, adapter: Entry) -> None:
        """Free what is kept for sessions whose last turn used it: no turn may again."""
        for session_id, sequence in list(self.idle.items()):
            if sequence.adapter is adapter:
                self._free(self.idle.pop(session_id))

    def invalidate(self, but_decoding: bool = False) -> None:
        """All keys and values are worthless: idle sessions go, running requests are prefilled again.

        Args:
            but_decoding: those that sample keep theirs to their end, and leave them to nobody.
        """
        for sequence in list(self.idle.values()):
            self._free(sequence)
        self.idle.clear()
        self.prefixes.clear()
        kept = self.decoding if but_decoding else 0
        for row, sequence in enumerate(self.running()):
            sequence.prefix = None
            if row < kept:
                sequence.keep = False
            else:
                sequence.cached = 0
        self.decoding = kept
        if not kept:
            self.store.clear()

    def abandon(self) -> None:
        """Forget every request and every session."""
        self.owners = []
        self.active = self.decoding = 0
        self.waiting.clear()
        self.live.clear()
        self.idle.clear()
        self.prefixes.clear()
        self.store.release()

    @staticmethod
    def weights_of(sequence: Sequence) -> Entry | None:
        """What keys and values are computed with: those of others are of no use."""
        return sequence.adapter

    # Rows ---------------------------------------------------------------------------------------------------------

    def running(self) -> list[Sequence]:
        """The sequences in rows ``0..active-1``."""
        return [sequence for sequence in self.owners[: self.active] if sequence is not None]

    def admit(self) -> list[Sequence]:
        """Give rows to as many waiting requests as fit; returns them."""
        joining = self._take_waiting()
        # Those who can copy another's prompt come after it; the longest prompts share their forward's padding.
        seen: set[Prefix] = set()
        fresh, copies = [], []
        for sequence in joining:
            self._claim(sequence)
            key = self.weights_of(sequence), tuple(sequence.ids[:-1]), sequence.pictures.names
            sequence.prefix = key if sequence.cached == 0 else None
            if sequence.prefix is None or sequence.prefix not in seen:
                fresh.append(sequence)
            else:
                copies.append(sequence)
            if sequence.prefix is not None:
                seen.add(sequence.prefix)
        fresh.sort(key=lambda sequence: -sequence.remaining)
        for sequence in (*fresh, *copies):
            self._place(sequence)
        return joining

    def reserve(self) -> None:
        """Make the store fit the running batch before a forward, and carry out pending moves.

        Where ``kv_cache_tokens`` is not enough, the requests that came last go back to wait.
        """
        needed = self._span(self.running())
        while self.active > self._row_limit(needed):
            self._preempt()
            needed = self._span(self.running())
        capacity = self.store.capacity
        if needed > capacity:
            capacity = max(needed, min(round_up(capacity * 3 // 2), self._max_capacity))
        if len(self.owners) * capacity <= self._kv_cache_tokens:
            self.store.resize(len(self.owners), capacity)
            self._flush()
            return
        self.store.resize(len(self.owners), max(self.store.capacity, 1))
        self._flush()
        self.store.resize(*self._shrink(needed))

    def donor(self, sequence: Sequence) -> Sequence | None:
        """A sequence whose row begins with all that ``sequence`` needs prefilled."""
        if sequence.cached or sequence.prefix is None:
            return None
        donor = self.prefixes.get(sequence.prefix)
        count = len(sequence.ids) - 1
        if donor is None or donor.row < 0 or donor.cached < count or len(sequence.prefix[1]) != count:
            return None
        return donor

    def promote(self) -> None:
        """The first prefilling row has all it needs and joins those who sample."""
        sequence = self.owners[self.decoding]
        if sequence is not None and sequence.prefix is not None and len(sequence.prefix[1]) == sequence.cached:
            self.prefixes.setdefault(sequence.prefix, sequence)
        self.decoding += 1

    # Inner --------------------------------------------------------------------------------------------------------

    def _take_waiting(self) -> list[Sequence]:
        if self._sort:
            self.waiting = deque(sorted(self.waiting, key=lambda sequence: sequence.request_id))
        taken: list[Sequence] = []
        span = self._span(self.running())
        while self.waiting:
            span = max(span, self._span(self.waiting, 1))
            if self.active + len(taken) >= self._row_limit(span):
                break
            taken.append(self.waiting.popleft())
        now = time.perf_counter() if taken else 0.0
        for sequence in taken:
            sequence.queued += now - sequence.waits_since
        return taken

    @staticmethod
    def _span(sequences: Iterable[Sequence], count: int | None = None) -> int:
        """Capacity that the (first ``count``) sequences need for one more forward."""
        longest = 0
        for number, sequence in enumerate(sequences):
            if number == count:
                break
            longest = max(longest, len(sequence.ids))
        return round_up(longest)

    def _row_limit(self, span: int) -> int:
        return max(1, min(self._max_num_seqs, self._kv_cache_tokens // max(1, span)))

    def _claim(self, sequence: Sequence) -> None:
        """Take over the row of the session's last turn as far as it agrees."""
        last = self.idle.pop(sequence.request_id, None)
        if last is None:
            return
        sequence.row, last.row = last.row, -1
        if self.weights_of(last) == self.weights_of(sequence):
            common = min(_common_prefix(last.ids, sequence.ids), last.cached, len(sequence.ids) - 1)
            sequence.cached = sequence.pictures.shared(last.pictures, common)
        self.owners[sequence.row] = sequence
        self._drop_prefix(last)

    def _place(self, sequence: Sequence) -> None:
        """Move a sequence, new or with a claimed row, behind the running ones."""
        if sequence.row < 0:
            sequence.row = self._free_row()
            self.owners[sequence.row] = sequence
        self._swap(sequence.row, self.active)
        self.active += 1

    def _free_row(self) -> int:
        try:
            return self.owners.index(None, self.active)
        except ValueError:
            pass
        rows = len(self.owners)
        if rows < self._max_num_seqs and self._may_grow():
            self.owners.extend([None] * (min(self._max_num_seqs, max(8, 2 * rows)) - rows))
            return rows
        session_id, oldest = next(iter(self.idle.items()))
        row = oldest.row
        del self.idle[session_id]
        self._free(oldest)
        return row

    def _may_grow(self) -> bool:
        return not self.idle or 2 * len(self.owners) * self.store.capacity <= self._kv_cache_tokens

    def _free(self, sequence: Sequence) -> None:
        self.owners[sequence.row] = None
        sequence.row, sequence.cached = -1, 0
        self._drop_prefix(sequence)

    def _drop_prefix(self, sequence: Sequence) -> None:
        if sequence.prefix is not None and self.prefixes.get(sequence.prefix) is sequence:
            del self.prefixes[sequence.prefix]

    def _preempt(self) -> None:
        sequence = self.owners[self.active - 1]
        if sequence is None:
            raise AssertionError("a row in use has no owner")
        self.active -= 1
        self.decoding = min(self.decoding, self.active)
        self._free(sequence)
        sequence.waits_since = time.perf_counter()
        self.waiting.appendleft(sequence)

    def _shrink(self, needed: int) -> tuple[int, int]:
        """Evict the idle sessions that do not fit beside the running batch; returns rows and capacity that do."""
        capacity = max(needed, 64)
        rows = min(len(self.owners), max(1, self._kv_cache_tokens // capacity))
        for session_id, sequence in list(self.idle.items()):
            if sequence.row >= rows or sequence.cached > capacity:
                del self.idle[session_id]
                self._free(sequence)
        del self.owners[rows:]
        return rows, capacity

    def _flush(self) -> None:
        self.store.flush([0 if owner is None else owner.cached for owner in self.owners])

    def _swap(self, left: int, right: int) -> None:
        if left == right:
            return
        owners = self.owners
        owners[left], owners[right] = owners[right], owners[left]
        for row in (left, right):
            owner = owners[row]
            if owner is not None:
                owner.row = row
        self.store.swap(left, right)


def _common_prefix(left: list[int], right: list[int]) -> int:
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size
    return next(index for index in range(size) if left[index] != right[index])
