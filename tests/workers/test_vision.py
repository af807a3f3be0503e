"""Rows with images against transformers' own forward of each row alone, on what the official processor makes of it."""

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from agentrl_core.api.errors import ConfigError, ImageError, ProtocolError
from agentrl_core.config.schema import AdapterConfig
from agentrl_core.engine_kit.media import MediaProcessor, Size, name_of
from agentrl_core.fsdp2 import log_probs, media
from agentrl_core.fsdp2.log_probs import chunks_logits, response_log_probs
from agentrl_core.fsdp2.model_files import save_merged
from agentrl_core.fsdp2.models import vision_parameters
from agentrl_core.plugins.resolution import resolve
from agentrl_core.protocol import DataProto
from agentrl_core.workers.actor import ActorWorker
from agentrl_core.workers.critic import CriticWorker
from agentrl_core.workers.image_columns import image_column, image_name, images_to_share
from agentrl_core.workers.micro_batching import micro_batches, narrowed, rank_of_rows
from agentrl_core.workers.reference import ReferenceWorker
from agentrl_core.workers.sent_rows import unpadded
from agentrl_testing.tiny_vision import FAMILIES, missing, save_tiny_vision_model

PACKED = {"qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm", "internvl"}
WHOLE = {"llama4"}
"""Families whose logits are computed at once, and that have no model without a head."""
TEMPERATURE = 0.7
SIZE = Size(60, 60)


class Images:
    """Random images by name."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def make(self, seed: int, size: Size = SIZE) -> str:
        pixels = np.random.default_rng(seed).integers(0, 256, (size.height, size.width, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "png")
        name = name_of(file.getvalue(), size, "png")
        self.files[name] = file.getvalue()
        return name

    def read(self, name: str) -> bytes:
        return self.files[name]

    def open(self, name: str) -> Any:
        return Image.open(io.BytesIO(self.files[name]))


IMAGES = Images()
A, B, C = IMAGES.make(0), IMAGES.make(1), IMAGES.make(2, Size(90, 60))
ROWS: dict[str, list[tuple[str, str, list[str]]]] = {
    "padded": [("one @ two", "three", [A]), ("@", "a longer response", [C]), ("a prompt with @ in it", "b", [B])],
    "forks": [("one @ two", "three", [A]), ("one @ two", "threw", [A]), ("one @ two", "four", [A])],
    "same text, other image": [("one @ two", "three", [A]), ("one @ two", "three", [B]), ("one @ two", "th", [A])],
    "an image in a response": [("one @ two", "see @ now", [A, C]), ("one @ two", "see @ then", [A, C]),
                               ("one", "see @ now", [B])],
    "without images among others": [("one", "two", []), ("one @", "two", [A]), ("one", "three", [])],
    "two images": [("@ and @.", "x", [A, C]), ("@ and @.", "yz", [A, B]), ("@ and @.", "x!", [C, A])],
    "no images": [("one", "two", []), ("one two", "three", [])],
}  # fmt: skip
"""Prompt, response and images of each row, @ for an image, by what they show."""


@pytest.fixture(scope="module", params=[name for name in FAMILIES])
def family(request: pytest.FixtureRequest, tmp_path_factory: Any) -> SimpleNamespace:
    """A model's directory, and its processor."""
    if missing(request.param):
        pytest.skip(f"its processor needs {missing(request.param)}")
    path = str(tmp_path_factory.mktemp(request.param))
    return saved(path, request.param)


def saved(path: str, family: str) -> SimpleNamespace:
    save_tiny_vision_model(path, family=family)
    model = AutoModelForImageTextToText.from_pretrained(path)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(path)
    return SimpleNamespace(name=family, path=path, processor=MediaProcessor.load(path))


@pytest.fixture(scope="module")
def make_actor(make_config: Callable[..., Any], family: SimpleNamespace) -> Callable[..., ActorWorker]:
    made: dict[str, ActorWorker] = {}

    def make(**model: Any) -> ActorWorker:
        if str(model) not in made:
            made[str(model)] = actor_of(make_config, family, **model)
        return made[str(model)]

    return make


