"""Spans of a run, made after the fact from the times that agentrl records: nothing runs while trajectories do.

One trace a step: ``step`` with a child for each phase and each traced trajectory, whose turns and tool calls are its
children. Each links to ``run``, a trace of its own. Names and attributes of trajectories, turns and tool calls follow
OpenTelemetry's conventions for generative AI.
"""

import json
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, set_span_in_context

from agentrl_core.api import EndedTrajectory, Tracker, TrackerContext
from agentrl_core.api.message_parts import text_of
from agentrl_tracker_otel.config import OtelConfig
from agentrl_tracker_otel.file_exporter import FileExporter

_MOST_ATTRIBUTES = 4096
"""A step has a few hundred metrics; the SDK's limit is 128."""
_QUEUE = 65536
"""Spans that wait for the exporter; more are dropped, with a warning of the SDK."""


class OtelTracker(Tracker):
    """Writes and sends traces."""

    config: OtelConfig

    def __init__(self, config: OtelConfig, context: TrackerContext) -> None:
        super().__init__(config, context)
        self._provider: TracerProvider | None = None
        self._file: BatchSpanProcessor | None = None
        self._run: Span
        self._phases: list[tuple[str, float]] = []
        self._trajectories: list[EndedTrajectory] = []
        model, engine = context.config.get("model", {}), context.config.get("rollout", {}).get("engine", {})
        self._model = str(model.get("path", ""))
        self._engine = str(engine.get("name", "")) if isinstance(engine, Mapping) else str(engine)

    def progress(self, phase: str, done: int = 0, total: int = 0) -> None:
        if phase:
            self._phases.append((phase, time.time()))

    def log_trajectories(self, trajectories: Sequence[EndedTrajectory], step: int) -> None:
        slowest = max(trajectories, key=lambda each: each.timings.get("total", 0.0), default=None)
        self._trajectories += [each for each in trajectories if each is slowest or self._is_traced(each)]

    def _is_traced(self, trajectory: EndedTrajectory) -> bool:
        drawn = zlib.crc32(trajectory.trajectory_id.encode()) / 2**32
        return drawn < self.config.sample or trajectory.error is not None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = time.time()
        provider = self._started(now)
        start = min([at for _, at in self._phases] + [now - metrics.get("timing/step", 0.0)])
        values = {f"agentrl.metric.{name}": value for name, value in metrics.items()}
        links = [Link(self._run.get_span_context())]
        tracer = provider.get_tracer("agentrl")
        attributes = {"agentrl.step": step, **values}
        root = tracer.start_span("step", start_time=_ns(start), attributes=attributes, links=links)
        for (name, at), after in zip(self._phases, [*(at for _, at in self._phases[1:]), now], strict=False):
            if name != "step":
                # The timer knows the length of a phase, unless there were several.
                once = [other for other, _ in self._phases].count(name) == 1
                end = at + metrics[f"timing/{name}"] if once and f"timing/{name}" in metrics else after
                self._span(name, root, at, end)
        for trajectory in self._trajectories:
            self._trace(trajectory, root, now)
        root.end(_ns(now))
        self._phases, self._trajectories = [], []
        if self._file is not None:
            # A killed run keeps the steps that it finished.
            self._file.force_flush()

    def finish(self, status: str) -> None:
        if self._provider is not None:
            self._run.set_attribute("agentrl.status", status)
            if status == "failed":
                self._run.set_status(Status(StatusCode.ERROR, "the run failed; log.txt says why"))
            self._run.end()
            self._provider.shutdown()

    def _started(self, now: float) -> TracerProvider:
        if self._provider is None:
            context = self.context
            names = {"service.name": "agentrl", "agentrl.run": context.run_name, "agentrl.run_id": context.run_id}
            limits = SpanLimits(max_span_attributes=_MOST_ATTRIBUTES, max_attributes=_MOST_ATTRIBUTES)
            self._provider = TracerProvider(resource=Resource.create(names), span_limits=limits)
            if self.config.file:
                self._file = BatchSpanProcessor(FileExporter(context.run_dir / "traces.jsonl"), _QUEUE)
                self._provider.add_span_processor(self._file)
            if self.config.endpoint is not None:
                exporter = OTLPSpanExporter(self.config.endpoint)
                self._provider.add_span_processor(BatchSpanProcessor(exporter, _QUEUE))
            start = min([at for _, at in self._phases] + [now])
            tracer, first = self._provider.get_tracer("agentrl"), context.first_step
            self._run = tracer.start_span("run", start_time=_ns(start), attributes={"agentrl.first_step": first})
        return self._provider

    def _trace(self, trajectory: EndedTrajectory, root: Span, now: float) -> None:
        spans = list(trajectory.spans)
        total = trajectory.timings.get("total", 0.0)
        start = min((at for _, at, _ in spans), default=now - total)
        end = max([start + total] + [at + seconds for _, at, seconds in spans])
        span = self._span("invoke_agent", root, start, end, self._outcome(trajectory), trajectory.error)
        turns, calls = iter(trajectory.turn_tokens), list(trajectory.tool_calls)
        called = {(call["start"], call["seconds"]) for call in calls}
        for kind, at, seconds in spans:
            if kind == "generate":
                attributes = self._request("chat", *next(turns, (0, 0)))
                self._span(f"chat {self._model}", span, at, at + seconds, attributes, kind=SpanKind.CLIENT)
            elif kind != "tools" or (at, seconds) not in called:
                self._span(kind, span, at, at + seconds)
        for call in calls:
            attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": call["name"]}
            attributes |= {"gen_ai.tool.type": "function"} | ({"error.type": "tool_error"} if call["failed"] else {})
            error, at = (call["response"] if call["failed"] else None), call["start"]
            self._span(f"execute_tool {call['name']}", span, at, at + call["seconds"], attributes, error)

    def _request(self, operation: str, prompt_tokens: int, sampled_tokens: int) -> dict[str, Any]:
        return {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": self._engine,
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.output_tokens": sampled_tokens,
        }

    def _outcome(self, trajectory: EndedTrajectory) -> dict[str, Any]:
        prompts, sampled = (sum(each[index] for each in trajectory.turn_tokens) for index in (0, 1))
        attributes = self._request("invoke_agent", prompts, sampled) | {
            "gen_ai.conversation.id": trajectory.trajectory_id,
            "gen_ai.data_source.id": trajectory.data_source,
            "agentrl.split": trajectory.split,
            "agentrl.termination": trajectory.termination,
            "agentrl.turns": trajectory.num_turns,
            "agentrl.attempts": trajectory.attempts,
        }
        if trajectory.reward is not None:
            attributes["agentrl.reward"] = trajectory.reward
        if self.config.messages:
            messages = [_parts(message) for message in trajectory.messages]
            attributes["gen_ai.output.messages"] = json.dumps(messages, ensure_ascii=False, default=str)
        return attributes

    def _span(
        self,
        name: str,
        parent: Span,
        start: float,
        end: float,
        attributes: Mapping[str, Any] | None = None,
        error: str | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """A span that has ended. Start and end are Unix times."""
        assert self._provider is not None, "a span of a run that has not started"
        tracer, context = self._provider.get_tracer("agentrl"), set_span_in_context(parent)
        span = tracer.start_span(name, context, kind, attributes, start_time=_ns(start))
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(_ns(end))
        return span


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat message in the form of ``gen_ai.output.messages``."""
    content = text_of(message)
    parts: list[dict[str, Any]] = [{"type": "text", "content": content}] if content else []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        parts.append({"type": "tool_call", "name": function.get("name"), "arguments": function.get("arguments")})
    return {"role": message.get("role"), "parts": parts}
