"""The page in a real browser: it loads, filters, opens, follows a live run, and works as one file.

With AGENTRL_REGENERATE=1 the pictures of docs/viewer.md are written anew.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from agentrl_core.engine_kit.images import read_image
from agentrl_viewer.page import exported
from agentrl_viewer.run import Run
from agentrl_viewer.server import Viewer
from benchmarks._sample_run import SampleRun

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
expect = playwright.expect
# A busy machine is slow, not broken.
expect.set_options(timeout=60_000)

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
PICTURES = Path(__file__).parents[4] / "docs/images"
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium: `make browser` installs it on Debian as root")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SampleRun]]:
    folder = tmp_path_factory.mktemp("runs")
    fast = SampleRun(folder / "shop", prompts=6, samples=6).write(1, 28)
    slow = SampleRun(folder / "shop-lr-low", seed=1, skill=0.6, prompts=2, samples=4, replicas=0).write(
        1, 30, "completed"
    )
    with (fast.path / ".lock").open("w") as lock:
        # As a process that trains does.
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield [fast, slow]


@pytest.fixture(scope="module")
def viewer(samples: list[SampleRun]) -> Iterator[Viewer]:
    with Viewer([Run(each.path, each.path.name) for each in samples], refresh_seconds=0.1) as viewer:
        yield viewer


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page on which nothing may fail, and which asks nobody but the viewer."""
    page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light", reduced_motion="reduce")
    page.set_default_timeout(60_000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: (wrong.append("a dialog: text became a script"), dialog.dismiss()))
    page.on("request", lambda request: wrong.append(request.url) if "//127.0.0.1" not in request.url
            and not request.url.startswith(("data:", "file:")) else None)  # fmt: skip
    yield page
    page.close()
    assert wrong == []


def picture(page: Any, name: str) -> None:
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    content = page.screenshot()
    assert content.startswith(b"\x89PNG")
    if os.environ.get("AGENTRL_REGENERATE"):
        PICTURES.mkdir(exist_ok=True)
        (PICTURES / f"viewer-{name}.png").write_bytes(content)


def test_curves_of_two_runs(page: Any, viewer: Viewer) -> None:
    page.goto(viewer.url)
    card = page.locator("[data-metric='reward/mean']").first
    expect(card.locator("canvas")).to_be_visible()
    expect(card.locator(".last span")).to_have_count(2)
    expect(page.locator(".run .status")).to_have_text(["running · step 28/30", "completed · step 30/30"])
    picture(page, "curves")
    page.get_by_label("Filter metrics").fill("logprob")
    expect(page.locator(".card")).to_have_count(1)
    page.get_by_role("button", name="time").click()
    page.get_by_label("Smoothing").fill("0.8")
    page.keyboard.press("Escape")
    page.locator("body").click()
    page.keyboard.press("4")
    expect(page.locator(".config tbody tr")).to_have_count(4)


def listed(sample: SampleRun) -> str:
    lines = sum(len(file.read_text().splitlines()) for file in (sample.path / "rollouts").iterdir())
    return f"{lines:,} trajectories"


def test_filters_then_opens_a_trajectory(page: Any, viewer: Viewer, samples: list[SampleRun]) -> None:
    page.goto(viewer.url + "#/trajectories?run=shop&order=failed")
    count = page.locator(".count")
    expect(count).to_have_text(listed(samples[0]))
    expect(page.locator(".row").first.locator(".termination")).to_have_text("engine_error")
    picture(page, "trajectories")
    page.get_by_label("text").fill("I guess")
    page.keyboard.press("Enter")
    expect(count).not_to_have_text(listed(samples[0]))
    guessed = page.locator(".row small", has_text="I guess")
    expect(guessed.first).to_be_visible()
    expect(page.locator(".row .reward.good")).to_have_count(0)
    page.goto(viewer.url + "#/trajectories?run=shop&tool=calculator&first_step=20&order=-reward")
    page.locator(".row").first.click()
    expect(page.locator(".call")).to_have_count(3)
    page.locator(".call summary").last.click()
    expect(page.locator(".call[open] pre")).to_have_count(2)
    picture(page, "chat")