def actor_of(make_config: Any, family: SimpleNamespace, **model: Any) -> ActorWorker:
    config = make_config(path=family.path, algorithm={"entropy_coef": 0.01}, **model)
    config.data.max_prompt_length = 64
    # As `bind` leaves it.
    config.rollout.engine.resolved = resolve("engine", "hf")
    config.algorithm.advantage.resolved = resolve("advantage_estimator", "grpo")
    actor = ActorWorker(config, 10, media=IMAGES)
    actor.init_model()
    return actor


def batch_of(make_batch: Any, processor: MediaProcessor, rows: list[tuple[str, str, list[str]]]) -> DataProto:
    """A batch of rows, in which all tokens of responses but those of images were sampled."""

    def ids(text: str) -> list[int]:
        return processor.processor.tokenizer.encode(text, add_special_tokens=False)

    made = []
    for prompt, response, images in rows:
        shown = prompt.count("@")
        parts = [
            processor.expanded(text.replace("@", processor.placeholder), names)
            for text, names in ((prompt, images[:shown]), (response, images[shown:]))
        ]
        made.append((ids(parts[0]), ids(parts[1]), [int(each not in processor.reserved) for each in ids(parts[1])]))
    batch = make_batch(made)
    batch.meta_info["calculate_entropy"] = True
    batch.meta_info["temperature"] = TEMPERATURE
    return DataProto.from_dict(
        dict(batch.batch.items()), {"images": [tuple(images) for _, _, images in rows]}, batch.meta_info
    )


