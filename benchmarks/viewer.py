# ruff: noqa: T201 - a benchmark prints its result
"""The viewer with 100,000 trajectories: indexing, opening the page, scrolling, and what records cost.

Usage: python benchmarks/viewer.py [--trajectories N] [--browser /usr/bin/chromium]

Every figure is the median of several tries. "first page" is from starting the server to the list's first rows in
Chromium, where Playwright and a browser are installed; "longest frame" is the longest time between two frames while
the list is scrolled from its beginning to its end in 200 jumps.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from agentrl_viewer.index import ORDERS, Filter
from agentrl_viewer.run import Run
from agentrl_viewer.server import Viewer
from benchmarks._sample_run import SampleRun

STEPS, DISTINCT, TRIES = 200, 10, 5


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def show(name: str, seconds: float) -> None:
    print(f"{name:<44}{seconds * 1000:>10.1f} ms", flush=True)


def records_cost(run: SampleRun) -> None:
    rows = [row for sample in range(100) for row in run.record(20, 0, sample)]
    before = [
        {name: v for name, v in row.items() if name not in ("spans", "advantages", "old_log_probs")} for row in rows
    ]
    tokens = sum(len(row["response_ids"]) for row in rows)
    size = [sum(len(json.dumps(row)) for row in each) / tokens for each in (before, rows)]
    print(f"record without and with spans, advantages, log-probs   {size[0]:.0f} and {size[1]:.0f} bytes per token")


def in_browser(run: Run, executable: str) -> None:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("no Playwright: the page is not measured")
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        tries = []
        for _ in range(TRIES):
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            start = time.perf_counter()
            with Viewer([run]) as viewer:
                page.goto(viewer.url + "#/trajectories")
                page.locator(".row .question").first.wait_for()
                tries.append(time.perf_counter() - start)
                longest = page.evaluate(
                    """async () => {
                      const list = document.querySelector(".list");
                      let longest = 0, before = performance.now();
                      for (let i = 0; i <= 200; i++) {
                        list.scrollTop = (list.scrollHeight - list.clientHeight) * i / 200;
                        await new Promise(requestAnimationFrame);
                        const now = performance.now();
                        longest = Math.max(longest, now - before);
                        before = now;
                      }
                      return longest / 1000;
                    }"""
                )
            page.close()
        show("first page in Chromium", median(tries))
        show("longest frame while scrolling", longest)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--browser", default="/usr/bin/chromium")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        per_step = options.trajectories // STEPS
        sample = SampleRun(folder / "big", prompts=per_step // 8, samples=8, total=STEPS)
        sample.write(1, DISTINCT, "completed")
        for step in range(DISTINCT + 1, STEPS + 1):
            source = step % DISTINCT + 1
            text = (folder / f"big/rollouts/step-{source:06d}.jsonl").read_text()
            text = text.replace(f"train-{source:06d}", f"train-{step:06d}").replace(
                f'"step": {source},', f'"step": {step},'
            )
            (folder / f"big/rollouts/step-{step:06d}.jsonl").write_text(text)
        size = sum(file.stat().st_size for file in (folder / "big/rollouts").iterdir())
        records_cost(sample)
        run = Run(folder / "big", "big")
        show(f"index of {size / 1e6:.0f} MB, from nothing", timed(run.index.refresh))
        total = run.index.listed(Filter(), 0, 1)["total"]
        print(f"{total:,} rows, index of {run.index.path.stat().st_size / 1e6:.0f} MB")
        show("refresh, nothing new", median(timed(run.index.refresh) for _ in range(TRIES)))
        queries = [(f"order {name}", Filter(order=name)) for name in ORDERS]
        queries += [
            ("text in one", Filter(text="0.9 * (2 * 37.5")),
            ("tool and reward", Filter(tool="price", max_reward=0.5)),
        ]
        for name, chosen in queries:
            for offset in (0, total - 200):
                seconds = median(timed(lambda at=offset, c=chosen: run.index.listed(c, at, 100)) for _ in range(TRIES))
                show(f"page at {offset:,}, {name}", seconds)
        if Path(options.browser).exists():
            in_browser(run, options.browser)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