def test_tokens(page: Any, viewer: Viewer) -> None:
    page.goto(viewer.url + "#/trajectory?run=shop&split=train&step=24&line=1")
    page.get_by_role("tab", name="Tokens").click()
    tokens = page.locator(".token[data-i]")
    expect(tokens.first).to_be_visible()
    for colour in ("mask", "gap", "advantage", "version", "log_prob"):
        page.locator(f"button[data-by={colour}]").click()
        expect(page.locator(f"button[data-by={colour}]")).to_have_attribute("aria-pressed", "true")
        expect(page.locator(".token-legend")).not_to_contain_text("not recorded")
    page.locator(".token.sampled").nth(12).hover()
    expect(page.locator(".tip dt")).to_have_text(
        ["id", "mask", "log-prob", "gap to the engine", "advantage", "version", "turn"]
    )
    page.evaluate("document.querySelector('[title*=\"Dark or light\"]').click()")
    picture(page, "tokens")
    expect(page.locator(".tree .branch")).to_have_count(2)


def test_branches_stand_side_by_side_with_what_they_earned(page: Any, tmp_path: Path) -> None:
    """A file of a run: a fork, a summary, and a second agent."""
    (tmp_path / "rollouts").mkdir()
    shutil.copy(Path(__file__).parent / "data/tree.jsonl", tmp_path / "rollouts/step-000001.jsonl")
    with Viewer([Run(tmp_path, "run")]) as viewer:
        page.goto(viewer.url + "#/trajectory?run=run&split=train&step=1&line=1")
        page.get_by_role("tab", name="Tree").click()
        expect(page.locator(".nodes > .fork > .limb")).to_have_count(3)
        expect(page.locator(".limb > .fork > .limb")).to_have_count(2)
        left, right = (page.locator(".limb > .fork > .limb").nth(number).bounding_box() for number in (0, 1))
        other = page.locator(".nodes > .fork > .limb").nth(1).bounding_box()
        assert left["x"] + left["width"] <= right["x"] and right["x"] + right["width"] <= other["x"]
        turn = page.locator(".node.turn.here").last
        expect(turn).to_contain_text("turn 3")
        expect(turn.locator(".badge")).to_have_text(["planner", "reward +4", "advantage -11.5", "earned +4"])
        expect(page.locator(".node.turn")).to_have_count(6)
        picture(page, "tree")
        expect(page.locator(".tree .branch")).to_have_count(3)
        page.locator(".tree .branch").first.dispatch_event("click")
        expect(page.locator(".node.turn.here")).to_have_count(3)


def test_images_stand_where_they_stood_in_the_conversation(page: Any, tmp_path: Path) -> None:
    sample = SampleRun(tmp_path / "seen", prompts=1, samples=1).write(1, 1)
    (record,) = sample.record(1, 0, 0)
    (sample.path / "media").mkdir()

    def part(color: str, size: tuple[int, int]) -> dict[str, str]:
        image = read_image(Image.new("RGB", size, color))
        (sample.path / "media" / image.name).write_bytes(image.data)
        return {"type": "image", "image": image.name}

    call = {"type": "function", "id": "c1", "function": {"name": "crop", "arguments": {"x": 3}}}
    chart, crop = part("steelblue", (900, 420)), part("orange", (120, 90))
    record["messages"] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Here is a chart:"}, chart, {"type": "text", "text": "Go."}],
        },
        {"role": "assistant", "content": "I look closer.", "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "the part:"}, crop], "tool_call_id": "c1"},
        {"role": "assistant", "content": "It is orange."},
    ]
    record["tool_calls"] = [{"name": "crop", "arguments": {"x": 3}, "response": "the part:<image>", "failed": False}]
    sample.write_records(1, [record])
    run = Run(sample.path, "seen")
    run.index.refresh()

    def check() -> None:
        body = page.locator(".message.user .body")
        expect(body.locator("img")).to_have_count(1)
        # Loaded, not only named.
        expect(body.locator("img")).to_have_js_property("naturalWidth", 900)
        assert body.evaluate("(each) => [...each.childNodes].map(node => node.nodeName)") == ["#text", "IMG", "#text"]
        expect(page.locator(".call[open] pre img")).to_have_js_property("naturalWidth", 120)
        hashed = crop["image"][:4]
        expect(page.locator(".call .answer")).to_have_text(f"→ the part:<image {hashed}… 120x90>")

    where = "#/trajectory?run=seen&split=train&step=1&line=0"
    with Viewer([run]) as viewer:
        page.goto(viewer.url + where)
        check()
    content, _, _ = exported([run], 5)
    (tmp_path / "out.html").write_bytes(content)
    page.goto(f"file://{tmp_path / 'out.html'}{where}")
    check()


