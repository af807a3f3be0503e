"""Traces as an OTLP receiver decodes them with opentelemetry-proto, and as JSON in the file."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agentrl_testing.contracts import TrackerCase, TrackerContract
from agentrl_testing.contracts.tracker import TRAJECTORY
from agentrl_tracker_otel.config import OtelConfig
from agentrl_tracker_otel.plugin import TRACKER
from agentrl_tracker_otel.tracker import _parts


def spans_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "traces.jsonl").read_text().splitlines() if (run_dir / "traces.jsonl").exists() else []
    scopes = [scope for line in lines for each in json.loads(line)["resourceSpans"] for scope in each["scopeSpans"]]
    return [span for scope in scopes for span in scope["spans"]]


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {each["key"]: next(iter(each["value"].values())) for each in span.get("attributes", ())}


def read(run_dir: Path) -> dict[int, dict[str, float]]:
    steps = [attributes(span) for span in spans_of(run_dir) if span["name"] == "step"]
    return {
        int(step["agentrl.step"]): {
            name.removeprefix("agentrl.metric."): float(value) for name, value in step.items() if "metric" in name
        }
        for step in steps
    }


class TestOtel(TrackerContract):
    @pytest.fixture
    def plugin(self) -> TrackerCase:
        return TrackerCase(TRACKER, read=read)


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802 - http.server's name
            assert self.headers["Content-Type"] == "application/x-protobuf" and self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    server.shutdown()
    thread.join()
    server.server_close()


TRACED = replace(
    TRAJECTORY,
    timings={"generate": 1.5, "tools": 0.5, "total": 2.25},
    spans=[("tools", 999.5, 0.25), ("generate", 1000.0, 1.0), ("tools", 1001.0, 0.25), ("generate", 1001.25, 0.5)],
    turn_tokens=[(10, 4), (20, 3)],
    tool_calls=[
        {"name": "add", "arguments": {}, "response": "Error: no", "failed": True, "start": 1001.0, "seconds": 0.25}
    ],
)


def test_receiver_and_file_get_the_same_spans(
    receiver: tuple[str, list[ExportTraceServiceRequest]], tmp_path: Path
) -> None:
    endpoint, received = receiver
    tracker = TrackerCase(TRACKER, config=OtelConfig(endpoint=endpoint, sample=0, messages=True)).make(tmp_path)
    tracker.progress("step")
    tracker.progress("rollout")
    tracker.progress("", 1, 2)
    quick = replace(TRAJECTORY, trajectory_id="quick")
    tracker.log_trajectories([quick, TRACED, replace(quick, trajectory_id="lost", error="no engine")], 1)
    tracker.log({"reward/mean": 0.5, "timing/rollout": 0.001}, 1)
    tracker.finish("failed")

    scopes = [scope for request in received for each in request.resource_spans for scope in each.scope_spans]
    sent = {span.span_id: span for scope in scopes for span in scope.spans}
    by_name: dict[str, list[Any]] = {}
    for span in sent.values():
        by_name.setdefault(span.name, []).append(span)
    assert {name: len(spans) for name, spans in by_name.items()} == {
        "run": 1, "step": 1, "rollout": 1, "invoke_agent": 2, "chat ": 2, "execute_tool add": 1, "tools": 1
    }  # fmt: skip
    (step,), (run,), (call,) = by_name["step"], by_name["run"], by_name["execute_tool add"]
    agent, lost = sorted(by_name["invoke_agent"], key=lambda span: span.status.code)
    assert [link.span_id for link in step.links] == [run.span_id] and run.trace_id != step.trace_id
    assert {agent.parent_span_id, lost.parent_span_id, by_name["rollout"][0].parent_span_id} == {step.span_id}
    assert {span.parent_span_id for span in (call, *by_name["chat "])} == {agent.span_id}
    assert (call.start_time_unix_nano, call.end_time_unix_nano) == (1001_000_000_000, 1001_250_000_000)
    assert (agent.start_time_unix_nano, agent.end_time_unix_nano) == (999_500_000_000, 1001_750_000_000)
    assert (call.status.code, call.status.message) == (2, "Error: no") and lost.status.message == "no engine"
    assert run.status.code == 2

    written = {span["spanId"]: span for span in spans_of(tmp_path)}
    assert written.keys() == {span_id.hex() for span_id in sent}
    assert {span["traceId"] for span in written.values()} == {span.trace_id.hex() for span in sent.values()}
    turns = [attributes(span) for span in written.values() if span["name"] == "chat "]
    assert [(turn["gen_ai.usage.input_tokens"], turn["gen_ai.usage.output_tokens"]) for turn in turns] == [
        ("10", "4"), ("20", "3")
    ]  # fmt: skip
    seen = attributes(written[agent.span_id.hex()])
    assert (seen["gen_ai.operation.name"], seen["agentrl.reward"], seen["gen_ai.usage.output_tokens"]) == (
        "invoke_agent", 1.0, "7"
    )  # fmt: skip
    first = {"role": "user", "parts": [{"type": "text", "content": "2+3?"}]}
    assert json.loads(seen["gen_ai.output.messages"])[0] == first


def test_about_the_sampled_share_is_traced(tmp_path: Path) -> None:
    tracker = TrackerCase(TRACKER, config=OtelConfig(sample=0.25)).make(tmp_path)
    tracker.log_trajectories([replace(TRAJECTORY, trajectory_id=f"prompt{index}") for index in range(1000)], 1)
    tracker.log({}, 1)
    tracker.finish("completed")
    assert 180 < sum(span["name"] == "invoke_agent" for span in spans_of(tmp_path)) < 320


def test_an_image_of_a_message_is_a_mark_in_its_text() -> None:
    image = {"type": "image", "image": "0" * 32 + "-4x3.png"}
    message = {"role": "user", "content": [{"type": "text", "text": "what?"}, image]}
    assert _parts(message) == {"role": "user", "parts": [{"type": "text", "content": "what?<image>"}]}
