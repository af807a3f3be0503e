"""The local index and the retriever over HTTP."""

import asyncio
import json
import math
import re
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from agentrl_core.api import ConfigError, DataError, ToolContext, ToolError, ToolUnavailableError
from agentrl_testing.contracts import ToolCase, ToolContract
from agentrl_tool_search.cli import app
from agentrl_tool_search.config import RemoteSearchConfig, SearchConfig
from agentrl_tool_search.index import Index, build_index
from agentrl_tool_search.plugin import REMOTE_SEARCH, SEARCH
from agentrl_tool_search.tool import RemoteSearchTool, SearchTool

CORPUS = [
    "The lynx is a wild cat with tufted ears",
    "Paris is the capital of France",
    "Lyon is a large city of France, and Paris is larger",
    "Bread is baked from flour, water and salt",
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"id": n, "contents": text}) + "\n" for n, text in enumerate(CORPUS)))
    return file


@pytest.fixture
def index(corpus: Path) -> Path:
    build_index([corpus], corpus.parent / "index")
    return corpus.parent / "index"


def call(tool: Any, query: Any) -> Any:
    return asyncio.run(tool.execute("a", {"query": query}))


def test_the_command_builds_an_index_that_the_tool_searches(corpus) -> None:
    folder = corpus.parent / "new"
    result = CliRunner().invoke(app, [str(corpus), str(folder)])
    assert result.exit_code == 0 and "Indexed 4 documents" in result.output
    tool = SearchTool(SearchConfig(index=str(folder), documents=2), ToolContext("search"))
    found = call(tool, "What is the capital of France?")
    assert found.response.text.splitlines()[0] == f"[1] {CORPUS[1]}" and found.metrics == {"hits": 2.0}
    assert call(tool, "zebra").response.text == "[no documents found]"
    assert call(tool, "the of").response.text == "[no documents found]"


def test_scores_are_those_of_the_formula(index) -> None:
    """BM25 as Lucene computes it, with k1 = 1.5 and b = 0.75, written down once more."""
    words = [re.findall(r"\b\w\w+\b", text.lower()) for text in CORPUS]
    stop = {"the", "is", "with", "of", "and"}
    words = [[word for word in each if word not in stop] for each in words]
    mean = sum(map(len, words)) / len(words)
    query = ["paris", "france"]

    def score(document: list[str]) -> float:
        total = 0.0
        for word in query:
            having = sum(word in each for each in words)
            idf = math.log(1 + (len(words) - having + 0.5) / (having + 0.5))
            count = Counter(document)[word]
            total += idf * count / (count + 1.5 * (1 - 0.75 + 0.75 * len(document) / mean))
        return total

    expected = sorted(((score(each), text) for each, text in zip(words, CORPUS, strict=True)), reverse=True)
    hits = Index(index).search("paris france", 10)
    assert [hit.text for hit in hits] == [text for value, text in expected if value > 0]
    assert [hit.score for hit in hits] == pytest.approx([value for value, _ in expected if value > 0], abs=1e-5)


def test_parquet_and_titles(tmp_path) -> None:
    pq.write_table(pa.table({"title": ["Cats", "Dogs"], "body": ["They purr", "They bark"]}), tmp_path / "c.parquet")
    assert build_index([tmp_path / "c.parquet"], tmp_path / "index", column="body") == 2
    assert [hit.text for hit in Index(tmp_path / "index").search("cats", 5)] == ["Cats\nThey purr"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.jsonl", '{"id": 1}\n', "row 1 has none of the columns contents, text, content, passage; it has id. Choose"),
        ("c.jsonl", '{"text": "a word"}\n{"text": ""}\n', "row 2 has no text in the column 'text', but ''"),
        ("c.jsonl", '{"text": ["a"]}\n', r"row 1 has no text in the column 'text', but \['a'\]"),
        ("c.jsonl", "", "the corpus is empty"),
        ("c.jsonl", "[1]\n", "line 1 is not a JSON object"),
        ("c.jsonl", "{oops\n", "cannot be read as jsonl"),
        ("c.jsonl", '{"text": "a the"}\n', "no document of the corpus has a word"),
        ("c.parquet", "oops", "cannot be read as parquet"),
        ("c.csv", "a,b", "a corpus is a .jsonl or a .parquet file"),
    ],
)
def test_a_corpus_without_text_is_refused(tmp_path, name, text, message) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        build_index([tmp_path / name], tmp_path / "index")
    result = CliRunner().invoke(app, [str(tmp_path / name), str(tmp_path / "index")])
    assert result.exit_code == 1 and result.output.startswith("Error: ")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_index_is_replaced_and_other_directories_are_not(corpus, index) -> None:
    build_index([corpus], index)
    (corpus.parent / "mine").mkdir()
    (corpus.parent / "mine/thesis.txt").write_text("precious")
    with pytest.raises(DataError, match="mine exists and is not a search index"):
        build_index([corpus], corpus.parent / "mine")
    assert len(Index(index)) == 4


