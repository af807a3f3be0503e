"""What travels when conversations show images: by name, and with the files in the messages, as chat APIs have them.

    OMP_NUM_THREADS=1 python benchmarks/images.py [--samples 8] [--turns 6] [--images 4] [--json FILE]

Samples of a prompt with pictures of 640 x 480 (noise as PNG, so that nothing compresses well) play some turns on a real
session, router and engine server; the policy speaks by script. Every call to the engine server and every result is
pickled, which is what Ray would send.
"""

import argparse
import asyncio
import pickle
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from _report import Figure, report
from PIL import Image

from agentrl_core.api import EngineContext, Message, together
from agentrl_core.api.agent_loop import Termination
from agentrl_core.config.schema import EngineSlot, ImagesConfig, ModelConfig
from agentrl_core.controller import LocalRuntime
from agentrl_core.data.chat_template import ChatTemplateRenderer, reserved_of
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.engine_kit.images import data_url
from agentrl_core.engine_kit.media import is_name
from agentrl_core.plugins.resolution import resolve
from agentrl_core.rollout.batching import to_data_proto
from agentrl_core.rollout.identity import TrajectoryKey
from agentrl_core.rollout.loop_output import adopt
from agentrl_core.rollout.session import RolloutSession, SessionEnvironment
from agentrl_core.rollout.trajectory import TrajectoryLimits
from agentrl_core.runs.media import start_media
from agentrl_core.serving.router import AsyncLLMServerManager
from agentrl_core.serving.server import EngineServer
from agentrl_testing.tiny_vision import save_tiny_vision_model

MB = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--images", type=int, default=4, help="of a conversation, one before each of the first turns")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    title = f"Images: {args.samples} samples, {args.turns} turns, {args.images} images of 640x480"
    with tempfile.TemporaryDirectory() as folder:
        report(title, asyncio.run(figures(Path(folder), args.samples, args.turns, args.images)), args.json)


class Counted:
    """A handle of an engine server that counts what Ray would send."""

    def __init__(self, server: EngineServer, sent: Counter[str]) -> None:
        self.name, self._server, self._sent = "engine-0", server, sent

    async def call(self, method: str, *args: Any) -> Any:
        self._sent[method] += len(pickle.dumps(args))
        result = getattr(self._server, method)(*args)
        return await result if asyncio.iscoroutine(result) else result


async def figures(folder: Path, samples: int, turns: int, images: int) -> list[Figure]:
    model = save_tiny_vision_model(folder / "model")
    renderer = ChatTemplateRenderer.of(HFChatRenderer.from_config(ModelConfig(model)))
    media = start_media(LocalRuntime(), folder)
    slot = EngineSlot(name="scripted")
    slot.resolved = resolve("engine", "scripted")
    slot.config = slot.resolved.spec.config()
    server = EngineServer(slot, EngineContext(model, max_model_len=100_000, vocab_size=300, max_images=images))
    await server.start()
    sent: Counter[str] = Counter()
    router = AsyncLLMServerManager(
        [Counted(server, sent)], turn_timeout=60, max_model_len=100_000, vocab_size=300,  # type: ignore[list-item]
        capabilities=slot.resolved.spec.capabilities, max_images=images, media=media,
    )  # fmt: skip
    environment = SessionEnvironment(
        renderer, TrajectoryLimits(50_000, 100_000, max_images=images, reserved=reserved_of(renderer)), router, {}, {},
        media=media, images=ImagesConfig(max_count=images),
    )  # fmt: skip
    noise = random.Random(0)
    shown = [Image.frombytes("RGB", (640, 480), noise.randbytes(3 * 640 * 480)) for _ in range(images)]
    with_files = 0

    def in_messages(messages: list[Message]) -> list[Message]:
        """As chat APIs have them."""
        found = []
        for message in messages:
            content = message["content"]
            if isinstance(content, list):
                parts = [part | {"image": data_url(part["image"], media.read(part["image"]))}
                         if is_name(part.get("image")) else part for part in content]  # fmt: skip
                message = {**message, "content": parts}
            found.append(message)
        return found

    async def play(sample: int) -> RolloutSession:
        nonlocal with_files
        session = RolloutSession(TrajectoryKey(0, "train", 1, 0, sample), {"uid": "p"}, environment)
        trajectory = session.trajectory([{"role": "user", "content": [await session.image(shown[0])]}])
        for turn in range(turns):
            await trajectory.generate({"max_tokens": 20})
            with_files += len(pickle.dumps(in_messages(trajectory.messages)))
            if turn + 1 < images:
                trajectory.add_messages([{"role": "user", "content": [await session.image(shown[turn + 1])]}])
            elif turn + 1 < turns:
                trajectory.add_messages([{"role": "user", "content": "go on"}])
        rows = trajectory.finish(Termination.COMPLETED)
        session.report.outputs = adopt("loop", session.tree, rows)
        session.report.termination = Termination.COMPLETED
        return session

    sessions = await together([play(sample) for sample in range(samples)])
    counts = router.image_metrics()
    results = [session.report for session in sessions]
    for result in results:
        result.pack()
    files = sum(file.stat().st_size for file in (folder / "media").iterdir())
    result_files = sum(len(pickle.dumps(in_messages(result.outputs[0].messages))) for result in results)
    batch = to_data_proto(results, 0, {})
    await server.close()
    return [
        Figure("requests", "with files in messages", with_files / MB, "MB"),
        Figure("requests", "by name", sent["generate"] / MB, "MB"),
        Figure("requests", "images, sent to the engine once", sent["keep_images"] / MB, "MB", 1.1 * files / MB),
        Figure("requests", "images shown", counts["shown"], ""),
        Figure("requests", "images sent", counts["sent"], "", float(images)),
        Figure("results", "with files in messages", result_files / MB, "MB"),
        Figure("results", "by name", len(pickle.dumps(results)) / MB, "MB"),
        Figure("batch", "by name", len(pickle.dumps(batch)) / MB, "MB"),
        Figure("files", "of the run", files / MB, "MB"),
    ]


if __name__ == "__main__":
    main()