def test_side_by_side(page: Any, viewer: Viewer) -> None:
    page.goto(viewer.url + "#/compare?run=shop&split=train&step=5&uid=train-000005-00001")
    expect(page.locator(".column")).to_have_count(6)


def under_pointer(page: Any, canvas: str, x: float, y: float) -> dict[str, str]:
    """What the tooltip says at a place of a canvas, ``x`` as a share of what is behind the labels."""
    box = page.locator(canvas).bounding_box()
    page.mouse.move(box["x"] + 84 + x * (box["width"] - 84), box["y"] + y)
    tip = page.locator(".tip")
    expect(tip).to_be_visible()
    names, values = tip.locator("dt").all_text_contents(), tip.locator("dd").all_text_contents()
    return {"title": tip.locator("b").inner_text(), **dict(zip(names, values, strict=True))}


def test_times(page: Any, viewer: Viewer) -> None:
    page.set_viewport_size({"width": 1280, "height": 1000})
    page.goto(viewer.url + "#/time?run=shop&step=24")
    expect(page.locator(".phases").first.locator("i")).to_have_count(4)
    expect(page.locator(".facts-line")).to_contain_text("engines busy")
    for cause in ("update_actor", "sync_weights", "tools"):
        expect(page.locator(".facts-line div").last).to_contain_text(cause)
    head = "canvas.clock"
    expect(page.locator(head)).to_be_visible()
    phases = [under_pointer(page, head, share, 30)["title"] for share in (0.1, 0.3, 0.5, 0.7)]
    assert phases[0] == "rollout" and {"log_probs", "update_actor"} & set(phases)
    replica = under_pointer(page, head, 0.15, 105)
    assert (replica["title"], replica["phase"]) == ("replica 1", "rollout") and int(replica["served"]) > 0
    whole = under_pointer(page, "canvas.lanes:not(.clock)", 0.2, 6)
    assert whole["replica"] in ("0", "1")
    page.mouse.move(5, 5)
    picture(page, "time")
    page.get_by_role("button", name="Dark or light").click()
    page.get_by_role("button", name="rollout", exact=True).click()
    expect(page.get_by_role("button", name="rollout", exact=True)).to_have_attribute("aria-pressed", "true")
    assert under_pointer(page, head, 0.9, 30)["title"] == "rollout"


def test_rollout_and_training_have_a_lane_each_in_a_run_that_overlaps_them(page: Any, tmp_path: Path) -> None:
    page.set_viewport_size({"width": 1280, "height": 1400})
    sample = SampleRun(tmp_path / "ahead", prompts=2, samples=2, overlaps=True).write(1, 6)
    (row,) = (json.loads(line) for line in (sample.path / "metrics.jsonl").read_text().splitlines()[3:4])
    run = Run(sample.path, "ahead")
    run.index.refresh()
    (tmp_path / "out.html").write_bytes(exported([run], 60)[0])
    with Viewer([run]) as viewer:
        for address in (viewer.url, f"file://{tmp_path}/out.html"):
            page.goto(f"{address}#/time?step=4")
            lanes = page.locator(".waits .stacks")
            expect(lanes).to_have_count(2)
            for number, (name, waits) in enumerate({
                "rollout": {"for the trainer": "rollout/trainer", "for new weights": "rollout/weights"},
                "training": {
                    "for the engines": "trainer/engines",
                    "for the slowest trajectory, in tool price": "trainer/tool_price",
                },
            }.items()):  # fmt: skip
                assert lanes.nth(number).locator(".stack").count() == 6
                step = lanes.nth(number).locator(".stack").nth(3)
                step.hover()
                tip = page.locator(".tip")
                expect(tip.locator("b")).to_have_text(f"{name}, step 4")
                assert tip.locator("dt").all_text_contents() == ["at work", *waits]
                # The height of each part is its share of the step.
                waited = [row[f"idle/{wait}"] for wait in waits.values()]
                whole = row["timing/step"] + row.get("timing/validation", 0.0)
                heights = [part.bounding_box()["height"] for part in step.locator("i").all()]
                expected = [56 * length / whole for length in (whole - sum(waited), *waited)]
                assert heights == pytest.approx(expected, abs=0.1)
            page.mouse.move(5, 5)
        page.goto(f"{viewer.url}#/time?step=4")
        titles = {under_pointer(page, "canvas.clock", share / 100, 30)["title"] for share in range(2, 60, 4)}
        assert {"rollout", "early_log_probs"} <= titles
        page.locator(".waits .stack").nth(1).click()
        expect(page.locator(".waits .stack.here")).to_have_count(2)
        assert "step=2" in page.url