def test_a_missing_index_names_the_command(tmp_path) -> None:
    with pytest.raises(ConfigError, match="does not exist; build one with `agentrl search-index CORPUS"):
        SearchTool(SearchConfig(index=str(tmp_path / "x")), ToolContext("search"))
    with pytest.raises(ConfigError, match="is not a search index"):
        SearchTool(SearchConfig(index=str(tmp_path)), ToolContext("search"))


def test_long_documents_are_cut_and_bad_queries_are_errors(index) -> None:
    tool = SearchTool(SearchConfig(index=str(index), max_characters=10), ToolContext("search"))
    assert call(tool, "bread").response.text == "[1] Bread is b [the rest was cut]"
    for query in ("", "  ", 5, None):
        with pytest.raises(ToolError, match='the non-empty string "query"'):
            call(tool, query)


class Retriever(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["topk"] == 2 and body["return_scores"] is True
        (query,) = body["queries"]
        if query == "hang":
            self.server.released.wait(30)  # type: ignore[attr-defined]
        answers: dict[str, Any] = {
            "cats": {"result": [[{"document": {"contents": text}, "score": 1.0} for text in CORPUS]]},
            "bare": {"result": [[{"contents": CORPUS[0]}]]},
            "none": {"result": [[]]},
            "odd": {"hits": []},
            "null": {"result": [[{"contents": None}]]},
        }
        bodies = {"deep": b"[" * 1900, "long": b" " * 2001}
        if query not in answers and query not in bodies:
            self.send_error(500)
            return
        data = bodies.get(query) or json.dumps(answers[query]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Retriever)
    server.released = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve"
    server.released.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


def remote(url: str, query: str) -> str:
    limit = 0.2 if query == "hang" else 60.0
    tool = RemoteSearchTool(
        RemoteSearchConfig(documents=2, url=url, timeout=limit, max_body_bytes=2000), ToolContext("search")
    )
    return call(tool, query).response.text


def test_a_retriever_over_http(url) -> None:
    assert remote(url, "cats") == f"[1] {CORPUS[0]}\n\n[2] {CORPUS[1]}"
    assert remote(url, "bare") == f"[1] {CORPUS[0]}"
    assert remote(url, "none") == "[no documents found]"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("odd", "KeyError"),
        ("null", "TypeError: the contents None are no text"),
        ("broken", "500"),
        ("hang", "no whole answer within timeout=0.2 s"),
        ("deep", "RecursionError"),
        ("long", "max_body_bytes=2000"),
    ],
)
def test_a_retriever_that_fails_is_not_the_models_fault(url, query, message) -> None:
    with pytest.raises(ToolUnavailableError, match=f"no usable answer from the retriever {url}: .*{message}"):
        remote(url, query)


def test_a_retriever_that_is_not_there_and_a_wrong_address() -> None:
    with pytest.raises(ToolUnavailableError, match="ConnectError"):
        remote("http://127.0.0.1:9/retrieve", "cats")
    with pytest.raises(ConfigError, match="url: 'localhost' is not an address"):
        remote("localhost", "cats")


class TestSearch(ToolContract):
    @pytest.fixture
    def plugin(self, index: Path) -> ToolCase:
        config = SearchConfig(index=str(index), documents=1)
        return ToolCase(SEARCH, config=config, arguments={"query": "lynx"}, expected=f"[1] {CORPUS[0]}")


class TestRemoteSearch(ToolContract):
    @pytest.fixture
    def plugin(self, url: str) -> ToolCase:
        config = RemoteSearchConfig(documents=2, url=url)
        return ToolCase(REMOTE_SEARCH, config=config, arguments={"query": "bare"}, expected=f"[1] {CORPUS[0]}")
