"""Spans as lines of OTLP's JSON: each is an ``ExportTraceServiceRequest``, as the collector's file receiver reads."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

_IDS = ("traceId", "spanId", "parentSpanId")


class FileExporter(SpanExporter):
    """Appends to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        request = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_with_hex_ids(request)) + "\n")
        return SpanExportResult.SUCCESS


def _with_hex_ids(value: Any) -> Any:
    """OTLP's JSON differs from protobuf's in the ids, which are hexadecimal."""
    if isinstance(value, list):
        return [_with_hex_ids(item) for item in value]
    if isinstance(value, dict):
        return {
            key: base64.b64decode(item).hex() if key in _IDS else _with_hex_ids(item) for key, item in value.items()
        }
    return value
