"""Runs of a vision-language model: what was sampled and trained, against transformers alone."""

import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from typer.testing import CliRunner

from agentrl_core.api import ConfigError, DataError
from agentrl_core.api.record_format import rows_of
from agentrl_core.cli.main import app
from agentrl_core.engine_kit.media import MediaProcessor
from agentrl_core.runs.run_dir import RunDir
from agentrl_testing.tiny_vision import save_tiny_vision_model

Fit = Callable[..., RunDir]
SHOW = """
from PIL import Image
from agentrl_core.api import AgentLoopBase, Termination


class Show(AgentLoopBase):
    \"\"\"Three turns; after the first two the user shows a picture that depends on the sample.\"\"\"

    async def run(self, sampling_params, *, session, raw_prompt, **row):
        trajectory = session.trajectory(raw_prompt)
        for turn in range(3):
            last = await trajectory.generate({**sampling_params, "max_tokens": 6})
            if turn < 2:
                picture = Image.new("RGB", (56, 28 * (turn + 1)), (turn * 90, 5, row["sample_index"] * 60))
                said = [{"type": "text", "text": "now"}, await session.image(picture), {"type": "text", "text": "?"}]
                assert trajectory.add_messages([{"role": "user", "content": said}])
        return trajectory.finish(last.termination)


def seen(trajectory):
    # A reward may look at the pixels, which are those of the messages.
    assert set(trajectory.images) == {
        part["image"] for message in trajectory.messages if isinstance(message["content"], list)
        for part in message["content"] if part["type"] == "image"
    }
    return sum(map(len, trajectory.images.values())) % 7 / 7 + sum(map(ord, trajectory.model_text)) % 5
"""


GALLERY = """
from PIL import Image
from agentrl_core.api import Environment, Episode, InteractionTurn


class Gallery(Environment):
    def tasks(self, split):
        return [{"color": color} for color in ("red", "blue")]

    async def open(self, task, seed):
        assert self.context.shows_images
        return Room(task["color"])


class Room(Episode):
    def __init__(self, color):
        self.color = color
        self.messages = [
            {"role": "user", "content": [
                {"type": "image", "image": Image.new("RGB", (56, 56), color)}, {"type": "text", "text": "Which?"},
            ]},
        ]

    async def reply(self, messages):
        return InteractionTurn(False, "And this?", images=[Image.new("RGB", (28, 56), self.color)])

    async def score(self, trajectory):
        return float(len(trajectory.model_text) % 3)
"""


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_vision_model(tmp_path_factory.mktemp("vision"), initializer_range=0.1)


@pytest.fixture
def show(fit: Fit, tiny_run: Any, vision_model: str) -> Fit:
    """A run of the loop above, over rows with no, one and two images."""
    folder: Path = tiny_run.folder
    # Equal files are one module.
    (folder / "show.py").write_text(f"{SHOW}\n# {folder}\n")
    randoms = random.Random(0)
    for number in range(3):
        size = (56, 28 * (1 + number % 2))
        Image.frombytes("RGB", size, randoms.randbytes(3 * size[0] * size[1])).save(folder / f"picture{number}.png")
    rows = [
        {**row, "prompt": "<image>" * (index % 3) + "what?", "images": [f"picture{n}.png" for n in range(index % 3)]}
        for index, row in enumerate(tiny_run.rows(6))
    ]

    def run(**changes: Any) -> RunDir:
        settings = {
            "model.path": vision_model, "data.max_prompt_length": 200, "rollout.max_response_length": 200,
            "rollout.agent.loops": [{"name": "./show.py:Show"}], "data.batch_size": 3,
            "reward.functions": [{"name": "./show.py:seen", "isolation": "inline"}],
            "algorithm.old_log_probs": "actor",
        }  # fmt: skip
        return fit({**settings, **changes}, rows)

    return run


def rows_in(run: RunDir, step: int) -> list[dict[str, Any]]:
    lines = (run.rollouts_dir / f"step-{step:06d}.jsonl").read_text().splitlines()
    return [row for line in lines for row in rows_of(json.loads(line))]