def test_a_run_whose_steps_alternate_has_no_lanes(page: Any, viewer: Viewer) -> None:
    page.goto(viewer.url + "#/time?run=shop&step=24")
    expect(page.locator("canvas.clock")).to_be_visible()
    expect(page.locator(".waits")).to_have_count(0)


def test_idle_time_has_its_cause(page: Any, viewer: Viewer) -> None:
    page.goto(viewer.url)
    found = page.evaluate("""async () => {
        const { byReplica, extent, replicaSeconds } = await import("viewer/clock");
        const rollout = [["generate", 1, 3, 0, 0], ["tools", 4, 2], ["generate", 6, 1, 0, 0], ["generate", 2, 3, 1, 1]];
        const phases = [["rollout", 0, 8], ["update_actor", 9, 2]];
        return replicaSeconds(byReplica(rollout.filter(([kind]) => kind === "generate")), [rollout, []], phases,
            extent(phases, rollout));
    }""")
    # Two replicas for 11 seconds: replica 0 serves from 1 to 4 and 6 to 7, replica 1 from 2 to 5.
    assert dict(found) == {
        "generate": 7, "tools": 3, "other replicas busy": 2, "no trajectories": 4, "between phases": 2,
        "update_actor": 4,
    }  # fmt: skip
    assert found[0][0] == "generate" and sum(value for _, value in found) == 22


def test_times_of_a_run_without_replicas_and_phases(page: Any, viewer: Viewer) -> None:
    page.goto(viewer.url + "#/time?run=shop-lr-low&step=25")
    assert under_pointer(page, "canvas.clock", 0.3, 35)["title"] == "all engines"
    assert "replica" not in under_pointer(page, "canvas.lanes:not(.clock)", 0.3, 6)
    expect(page.locator(".facts-line")).not_to_contain_text("wait in the engine")


