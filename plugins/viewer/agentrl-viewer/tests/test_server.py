"""The server gives only what it should, the command says what is wrong, and nothing that a model wrote is markup."""

import json
import re
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from agentrl_viewer import page
from agentrl_viewer.cli import app
from agentrl_viewer.page import exported
from agentrl_viewer.run import Run
from agentrl_viewer.server import Viewer
from benchmarks._sample_run import SampleRun


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(SampleRun(tmp_path_factory.mktemp("runs") / "shop", prompts=2, samples=2).write(1, 3).path, "shop")
    run.index.refresh()
    return run


@pytest.fixture(scope="module")
def viewer(run: Run):
    with Viewer([run]) as viewer:
        yield viewer


def ask(viewer: Viewer, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", urlsplit(viewer.url).port, timeout=30)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    return response.status, response.read()


def test_answers(viewer: Viewer) -> None:
    status, body = ask(viewer, f"/{viewer.token}/api/list?run=shop&limit=3&order=reward&min_reward=0")
    assert status == 200 and len(json.loads(body)["rows"]) == 3
    assert ask(viewer, f"/{viewer.token}/")[0] == 200
    assert ask(viewer, f"/{viewer.token}/static/app.js")[0] == 200
    assert ask(viewer, f"/{viewer.token}/api/list?run=shop&order=best") == (
        400, b"order: allowed is newest, oldest, failed, reward, -reward, -tokens, -seconds",
    )  # fmt: skip
    assert ask(viewer, f"/{viewer.token}/api/list?run=shop&first_step=x")[0] == 400


@pytest.mark.parametrize(
    "query", ["trajectory?step=1&line=", "trajectory?line=0&step=", "timeline?step=", "list?offset=", "list?last_step="]
)
def test_a_number_that_no_index_holds_is_an_error_with_a_reason(viewer: Viewer, query: str) -> None:
    name, _, values = query.partition("?")
    status, body = ask(viewer, f"/{viewer.token}/api/{name}?run=shop&{values}1{'0' * 23}")
    assert status == 400 and b"allowed is a whole number with at most 18 digits" in body


@pytest.mark.parametrize("path", ["/", "/api/runs", "/x/api/runs", "//", "/static/app.js"])
def test_nothing_without_the_token(viewer: Viewer, path: str) -> None:
    assert ask(viewer, path)[0] == 403


def test_nothing_for_another_host_name(viewer: Viewer) -> None:
    assert ask(viewer, f"/{viewer.token}/api/runs", Host="evil.example")[0] == 403


@pytest.mark.parametrize(
    "path",
    [
        "static/../server.py", "static/%2e%2e/server.py", "static/..%2fserver.py", "static/uPlot.LICENSE", "static/",
        "../../../etc/passwd", "api/list?run=..%2f..", "api/series?run=/etc", "api/trajectory?run=shop&step=99",
        "api/trajectory?run=shop&split=../../x&step=1", "api/nothing?run=shop", "api/__class__?run=shop",
    ],
)  # fmt: skip
def test_no_other_file_or_run(viewer: Viewer, path: str) -> None:
    assert ask(viewer, f"/{viewer.token}/{path}")[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_read_only(viewer: Viewer, method: str) -> None:
    assert ask(viewer, f"/{viewer.token}/api/runs", method)[0] == 501


def test_only_this_machine(viewer: Viewer) -> None:
    assert viewer._server.server_address[0] == "127.0.0.1"


def test_export_cannot_be_left_by_text(evil: Run) -> None:
    content, kept, left_out = exported([evil], 10)
    page = content.decode()
    assert (kept, left_out) == (1, 0)
    assert "alert(1)" in page and "<img" not in page and "<script>alert" not in page
    # Data, chart library, import map, start; whatever the text says.
    assert page.count("<script") == page.count("</script>") == 4
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert json.loads(data)["runs"][0]["trajectories"][0]["rows"][0]["error"].startswith("</script><script>alert(1)")
    assert "\u2028" not in data


def test_export_keeps_problems_and_says_what_it_leaves_out(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    result = CliRunner().invoke(app, [str(run.path), "--export", str(out), "--trajectories", "4"])
    total = run.index.facets()["total"]
    assert result.exit_code == 0 and f"4 trajectories, {total - 4} left out" in result.output
    assert "http://" not in re.sub(r"http://www\.w3\.org/\S+", "", out.read_text())


def test_what_is_no_run(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert "no run directory; give one such as runs/calculator" in str(result.exception)


def test_an_export_has_each_trajectory_once_with_all_its_rows(tmp_path: Path) -> None:
    (tmp_path / "forked" / "rollouts").mkdir(parents=True)
    turn = {"parent": 0, "kind": "turn", "ids": [1], "text": "a", "log_probs": None, "calls": [], "rewards": []}
    agent = {"agent": "", "trajectory_id": "t", "uid": "u", "turn_rewards": []}
    agent["rows"] = [{"leaf": leaf, "shared": 1, "trained": True} for leaf in range(1, 31)]
    line = {
        "schema_version": 2, "step": 1, "split": "train", "trajectory_id": "t", "timings": {}, "waits": [],
        "nodes": [{"parent": None, "kind": "prompt", "ids": [3], "text": "q"}, *[turn] * 30], "agents": [agent],
    }  # fmt: skip
    (tmp_path / "forked" / "rollouts" / "step-000001.jsonl").write_text(json.dumps(line) + "\n")
    run = Run(tmp_path / "forked", "forked")
    run.index.refresh()
    content, kept, _ = exported([run], 100)
    (data,) = json.loads(content.partition(b'id="data">')[2].partition(b"</script>")[0])["runs"]
    (trajectory,) = data["trajectories"]
    assert kept == len(data["list"]) == len(trajectory["rows"]) == 30 and data["places"] == [0] * 30


NAME = f"{'0' * 32}-4x3.png"


@pytest.fixture
def with_image(tmp_path: Path):
    sample = SampleRun(tmp_path / "shop", prompts=1, samples=1).write(1, 1)
    (sample.path / "media").mkdir()
    (sample.path / "media" / NAME).write_bytes(b"the image")
    (sample.path / "media" / "notes.png").write_bytes(b"no image of the run")
    (record,) = sample.record(1, 0, 0)
    shown = {"type": "image", "image": NAME}
    record["messages"] = [{"role": "user", "content": [{"type": "text", "text": "what?"}, shown, shown]}]
    sample.write_records(1, [record])
    run = Run(sample.path, "shop")
    run.index.refresh()
    with Viewer([run]) as viewer:
        yield viewer


def test_images_of_a_run_by_name_and_nothing_else(with_image: Viewer, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(path: str) -> tuple[int, bytes]:
        return ask(with_image, f"/{with_image.token}/media/{path}")

    assert get(f"{NAME}?run=shop") == (200, b"the image")
    for path in (
        "notes.png?run=shop", f"{'1' * 32}-4x3.png?run=shop", f"{NAME}?run=other", NAME, f"../media/{NAME}?run=shop",
        f"%2e%2e%2fmedia%2f{NAME}?run=shop", f"{NAME}%00?run=shop", f"{NAME}%0a?run=shop", "../config.yaml?run=shop",
        "?run=shop",
    ):  # fmt: skip
        assert get(path)[0] == 404, path
    assert ask(with_image, f"/wrong/media/{NAME}?run=shop")[0] == 403
    listed = json.loads(ask(with_image, f"/{with_image.token}/api/list?run=shop")[1])
    assert listed["rows"][0]["question"] == "what?<image><image>"
    (run,) = with_image.runs.values()

    def images() -> dict[str, str]:
        content, _, _ = exported([run], 1)
        (data,) = json.loads(content.partition(b'id="data">')[2].partition(b"</script>")[0])["runs"]
        return data["images"]

    assert images() == {NAME: "data:image/png;base64,dGhlIGltYWdl"}
    monkeypatch.setattr(page, "IMAGE_BYTES", 3)
    assert images() == {}, "a file that a mail can carry"