def nodes_in(run: RunDir, step: int) -> list[list[dict[str, Any]]]:
    lines = (run.rollouts_dir / f"step-{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line)["nodes"] for line in lines]


def log_probs_of(model: Any, processor: MediaProcessor, media: Path, nodes: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Of each turn of a conversation, by transformers alone."""
    ids = torch.tensor([token for node in nodes for token in node["ids"]])
    names = [name for node in nodes for name in node.get("images", ())]
    inputs: dict[str, Any] = {}
    if names:
        pictures = [Image.open(io.BytesIO((media / name).read_bytes())).convert("RGB") for name in names]
        found = processor.processor(text=[processor.placeholder * len(names)], images=[pictures], return_tensors="pt")
        types = torch.isin(ids, torch.tensor(processor.processor.image_token_ids)).long()
        inputs = {
            "pixel_values": found["pixel_values"], "image_grid_thw": found["image_grid_thw"],
            "mm_token_type_ids": types[None],
        }  # fmt: skip
    with torch.no_grad():
        logits = model(input_ids=ids[None], **inputs, use_cache=False).logits[0]
    values = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
    found, end = [], 0
    for node in nodes:
        start, end = end, end + len(node["ids"])
        if node["kind"] == "turn":
            found.append(values[start - 1 : end - 1])
    return found


def test_what_engine_and_actor_compute_is_what_transformers_computes_of_the_images(
    show: Fit, vision_model: str
) -> None:
    run = show()
    model = AutoModelForImageTextToText.from_pretrained(vision_model).eval()
    processor = MediaProcessor.load(vision_model)
    assert processor is not None
    conversations = nodes_in(run, 1)
    counts = [sum(len(node.get("images", ())) for node in nodes) for nodes in conversations]
    assert len(set(counts)) > 1 and set(counts) <= {2, 3, 4}
    for nodes in conversations:
        expected = log_probs_of(model, processor, run.path / "media", nodes)
        turns = [node for node in nodes if node["kind"] == "turn"]
        for values, turn in zip(expected, turns, strict=True):
            torch.testing.assert_close(torch.tensor(turn["log_probs"]), values, atol=1e-4, rtol=0)
            if "old_log_probs" in turn:
                torch.testing.assert_close(torch.tensor(turn["old_log_probs"]), values, atol=1e-4, rtol=0)
    assert any("old_log_probs" in node for nodes in conversations for node in nodes)
    metrics = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert all(line["rollout/logprob_gap_max"] < 1e-5 for line in metrics if "rollout/logprob_gap_max" in line)
    # Each image goes to the engine once, though it is shown in many requests.
    files = [*(run.path / "media").iterdir()]
    assert sum(line.get("images/sent", 0) for line in metrics) == len(files)
    assert sum(line.get("images/shown", 0) for line in metrics) > 3 * len(files)


def test_a_resumed_run_samples_the_same_ids(show: Fit) -> None:
    changes = {"trainer.checkpoint.interval": 2}
    whole = show(**changes, **{"trainer.steps": 3, "trainer.name": "whole"})
    half = show(**changes, **{"trainer.steps": 2, "trainer.name": "half"})
    latest = str(half.path / "checkpoints/latest")
    show(**changes, **{"trainer.steps": 3, "trainer.name": "half", "trainer.resume": latest})
    assert [row["response_ids"] for row in rows_in(half, 3)] == [row["response_ids"] for row in rows_in(whole, 3)]


SHOWN = """
from PIL import Image
from agentrl_core.api import Environment, Episode, InteractionTurn


class Colours(Environment):
    def tasks(self, split):
        return [{"red": 60 * number} for number in range(4)] if split == "train" else []

    async def open(self, task, seed):
        return Shown(task["red"])


class Shown(Episode):
    def __init__(self, red):
        square = {"type": "image", "image": Image.new("RGB", (56, 56), (red, 0, 0))}
        self.messages = [{"role": "user", "content": [{"type": "text", "text": "red?"}] + COUNT * [square]}]

    async def reply(self, messages):
        return InteractionTurn(True, "")

    async def score(self, trajectory):
        return float(len(trajectory.model_text) % 3)
"""


@pytest.mark.parametrize(
    ("count", "changes", "message"),
    [
        (1, {}, ""),
        (2, {"model.images": {"max_count": 1}}, "2 images, more than model.images.max_count=1"),
        (1, {"data.max_prompt_length": 12}, "the first task of .* has a prompt of"),
    ],
)
def test_the_first_messages_of_an_episode_show_images(
    fit: Fit, tiny_run: Any, vision_model: str, count: int, changes: dict[str, Any], message: str
) -> None:
    (tiny_run.folder / "shown.py").write_text(f"COUNT = {count}\n{SHOWN}\n# {tiny_run.folder}\n")
    settings = {
        "model.path": vision_model, "environments": [{"name": "./shown.py:Colours"}], "data.train_files": None,
        "data.max_prompt_length": 100, "rollout.agent.loops": ["tool_agent"], "reward.functions": [], **changes,
    }  # fmt: skip
    if message:
        with pytest.raises((DataError, ConfigError), match=message):
            fit(settings)
        return
    lines = nodes_in(fit(settings), 1)
    assert len(lines) == 4 and all(len(nodes[0]["images"]) == 1 for nodes in lines)


@pytest.mark.slow
@pytest.mark.ray
def test_two_ranks_on_ray_train_as_one_process_does(show: Fit) -> None:
    changes = {"trainer.checkpoint.interval": 2, "actor.micro_batch_tokens": 150}
    alone = show(**changes, **{"trainer.name": "alone"})
    apart = show(**changes, **{
        "trainer.name": "apart", "cluster.runtime": "ray", "cluster.processes_per_node": 2,
        "rollout.engine.replicas": 1,
    })  # fmt: skip
    assert [row["response_ids"] for row in rows_in(apart, 1)] == [row["response_ids"] for row in rows_in(alone, 1)]
    weights = [load_file(run.path / "checkpoints/latest/actor/model.safetensors") for run in (alone, apart)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=1e-4, rtol=0, msg=name)


def test_a_frozen_vision_tower_stays_as_it_was_and_a_checkpoint_sees(show: Fit, vision_model: str) -> None:
    run = show(**{"model.freeze": ["vision"], "trainer.checkpoint.interval": 2})
    before = load_file(Path(vision_model) / "model.safetensors")
    files = (run.path / "checkpoints/latest/actor").glob("*.safetensors")
    after = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert after.keys() == before.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any("visual" in name for name in moved)
    assert MediaProcessor.load(run.path / "checkpoints/latest/actor") is not None
    exported = run.path / "exported"
    result = CliRunner().invoke(app, ["export", str(run.path / "checkpoints/latest"), str(exported)])
    assert result.exit_code == 0, result.output
    assert MediaProcessor.load(exported) is not None
    loaded = AutoModelForImageTextToText.from_pretrained(exported).state_dict()
    expected = AutoModelForImageTextToText.from_pretrained(run.path / "checkpoints/latest/actor").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_the_line_that_export_writes_loads_an_adapter(show: Fit) -> None:
    run = show(**{"model.adapter": {"rank": 2}, "trainer.checkpoint.interval": 2})
    result = CliRunner().invoke(app, ["export", str(run.path / "checkpoints/latest"), str(run.path / "exported")])
    assert result.exit_code == 0, result.output
    line = "".join(result.output.splitlines()).partition("load it with ")[2]
    loaded = eval(line, {"peft": peft, "transformers": transformers})  # noqa: S307
    assert any("lora_A" in name for name, _ in loaded.named_parameters())
    assert type(loaded.get_base_model()).__name__ == "Qwen2_5_VLForConditionalGeneration"


def test_a_row_whose_image_is_missing_stops_the_run_before_it_starts(show: Fit, tiny_run: Any) -> None:
    (tiny_run.folder / "picture1.png").unlink()
    with pytest.raises(DataError, match=r"row 2, message 0, part 1: .*picture1\.png: no such file"):
        show()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", r"the processor of images in .*broken cannot be loaded: .*pip install 'agentrl-core\[vision\]'"),
        ('{"image_processor_type": "Unknown", "processor_class": "Unknown"}', "transformers finds no processor"),
    ],
)
def test_a_processor_that_cannot_be_loaded_stops_runs_with_images_alone(
    fit: Fit, show: Fit, tiny_run: Any, vision_model: str, tmp_path: Path, content: str, told: str
) -> None:
    model = shutil.copytree(vision_model, tmp_path / "broken")
    for file in model.glob("*processor_config.json"):
        file.write_text(content)
    with pytest.raises(DataError, match=f"data: train row 1: it has images, but the model .*{told}"):
        show(**{"model.path": str(model)})
    run = fit({"model.path": str(model), "trainer.steps": 1, "data.batch_size": 2}, tiny_run.rows(4))
    assert rows_in(run, 1) and not (run.path / "media").exists()


def test_an_environment_shows_images_in_its_first_message_and_in_its_answers(
    fit: Fit, tiny_run: Any, vision_model: str
) -> None:
    (tiny_run.folder / "gallery.py").write_text(f"{GALLERY}\n# {tiny_run.folder}\n")
    run = fit({
        "model.path": vision_model, "data.max_prompt_length": 100, "rollout.max_response_length": 200,
        "data.train_files": None, "environments": [{"name": "./gallery.py:Gallery"}], "reward.functions": None,
        "rollout.agent.loops": [{"name": "tool_agent", "config": {"max_assistant_turns": 2}}],
        # Every turn ends at once.
        "rollout.sampling": {"logit_bias": {258: 100.0}},
    })  # fmt: skip
    for nodes in nodes_in(run, 1):
        shown = [name[33:] for node in nodes for name in node.get("images", ())]
        assert shown == ["56x56.png", "28x56.png"]
    lines = (run.rollouts_dir / "step-000001.jsonl").read_text().splitlines()
    assert len(lines) == 4 and all(json.loads(line)["agents"][0]["status"] == "trained" for line in lines)


def test_a_run_with_images_is_replayed_and_scored_again(show: Fit, tiny_run: Any) -> None:
    run = show(**{"trainer.steps": 1})
    files = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    assert len([path for path in files if path.parent.name == "media"]) >= 4
    scored = ["reward", "replay", str(run.rollout_file(1, "train")), "--reward", f"{tiny_run.folder}/show.py:seen"]
    for command in (["replay", str(run.path)], scored):
        result = CliRunner().invoke(app, [*command, "--json"])
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert found["left_out"] == 0 and len(found["trajectories"]) == len(rows_in(run, 1))
        assert [each["changes"] for each in found["trajectories"]] == [{}] * len(found["trajectories"])
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == files