def test_narrow(page: Any, viewer: Viewer) -> None:
    page.set_viewport_size({"width": 390, "height": 760})
    for name in ("curves", "trajectories?run=shop", "time?run=shop&step=25", "configs",
                 "trajectory?run=shop&split=train&step=25&line=0"):  # fmt: skip
        page.goto(viewer.url + "#/" + name)
        expect(page.locator(f"main[data-page='{name.split('?')[0]}'] > *").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    expect(page.locator(".message").first).to_be_visible()
    picture(page, "narrow")


def test_a_row_of_a_narrow_list_stays_within_its_lines(page: Any, viewer: Viewer) -> None:
    page.set_viewport_size({"width": 390, "height": 760})
    page.goto(viewer.url + "#/trajectories?run=shop")
    row = page.locator(".row", has_text="branch 2").first
    expect(row).to_be_visible()
    assert row.locator(".where").bounding_box()["height"] < row.bounding_box()["height"]
    assert page.evaluate(
        "[...document.querySelectorAll('.where b')].every(each => each.scrollWidth <= each.clientWidth)"
    )


def test_a_tooltip_goes_with_its_page(page: Any, viewer: Viewer) -> None:
    page.goto(viewer.url)
    page.locator("[data-metric='reward/mean'] .u-over").first.hover()
    expect(page.locator(".tip")).to_be_visible()
    page.keyboard.press("2")
    expect(page.locator(".row").first).to_be_visible()
    expect(page.locator(".tip")).to_be_hidden()


def test_charts_follow_the_window(page: Any, viewer: Viewer) -> None:
    page.goto(viewer.url)
    expect(page.locator(".card canvas").first).to_be_visible()
    for width in (800, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_function(
            "(width) => innerWidth === width && [...document.querySelectorAll('.plot:has(.uplot)')].every("
            "each => each.clientWidth === each.firstElementChild.clientWidth)",
            arg=width,
        )


def test_metric_names_are_whole(page: Any, viewer: Viewer) -> None:
    page.goto(viewer.url)
    page.get_by_label("Filter metrics").fill("logprob")
    name = page.locator(".card .name").first
    expect(name).to_be_visible()
    page.evaluate("document.querySelector('.card').style.width = '150px'")
    assert name.evaluate(
        "each => each.scrollWidth <= each.clientWidth && getComputedStyle(each).whiteSpace === 'normal'"
    )


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[Viewer]:
    sample = SampleRun(tmp_path / "long", prompts=1, samples=1, total=200).write(1, 200)
    state = json.loads((sample.path / "state.json").read_text())
    warning = {"message": "no_signal: in steps 3 to 12 no prompt had a sample with an advantage", "over": True}
    (sample.path / "state.json").write_text(json.dumps({**state, "warnings": [warning]}))
    run = Run(sample.path, "long")
    run.index.refresh()
    with Viewer([run]) as viewer:
        yield viewer


def test_seconds_of_each_step_have_an_axis_and_show_the_newest(page: Any, long_run: Viewer) -> None:
    page.set_viewport_size({"width": 900, "height": 800})
    page.goto(long_run.url + "#/time")
    newest = page.get_by_role("button", name="step 200,")
    expect(newest).to_be_in_viewport()
    assert page.locator(".stacks").evaluate("each => each.scrollLeft") > 0
    marks = page.locator(".scale small")
    assert marks.count() >= 3 and marks.first.inner_text() == "0" and marks.last.inner_text().endswith(" s")
    expect(page.locator(".stack small").last).to_have_text("200")


def test_the_overview_has_the_warnings_of_a_run(page: Any, long_run: Viewer, tmp_path: Path) -> None:
    page.goto(long_run.url)
    expect(page.locator(".warnings li")).to_have_count(1)
    expect(page.locator(".warnings li")).to_contain_text("in steps 3 to 12 no prompt had a sample with an advantage")
    expect(page.locator(".warnings li")).to_contain_text("It is over.")
    # A live run warns of something new.
    file = tmp_path / "long" / "state.json"
    state = json.loads(file.read_text())
    new = [*state["warnings"], {"message": "no_entropy: in steps 4 to 13", "over": False}]
    file.write_text(json.dumps({**state, "time": "2026-01-01T00:00:00+00:00", "warnings": new}))
    expect(page.locator(".warnings li")).to_have_count(2)


def test_live_run(page: Any, viewer: Viewer, samples: list[SampleRun]) -> None:
    page.goto(viewer.url + "#/trajectories?run=shop-lr-low")
    count = page.locator(".count")
    expect(count).to_have_text(listed(samples[1]))
    samples[1].write(31, 31)
    expect(count).to_have_text(listed(samples[1]))
    expect(page.locator(".row").first.locator(".where b")).to_have_text("step 31")


def test_exported_file(page: Any, samples: list[SampleRun], tmp_path: Path) -> None:
    runs = [Run(each.path, each.path.name) for each in samples]
    for run in runs:
        run.index.refresh()
    content, kept, left_out = exported(runs, 60)
    held = json.loads(content.partition(b'id="data">')[2].partition(b"</script>")[0])["runs"][0]["list"]
    problems = sum(row["problem"] > 0 for row in held)
    (tmp_path / "out.html").write_bytes(content)
    page.goto(f"file://{tmp_path}/out.html")
    expect(page.locator("[data-metric='reward/mean'] canvas").first).to_be_visible()
    expect(page.locator(".banner")).to_contain_text(f"{left_out:,}")
    page.get_by_role("link", name="Trajectories").click()
    expect(page.locator(".count")).to_have_text(f"{kept // 2} trajectories")
    page.locator("select[name=error]").select_option("*")
    expect(page.locator(".count")).to_have_text(f"{problems} trajectories")
    page.locator(".row").first.click()
    expect(page.locator(".message").first).to_be_visible()
    page.get_by_role("link", name="Time").click()
    expect(page.locator("canvas.clock")).to_be_visible()


def test_attacks_are_text(page: Any, evil: Run, tmp_path: Path) -> None:
    (tmp_path / "evil.html").write_bytes(exported([evil], 10)[0])
    with Viewer([evil]) as viewer:
        for address in (viewer.url, f"file://{tmp_path}/evil.html"):
            page.goto(address)
            page.locator(".section").last.wait_for()
            page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
            expect(page.locator(".name", has_text="alert(1)").first).to_be_visible()
            for name in ("configs", "trajectories", "trajectory?run=evil&split=train&step=1&line=0"):
                page.goto(f"{address}#/{name}")
                expect(
                    page.locator(f"main[data-page='{name.split('?')[0]}']").get_by_text("alert(1)").first
                ).to_be_attached()
            page.get_by_role("tab", name="Tokens").click()
            page.get_by_role("tab", name="Record").click()
            assert page.locator("img, iframe, main script").count() == 0
