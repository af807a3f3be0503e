"""Many small clients of one ``agentrl tinker serve``, one of which is killed: does one starve, does memory grow?

python benchmarks/tinker_load.py --minutes 5 --clients 32

Each client has a key, a session and an adapter of its own, and repeats: two datums, a step, new weights for a sampler,
two samples, and a heartbeat. One client is killed in the middle, without a word. Prints the rounds of the slowest and
of the fastest client, the longest round, and the memory of the server after each fifth of the time.
"""

import argparse
import asyncio
import multiprocessing
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from agentrl_testing.tiny_model import save_tiny_model
from agentrl_tinker.client import Client, Model, datum

IDS = list(range(5, 25))


async def rounds(url: str, model: str, key: str, until: float, seconds: list[float]) -> None:
    """Until a time; ``seconds`` gets the duration of each round."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        client = Client(http, key)
        session = await client.session()
        trained = await Model.create(client, model, session)
        data = [datum(IDS[:-1], IDS[1:], weights=[1.0] * 19)] * 2
        while time.monotonic() < until:
            started = time.monotonic()
            await trained.train(data)
            await trained.step(learning_rate=1e-3)
            sampler = await trained.sampler()
            await sampler.sample(IDS, count=2, max_tokens=8, stop=[])
            await client.post("session_heartbeat", {"session_id": session})
            seconds.append(time.monotonic() - started)


def victim(url: str, model: str, until: float) -> None:
    asyncio.run(rounds(url, model, "tml-victim", until, []))


async def load(url: str, model: str, clients: int, minutes: float, server: psutil.Process) -> None:
    started = time.monotonic()
    until = started + 60 * minutes
    killed = multiprocessing.get_context("spawn").Process(target=victim, args=(url, model, until), daemon=True)
    killed.start()
    seconds: list[list[float]] = [[] for _ in range(clients - 1)]
    tasks = [asyncio.create_task(rounds(url, model, f"tml-{i}", until, each)) for i, each in enumerate(seconds)]
    memory = []
    for fifth in range(1, 6):
        await asyncio.sleep(max(started + 12 * minutes * fifth - time.monotonic(), 0))
        memory.append(server.memory_info().rss / 2**20)
        if fifth == 2 and killed.pid is not None:
            psutil.Process(killed.pid).send_signal(signal.SIGKILL)
    await asyncio.gather(*tasks)
    counts, longest = [len(each) for each in seconds], max(max(each) for each in seconds)
    every = statistics.median(duration for each in seconds for duration in each)
    report = [
        f"clients {clients}, minutes {minutes:g}, rounds {sum(counts)}",
        f"rounds of a client: {min(counts)} to {max(counts)}",
        f"seconds of a round: median {every:.1f}, longest {longest:.1f}",
        f"MiB of the server after each fifth: {', '.join(f'{each:.0f}' for each in memory)}",
    ]
    sys.stdout.write("\n".join(report) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--port", type=int, default=8765)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = save_tiny_model(Path(name) / "model")
        command = [
            sys.executable, "-m", "agentrl_core.cli.main", "tinker", "serve", "--model", model,
            "--state", f"{name}/state", "--port", str(options.port), "--max-adapters", str(options.clients + 1),
            "--session-timeout", "60",
            "--device", "cpu", "--max-model-len", "128",
        ]  # fmt: skip
        process = subprocess.Popen(command)
        url = f"http://127.0.0.1:{options.port}"
        try:
            while process.poll() is None:
                with suppress(httpx.TransportError):
                    httpx.get(f"{url}/api/v1/healthz")
                    break
                time.sleep(0.2)
            asyncio.run(load(url, model, options.clients, options.minutes, psutil.Process(process.pid)))
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
