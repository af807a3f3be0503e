"""Two ranks, of which one has no image in a micro-batch, do what one process does: real processes, gloo, FSDP2."""

import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from agentrl_core.controller import ClassWithInitArgs, LocalRuntime
from agentrl_core.controller.runtime import Runtime
from agentrl_core.engine_kit.media import MediaProcessor, Size, name_of
from agentrl_core.protocol import DataProto
from agentrl_testing.tiny_vision import save_tiny_vision_model

pytestmark = pytest.mark.ray


def roles(config: Any, files: dict[str, bytes]) -> dict[str, ClassWithInitArgs]:
    """Actor and critic with a few more methods; made in a function, so that they travel by value."""
    from agentrl_core.api.errors import ImageError
    from agentrl_core.controller import Dispatch, register
    from agentrl_core.workers.actor import ActorWorker
    from agentrl_core.workers.critic import CriticWorker

    class Files:
        def read(self, name: str) -> bytes:
            if name not in files:
                raise ImageError("there is none of this name")
            return files[name]

    class Actor(ActorWorker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def start_again(self, path: str, **model: Any) -> None:
            for key, value in {"path": path, **model}.items():
                setattr(self.config.model, key, value)
            self.init_model()
            for group in self._backend._optimizer._adamw.param_groups:
                # AdamW makes large steps of gradients that are all rounding.
                group["eps"] = 1e-4
            self._calls = 0
            for name, module in self.module.named_modules():
                if name.rpartition(".")[2] in ("visual", "vision_tower", "vision_model"):
                    module.register_forward_hook(self._count)

        def _count(self, *inputs: Any) -> None:
            self._calls += 1

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def looks(self) -> int:
            """How often the vision tower ran."""
            return self._calls

    return {
        "actor": ClassWithInitArgs(Actor, config, 100, media=Files()),
        "critic": ClassWithInitArgs(CriticWorker, config, 100, Files()),
    }


@pytest.fixture(scope="module")
def images() -> dict[str, bytes]:
    """Files of three images by name."""
    files = {}
    for seed, size in enumerate([Size(60, 60), Size(60, 60), Size(90, 60)]):
        pixels = np.random.default_rng(seed).integers(0, 256, (size.height, size.width, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "png")
        files[name_of(file.getvalue(), size, "png")] = file.getvalue()
    return files


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> dict[str, str]:
    """Directories by family."""
    paths = {}
    for family in ("qwen2_5_vl", "gemma3", "qwen3_vl"):
        paths[family] = path = save_tiny_vision_model(tmp_path_factory.mktemp(family), family=family)
        model = AutoModelForImageTextToText.from_pretrained(path)
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
        model.save_pretrained(path)
    return paths


@pytest.fixture(scope="module")
def groups_of(
    make_config: Callable[..., Any], ray_runtime: Runtime, models: dict[str, str], images: dict[str, bytes]
) -> Iterator[Callable[[int], Any]]:
    """The groups of so many ranks."""
    update = {"mini_batches": 1, "epochs": 1, "micro_batch_tokens": 60}
    config = make_config(path=models["qwen2_5_vl"], actor=update, critic=update, algorithm={"entropy_coef": 0.01})
    config.data.max_prompt_length = 64
    made: dict[int, Any] = {}

    def get(ranks: int) -> Any:
        if ranks not in made:
            runtime: Runtime = local if ranks == 1 else ray_runtime
            made[ranks] = runtime.colocated_worker_groups(roles(config, images), processes_per_node=ranks)
        return made[ranks]

    with LocalRuntime() as local:
        yield get


def batch_of(make_batch: Any, path: str, rows: list[tuple[str, str, list[str]]]) -> DataProto:
    processor = MediaProcessor.load(path)
    assert processor is not None

    def ids(text: str, images: list[str]) -> list[int]:
        whole = processor.expanded(text.replace("@", processor.placeholder), images)
        return processor.processor.tokenizer.encode(whole, add_special_tokens=False)

    made = [(ids(prompt, images), ids(response, []), [1] * len(response)) for prompt, response, images in rows]
    batch = make_batch(made)
    objects = {"images": [tuple(images) for _, _, images in rows]}
    return DataProto.from_dict(dict(batch.batch.items()), objects, batch.meta_info)


def step(groups: Any, batch: DataProto) -> dict[str, np.ndarray]:
    """Weights after an update of the actor, and what was computed before."""
    batch = batch.slice()
    batch.union(groups["actor"].compute_log_prob(batch))
    mask = batch.batch["response_mask"]
    batch.batch["advantages"] = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    groups["actor"].update(batch)
    found = {"log_probs": batch.batch["old_log_probs"].numpy()}
    for bucket in groups["actor"].weight_buckets(10_000):
        found |= {name: data.view(np.float32).reshape(shape) for name, shape, _, data in bucket.tensors()}
    return found


def assert_same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    for name, expected in first.items():
        np.testing.assert_allclose(second[name], expected, atol=2e-5, rtol=0, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [[], ["vision"]])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_a_rank_without_images_runs_the_tower_for_nothing(
    groups_of: Any, make_batch: Any, models: dict[str, str], images: dict[str, bytes], family: str, freeze: list[str]
) -> None:
    a, b, c = images
    # The longest rows, which one rank gets, have no image; then more rows with images than without, and one image only.
    cases = [
        [("a long prompt without an image, and more of it", "a response", []), ("one @ two", "three", [a])],
        [("one @ two", "three", [a]), ("one @ two", "see", [b]), ("@ and @", "x", [a, c]), ("a prompt", "text", []),
         ("another prompt without an image", "and a response", [])],
        [("one @", "two", [c]), ("three", "four", []), ("five", "six", []), ("seven and eight", "nine", [])],
    ]  # fmt: skip
    for rows in cases:
        batch, results = batch_of(make_batch, models[family], rows), []
        for ranks in (1, 2):
            groups = groups_of(ranks)
            groups["actor"].start_again(models[family], freeze=freeze)
            before = groups["actor"].looks()
            results.append(step(groups, batch))
            assert all(now > then for now, then in zip(groups["actor"].looks(), before, strict=True))
        assert_same(*results)
    stored = load_file(f"{models[family]}/model.safetensors")
    tower = [name for name in stored if "vis" in name and "language_model" not in name]
    moved = [name for name in tower if not np.array_equal(results[1][name], stored[name].numpy())]
    assert tower and bool(moved) is not bool(freeze)


def test_batches_without_images_leave_the_tower_alone(groups_of: Any, make_batch: Any, models: dict[str, str]) -> None:
    batch = batch_of(make_batch, models["qwen2_5_vl"], [("one", "two", []), ("three", "four", []), ("five", "six", [])])
    del batch.non_tensor_batch["images"]
    results = []
    for ranks in (1, 2):
        groups = groups_of(ranks)
        groups["actor"].start_again(models["qwen2_5_vl"], freeze=[])
        before = groups["actor"].looks()
        results.append(step(groups, batch))
        assert groups["actor"].looks() == before
    assert_same(*results)


def test_values_are_those_of_one_process(
    groups_of: Any, make_batch: Any, models: dict[str, str], images: dict[str, bytes]
) -> None:
    a, _, c = images
    rows = [("one @ two", "three", [a]), ("a prompt that is longer than the other", "text", []), ("@", "x", [c])]
    batch = batch_of(make_batch, models["qwen2_5_vl"], rows)
    mask = batch.batch["response_mask"]
    batch.batch["values"], batch.batch["returns"] = torch.zeros(mask.shape), mask.float()
    results = []
    for ranks in (1, 2):
        critic = groups_of(ranks)["critic"]
        critic.init_model()
        for _ in range(2):
            critic.update(batch.slice())
        results.append(critic.compute_values(batch).batch["values"])
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=0)
    assert results[0].any()
