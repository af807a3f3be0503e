"""One request on its way through the engine."""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from agentrl_core.api.engine import FinishReason, PolicySpan, SamplingParams, TokenOutput
from agentrl_engine_hf.images import NO_PICTURES, Pictures
from agentrl_engine_hf.lora import Entry

Prefix = tuple[Entry | None, tuple[int, ...], tuple[str, ...]]


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and what was sampled after it.

    Args:
        ids: prompt and output together.
        max_length: ``len(ids)`` at which sampling ends.
        row: row of the KV cache, -1 without one.
        cached: how many leading ``ids`` have valid keys and values in that row. A sequence that samples has all but
            its last id cached; the forward that feeds this id predicts the next.
        adapter: that it samples with; None: the model's own weights alone.
        pictures: the images of the prompt.
        marks: (version of the weights, index of the first output token sampled by them).
        keep: whether the row is kept for the session's next turn when the request ends.
        waits_since, queued: when it began to wait for a row (``time.perf_counter``), and the seconds of all its waits.
        prefix: key under which other requests find this row to copy their prompt from: the adapter, the ids
            and the images.
    """

    request_id: str
    ids: list[int]
    prompt_length: int
    max_length: int
    params: SamplingParams
    seed: int
    future: "Future[TokenOutput]"
    stop_ids: frozenset[int] = frozenset()
    adapter: Entry | None = None
    pictures: Pictures = NO_PICTURES
    log_probs: list[float] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)
    row: int = -1
    cached: int = 0
    keep: bool = True
    waits_since: float = field(default_factory=time.perf_counter)
    queued: float = 0.0
    prefix: Prefix | None = None

    @property
    def remaining(self) -> int:
        """Ids to prefill before the next one can be sampled."""
        return len(self.ids) - 1 - self.cached

    def mark(self, version: int) -> None:
        """From here on the model's weights number ``version`` sample, or the adapter."""
        if self.adapter is not None:
            version = self.adapter.version
        if not self.marks or self.marks[-1][0] != version:
            self.marks.append((version, len(self.log_probs)))

    def append(self, token: int, log_prob: float) -> FinishReason | None:
        """Add a sampled token; returns why the sequence ends with it, if it does."""
        self.ids.append(token)
        self.log_probs.append(log_prob)
        self.cached += 1
        if token in self.stop_ids:
            return "stop"
        return "length" if len(self.ids) >= self.max_length else None

    def output(self, reason: FinishReason) -> TokenOutput:
        starts = [start for _, start in self.marks] + [len(self.log_probs)]
        spans = [
            PolicySpan(version, start, end)
            for (version, start), end in zip(self.marks, starts[1:], strict=True)
            if end > start
        ]
        return TokenOutput(self.ids[self.prompt_length :], list(self.log_probs), reason, spans, self.queued)