def plain_results(
    model: Any, processor: MediaProcessor, rows: list[tuple[str, str, list[str]]], batch: DataProto
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies [b, r] of each row alone, as transformers computes them."""
    mask_br = batch.batch["response_mask"]
    results = [torch.zeros(mask_br.shape), torch.zeros(mask_br.shape)]
    for row, (prompt, response, images) in enumerate(rows):
        text = (prompt + response).replace("@", processor.placeholder)
        shown = [[IMAGES.open(name) for name in images]] if images else None
        inputs = processor.processor(text=[text], images=shown, return_tensors="pt")
        # Llama 4's makes bfloat16, whatever the model is in.
        inputs = {name: each.float() if each.is_floating_point() else each for name, each in inputs.items()}
        ids = inputs["input_ids"][0]
        length = int(batch.batch["attention_mask"][row].sum())
        assert ids.tolist() == batch.batch["input_ids"][row][batch.batch["attention_mask"][row].bool()].tolist()
        response_r = batch.batch["responses"][row][batch.batch["attention_mask"][row, -mask_br.shape[1] :].bool()]
        logits_rV = model(**inputs, use_cache=False).logits[0, length - len(response_r) - 1 : -1] / TEMPERATURE
        log_probs_rV = logits_rV.log_softmax(-1)
        results[0][row, : len(response_r)] = log_probs_rV.gather(-1, response_r.unsqueeze(-1)).squeeze(-1)
        results[1][row, : len(response_r)] = -(log_probs_rV.exp() * log_probs_rV).sum(-1)
    return results[0] * mask_br, results[1] * mask_br


def gradients(model: Any, log_probs_br: torch.Tensor, entropies_br: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (log_probs_br.square().sum() + entropies_br.sum()).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return {name: torch.zeros(()) if grad is None else grad for name, grad in found.items()}


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    for name, expected in theirs.items():
        gap = float((ours[name] - expected).abs().max())
        assert gap <= 1e-5 * largest, name


@pytest.mark.parametrize("mode", ["padded", "packed", "in chunks"])
@pytest.mark.parametrize("case", ROWS)
def test_rows_are_computed_as_each_row_alone(
    make_actor: Any, make_batch: Any, family: SimpleNamespace, case: str, mode: str, monkeypatch: Any
) -> None:
    actor = make_actor(packing=mode != "padded")
    in_chunks = False
    if mode == "in chunks":
        monkeypatch.setattr(log_probs, "MOST_LOGITS", 3 * 400)
        in_chunks = chunks_logits(actor.module, 10_000, torch.device("cpu"), actor._backend._media)
        assert in_chunks is (family.name not in WHOLE)
    if mode != "padded":
        assert actor._backend._packing.is_possible is (family.name in PACKED)
    rows = ROWS[case]
    batch = batch_of(make_batch, family.processor, rows)
    columns, packs = actor._columns_of(batch, (), "test"), actor._backend.packs_prefixes
    (micro,) = micro_batches(columns, 10_000, by_prefix=packs)
    with actor._backend._packing.on():
        ours = response_log_probs(actor.module, micro, TEMPERATURE, "gradient", in_chunks, actor._backend._media)
    mask_br, order = micro["response_mask"], micro.rows
    model = AutoModelForImageTextToText.from_pretrained(family.path)
    theirs = plain_results(model.eval(), family.processor, rows, batch)
    masked = [result * mask_br for result in ours]
    for one, other in zip(masked, theirs, strict=True):
        torch.testing.assert_close(one, other[order][:, : one.shape[1]], atol=1e-5, rtol=0)
    assert_close(gradients(actor.module, *masked), gradients(model, *theirs))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: Any) -> SimpleNamespace:
    return saved(str(tmp_path_factory.mktemp("qwen")), "qwen2_5_vl")


ALL_ROWS = [row for rows in ROWS.values() for row in rows]


def trainable(actor: ActorWorker, batch: DataProto) -> DataProto:
    batch = batch.union(actor.compute_log_prob(batch))
    mask = batch.batch["response_mask"]
    batch.batch["advantages"] = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    return batch


def test_phases_of_a_worker_take_whole_batches(make_config: Any, make_batch: Any, qwen: SimpleNamespace) -> None:
    actor = actor_of(make_config, qwen)
    batch = batch_of(make_batch, qwen.processor, ALL_ROWS)
    actor.config.actor.micro_batch_tokens = 150
    ours = actor.compute_log_prob(unpadded(narrowed(batch, ()))).batch
    model = AutoModelForImageTextToText.from_pretrained(qwen.path).eval()
    with torch.no_grad():
        theirs = plain_results(model, qwen.processor, ALL_ROWS, batch)
    torch.testing.assert_close(ours["old_log_probs"], theirs[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(ours["entropys"], theirs[1], atol=1e-5, rtol=0)
    reference = ReferenceWorker(actor.config, media=IMAGES)
    reference.init_model()
    found = reference.compute_ref_log_prob(batch).batch["ref_log_prob"]
    torch.testing.assert_close(found, theirs[0], atol=1e-5, rtol=0)


def test_what_another_forward_left_on_the_model_changes_nothing(
    make_config: Any, make_batch: Any, qwen: SimpleNamespace
) -> None:
    actor = actor_of(make_config, qwen)
    batch = batch_of(make_batch, qwen.processor, [*ROWS["two images"], *ROWS["no images"]])
    expected = actor.compute_log_prob(batch).batch["old_log_probs"]
    image = IMAGES.open(C)
    with torch.no_grad():
        actor.module.generate(**qwen.processor.whole(qwen.processor.placeholder + "a", [image]), max_new_tokens=2)
    assert actor.module.model.rope_deltas.any()
    assert torch.equal(actor.compute_log_prob(batch).batch["old_log_probs"], expected)


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"packing": False}])
def test_micro_batches_give_the_update_of_the_whole_batch(
    make_config: Any, make_batch: Any, qwen: SimpleNamespace, settings: dict[str, Any]
) -> None:
    weights = []
    for tokens, more in ((10_000, {}), (60, settings)):
        actor = actor_of(make_config, qwen, **more)
        actor.config.actor.micro_batch_tokens = tokens
        for group in actor._backend._optimizer._adamw.param_groups:
            # AdamW makes large steps of gradients that are all rounding.
            group["eps"] = 1e-4
        actor.update(trainable(actor, batch_of(make_batch, qwen.processor, ALL_ROWS)))
        weights.append(actor.module.state_dict())
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=2e-5, rtol=0, msg=name)


@pytest.mark.parametrize("cls", [ActorWorker, CriticWorker])
def test_a_frozen_tower_stays_bit_for_bit(make_config: Any, make_batch: Any, qwen: SimpleNamespace, cls: Any) -> None:
    config = make_config(path=qwen.path, freeze=["vision"], gradient_checkpointing=cls is ActorWorker)
    config.data.max_prompt_length = 64
    worker = cls(config, 10, media=IMAGES)
    worker.init_model()
    if cls is CriticWorker:
        torch.nn.init.normal_(worker._backend._model.value_head.weight)
    before = {name: tensor.clone() for name, tensor in worker._backend._model.named_parameters()}
    batch = batch_of(make_batch, qwen.processor, ALL_ROWS)
    mask = batch.batch["response_mask"]
    for name in ("advantages", "old_log_probs", "returns", "values"):
        batch.batch[name] = torch.rand(mask.shape) * mask
    worker.update(batch)
    after = dict(worker._backend._model.named_parameters())
    same = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    assert same == {name for name in before if ".visual." in name} and same
    assert all(after[name].grad is None and not after[name].requires_grad for name in same)
    assert not any(".visual." in name for name in worker._backend._optimizer.moments())


def test_only_a_model_that_sees_can_freeze_its_vision(make_config: Any) -> None:
    actor = ActorWorker(make_config(freeze=["vision"]), 1)
    with pytest.raises(ConfigError, match="model.freeze: Qwen3ForCausalLM has no vision tower"):
        actor.init_model()


def test_adapters_leave_the_tower_out(make_actor: Any, make_batch: Any, family: SimpleNamespace) -> None:
    actor = make_actor(adapter=AdapterConfig(rank=2))
    assert any(".lora_A." in name for name, _ in actor.module.named_parameters())
    assert not any(".lora_" in name for name in vision_parameters(actor.module))
    batch = trainable(actor, batch_of(make_batch, family.processor, ROWS["two images"]))
    assert actor.update(batch)["actor/grad_norm"] > 0


def test_values_see_images(make_config: Any, make_batch: Any, family: SimpleNamespace) -> None:
    config = make_config(path=family.path)
    config.data.max_prompt_length = 64
    critic = CriticWorker(config, 10, media=IMAGES)
    if family.name in WHOLE:
        with pytest.raises(ConfigError, match="transformers has no .* without its language-model head"):
            critic.init_model()
        return
    critic.init_model()
    torch.nn.init.normal_(critic._backend._model.value_head.weight)
    rows = ROWS["same text, other image"]
    values = critic.compute_values(batch_of(make_batch, family.processor, rows)).batch["values"]
    assert not torch.allclose(values[0], values[1], atol=1e-3)
    torch.testing.assert_close(values[0, :2], values[2, :2], atol=1e-5, rtol=0)


def test_a_checkpoint_has_the_processor_and_the_names_of_the_models_own_files(
    make_actor: Any, make_batch: Any, family: SimpleNamespace, tmp_path: Path
) -> None:
    actor = make_actor()
    batch = batch_of(make_batch, family.processor, ROWS["two images"])
    actor.save_checkpoint(str(tmp_path))
    AutoTokenizer.from_pretrained(family.path).save_pretrained(tmp_path)
    processor = MediaProcessor.load(tmp_path)
    assert processor is not None and processor.expansion(Size(90, 60)) == family.processor.expansion(Size(90, 60))
    names = load_file(Path(family.path) / "model.safetensors").keys()
    assert load_file(tmp_path / "model.safetensors").keys() == names
    assert {name for bucket in actor.weight_buckets(10_000) for name in bucket.names} == names
    again = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        theirs, _ = plain_results(again, processor, ROWS["two images"], batch)
    torch.testing.assert_close(actor.compute_log_prob(batch).batch["old_log_probs"], theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["gemma3"], indirect=True)
def test_a_merged_adapter_keeps_the_processor(make_actor: Any, family: SimpleNamespace, tmp_path: Path) -> None:
    actor = make_actor(adapter=AdapterConfig(rank=2))
    actor.save_checkpoint(str(tmp_path / "adapter"))
    save_merged(str(tmp_path / "adapter"), str(tmp_path / "merged"), family.path)
    assert (tmp_path / "merged" / "preprocessor_config.json").is_file()
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")


def test_a_family_that_cannot_be_packed_says_why(make_config: Any, caplog: Any, tmp_path: Path) -> None:
    gemma = saved(str(tmp_path), "gemma3")
    with caplog.at_level("INFO"):
        assert not actor_of(make_config, gemma)._backend._packing.is_possible
    assert "Gemma3ForConditionalGeneration computes padded rows: its masks" in caplog.text


def test_a_family_that_would_be_computed_wrong_is_refused(
    make_config: Any, qwen: SimpleNamespace, monkeypatch: Any
) -> None:
    monkeypatch.setattr(media.Media, "_positions_of", lambda self, ids, micro, slots: micro["position_ids"])
    with pytest.raises(ConfigError, match="model.path: Qwen2_5_VLForConditionalGeneration computes something else"):
        actor_of(make_config, qwen)


def test_problems_of_images_are_named(make_config: Any, make_batch: Any, qwen: SimpleNamespace) -> None:
    actor = actor_of(make_config, qwen)
    damaged = IMAGES.make(7)
    IMAGES.files[damaged] = IMAGES.files[damaged][:100]
    rows = [("a @", "b", [damaged])]
    batch = batch_of(make_batch, qwen.processor, rows)
    with pytest.raises(ImageError, match=f"the image {damaged} cannot be shown to the model: .*truncated"):
        actor.compute_log_prob(batch)
    other = IMAGES.make(8, Size(50, 60))
    IMAGES.files[damaged] = IMAGES.files[other]
    with pytest.raises(ImageError, match=f"the image {damaged} .*its file has 50 x 60 pixels"):
        actor.compute_log_prob(batch)
    batch.non_tensor_batch["images"][0] = ()
    with pytest.raises(ProtocolError, match="compute_log_prob: row 0 has 4 tokens .* no images, which take 0"):
        actor.compute_log_prob(batch)
    batch.non_tensor_batch["images"][0] = (A, A)
    with pytest.raises(ProtocolError, match="which take 8; 1 rows are like that"):
        actor.compute_log_prob(batch)
    blind = ActorWorker(actor.config, 1)
    blind.init_model()
    with pytest.raises(ImageError, match="the batch has images, and the actor's .* is shown none"):
        blind.compute_log_prob(batch)


def test_pixels_of_the_images_seen_last_are_kept(make_config: Any, make_batch: Any, qwen: SimpleNamespace) -> None:
    actor = actor_of(make_config, qwen)
    calls, read = [], IMAGES.read
    actor._backend._media._source = SimpleNamespace(read=lambda name: calls.append(name) or read(name))
    batch = batch_of(make_batch, qwen.processor, ROWS["two images"])
    actor.compute_log_prob(batch)
    actor.compute_log_prob(batch)
    assert sorted(calls) == sorted([A, B, C])


def test_names_of_images_come_back_from_a_column() -> None:
    names = [A, C, "f" * 32 + "-999999x1.jpeg", "0" * 32 + "-1x999999.png"]
    column = image_column([names, [], names[:1]], lambda size: size.width, 7)
    assert column.shape == (3, 4, 4)
    assert [image_name(image) for image in column[0].numpy()] == names
    assert (column[1] == -1).all() and (column[2, 1:] == -1).all()


def test_ranks_get_rows_with_the_same_image_together(make_batch: Any, qwen: SimpleNamespace) -> None:
    rows = [("@ what?", f"{answer}", [image]) for answer in "stuvwxyz" for image in (A, B)]
    batch = batch_of(make_batch, qwen.processor, rows)
    columns = dict(batch.batch.items()) | images_to_share(batch)
    ranks = rank_of_rows(columns, 2, by_prefix=True).tolist()
    assert ranks[::2] in ([0] * 8, [1] * 8) and ranks[1::2] == [1 - rank for rank in ranks[::2]]
