"""The contract of training backends. The reference is plain PyTorch and transformers, row by row, in this process."""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl_core.api import CheckpointError, Outputs, Wanted
from agentrl_core.api.training_backend import TRAINING_FOLDER
from agentrl_testing.contracts.case import PluginContract, needs
from agentrl_testing.contracts.training_served import (
    ROWS,
    Plain,
    Trained,
    TrainingBackendCase,
    closing,
    gathered,
    loss_of,
    micro_batch,
    model_path,
    outputs_of,
    take_steps,
)
from agentrl_testing.ranks import on_ranks

__all__ = ["TrainingBackendCase", "TrainingBackendContract"]
Head = Literal["tokens", "values"]


class TrainingBackendContract(PluginContract):
    """What every training backend must do."""

    kind = "training_backend"

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_outputs_are_those_of_each_row_alone(self, plugin: TrainingBackendCase, temperature: float) -> None:
        """Log-probs and entropies of a padded micro-batch, float32, at the temperature that is asked for."""
        if temperature != 1.0:
            needs(plugin, "temperature")
        entropies = plugin.has("entropies")
        plain = Plain(plugin.path, "tokens", entropies)
        with closing(plugin.made(plugin.path, trains=False)) as backend:
            found = outputs_of(backend, range(len(ROWS)), Wanted(temperature, "value" if entropies else "none"))
        with torch.no_grad():
            for row in range(len(ROWS)):
                expected = plain.row(row, temperature)
                for name in ("log_probs", "entropies") if entropies else ("log_probs",):
                    _same(plugin, getattr(found[row], name), getattr(expected, name), _sampled(row), f"{name} of {row}")

    def test_values_start_at_zero_and_are_trained(self, plugin: TrainingBackendCase) -> None:
        """A critic's values, and its gradients through head and backbone."""
        needs(plugin, "critic", "all_weights")
        plain = Plain(plugin.path, "values", False)
        with closing(plugin.made(plugin.path, "values")) as backend:
            for row, outputs in outputs_of(backend, range(len(ROWS)), Wanted()).items():
                assert outputs.values is not None and not outputs.values.any(), f"a new critic values row {row}"
            norms = take_steps(backend, range(3), has_entropies=False)
            found = outputs_of(backend, range(len(ROWS)), Wanted())
        assert norms == pytest.approx([plain.step(step) for step in range(3)], rel=1e-3)
        with torch.no_grad():
            for row in range(len(ROWS)):
                # A step of AdamW turns what was rounding in a gradient into a step of the learning rate.
                _same(plugin, found[row].values, plain.row(row).values, _sampled(row), f"values of {row}", 1000)

    @pytest.mark.parametrize("size", [1, 3, 8])
    def test_steps_are_those_of_plain_pytorch(self, plugin: TrainingBackendCase, size: int) -> None:
        """Gradients of all parameters, summed over micro-batches of any size; AdamW with weight decay."""
        needs(plugin, "all_weights")
        with closing(plugin.made(plugin.path)) as backend:
            norms = take_steps(backend, range(3), size, has_entropies=plugin.has("entropies"))
            weights = gathered(backend)
        self._check_steps(plugin, norms, weights)

    def test_the_norm_is_clipped(self, plugin: TrainingBackendCase) -> None:
        """The norm of all gradients together, returned as it was before."""
        needs(plugin, "all_weights")
        with closing(plugin.made(plugin.path)) as backend:
            norms = take_steps(backend, range(3), max_norm=0.05, has_entropies=plugin.has("entropies"))
            weights = gathered(backend)
        self._check_steps(plugin, norms, weights, max_norm=0.05)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_gradients_that_are_not_finite_change_nothing(self, plugin: TrainingBackendCase, value: float) -> None:
        """Neither weights nor moments, and the next step is as if they had never been."""
        needs(plugin, "all_weights")
        entropies = plugin.has("entropies")
        results: list[dict[str, Tensor]] = []
        micros = [micro_batch([0, 1])]

        def spoilt(number: int, outputs: Outputs) -> Tensor:
            return loss_of(0, micros, False)(number, outputs) * value

        for spoils in (False, True):
            with closing(plugin.made(plugin.path)) as backend:
                take_steps(backend, [0], has_entropies=entropies)
                if spoils:
                    with backend.on_device():
                        backend.forward_backward(micros, Wanted(), spoilt)
                        norm = backend.optimizer_step(1.0, 1.0)
                    assert not math.isfinite(norm), f"the norm of gradients of {value} was said to be {norm}"
                take_steps(backend, [1], has_entropies=entropies)
                results.append(gathered(backend))
        _bits(results[0], results[1], "after a step whose gradients were not finite")

    def test_forgotten_gradients_are_forgotten(self, plugin: TrainingBackendCase) -> None:
        """After ``zero_grad`` and after a step."""
        needs(plugin, "all_weights")
        entropies = plugin.has("entropies")
        with closing(plugin.made(plugin.path)) as backend:
            (once,) = take_steps(backend, [0], has_entropies=entropies)
        with closing(plugin.made(plugin.path)) as backend:
            micros = [micro_batch([0, 1, 2])]
            with backend.on_device():
                backend.forward_backward(micros, Wanted(), loss_of(0, micros, False))
                backend.zero_grad()
            assert take_steps(backend, [0], has_entropies=entropies) == pytest.approx([once], rel=1e-5)

    def test_a_loss_is_called_once_for_each_micro_batch(self, plugin: TrainingBackendCase) -> None:
        """With outputs [b, r] that have a gradient."""
        needs(plugin, "all_weights")
        micros, seen = [micro_batch([0]), micro_batch([1, 2]), micro_batch([3, 4, 5])], []

        def loss(number: int, outputs: Outputs) -> Tensor:
            assert outputs.log_probs is not None and outputs.log_probs.requires_grad, "log_probs have no gradient"
            assert outputs.log_probs.dtype == torch.float32, f"log_probs are {outputs.log_probs.dtype}"
            seen.append(number)
            return loss_of(0, micros, False)(number, outputs)

        with closing(plugin.made(plugin.path)) as backend, backend.on_device():
            backend.forward_backward(micros, Wanted(), loss)
            backend.zero_grad()
        assert sorted(seen) == [0, 1, 2], f"the loss was called for the micro-batches {seen}, not once for each of 3"

    def test_what_a_loss_raises_is_raised(self, plugin: TrainingBackendCase) -> None:
        """Also where one of several ranks raises it: the run ends, and no step is made from the others' gradients."""
        needs(plugin, "all_weights")
        for size in (1, *(plugin.ranks[:1] if plugin.has("ranks") else ())):
            with pytest.raises(ArithmeticError, match="on purpose"):
                on_ranks(size, _failing, plugin, plugin.path)

    def test_what_is_handed_out_is_what_is_trained(self, plugin: TrainingBackendCase, tmp_path: Path) -> None:
        """Weights after a step, in a model of transformers, compute what the backend computes."""
        needs(plugin, "all_weights")
        with closing(plugin.made(plugin.path)) as backend:
            take_steps(backend, [0], has_entropies=plugin.has("entropies"))
            weights, found = gathered(backend), outputs_of(backend, range(len(ROWS)), Wanted())
            layout = [bucket for size in (1, 2000, 1 << 30) for bucket in backend.weight_layout(size)]
        AutoConfig.from_pretrained(plugin.path).save_pretrained(tmp_path)
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        _, read = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not read["unexpected_keys"], f"the hub's files have no tensors {read['unexpected_keys']}"
        assert not read["missing_keys"], f"the tensors {read['missing_keys']} are not handed out"
        _check_outputs(plugin, Plain(str(tmp_path), "tokens", False), found)
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        described = [dict(zip(bucket.names, bucket.shapes, strict=True)) for bucket in layout]
        assert all(shapes[name] == shape for each in described for name, shape in each.items()), (
            "layout and weights differ"
        )
        assert len([name for each in described for name in each]) == 3 * len(shapes), "a layout lacks tensors"

    def test_weights_leave_in_the_data_type_of_the_engines(self, plugin: TrainingBackendCase) -> None:
        """Cast, not rounded twice."""
        needs(plugin, "all_weights")
        plain = load_file(Path(plugin.path) / "model.safetensors")
        case = replace(plugin, context={**plugin.context, "engine_dtype": "bfloat16"})
        with closing(case.made(plugin.path)) as backend:
            for name, tensor in gathered(backend).items():
                assert tensor.dtype == torch.bfloat16, f"{name} leaves in {tensor.dtype}, engines wanted bfloat16"
                assert torch.equal(tensor, plain[name].bfloat16()), f"{name} is not the model's tensor"

    def test_a_snapshot_goes_on_bit_for_bit(self, plugin: TrainingBackendCase, tmp_path: Path) -> None:
        """Weights, moments and steps, as they were when it was taken; and as files of the hub."""
        needs(plugin, "all_weights")
        entropies = plugin.has("entropies")
        with closing(plugin.made(plugin.path)) as backend:
            take_steps(backend, [0, 1], has_entropies=entropies)
            found, write = outputs_of(backend, range(len(ROWS)), Wanted()), backend.snapshot()
            take_steps(backend, [2], has_entropies=entropies)
            names = write(str(tmp_path))
            expected = gathered(backend)
        there = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
        assert set(names) == there, f"it says that it wrote {sorted(names)}, and there are {sorted(there)}"
        _check_outputs(plugin, Plain(str(tmp_path), "tokens", False), found)
        # What a node gets that does not share the disk.
        alone = tmp_path / "alone"
        shutil.copytree(tmp_path / TRAINING_FOLDER, alone / TRAINING_FOLDER)
        with closing(plugin.made(plugin.path)) as backend:
            backend.restore(str(alone))
            assert backend.steps == 2, f"it had made 2 steps, and says {backend.steps}"
            take_steps(backend, [2], has_entropies=entropies)
            _bits(expected, gathered(backend), "after a restored step")

    @pytest.mark.parametrize("layers", [1, 3])
    def test_snapshots_of_other_models_are_refused(
        self, plugin: TrainingBackendCase, tmp_path: Path, layers: int
    ) -> None:
        """With fewer layers, which leave some of the model as they were; and with more, of which some would be lost."""
        needs(plugin, "all_weights")
        other = model_path(plugin.tie_word_embeddings, plugin.experts, layers)
        with closing(plugin.made(other)) as backend:
            take_steps(backend, [0], has_entropies=plugin.has("entropies"))
            backend.snapshot()(str(tmp_path))
        with (
            closing(plugin.made(plugin.path)) as backend,
            _refuses(f"a snapshot of a model of {layers} layers in one of 2"),
        ):
            backend.restore(str(tmp_path))

    def test_damaged_snapshots_are_refused(self, plugin: TrainingBackendCase, tmp_path: Path) -> None:
        """Each file of the training state, cut off or missing."""
        needs(plugin, "all_weights")
        with closing(plugin.made(plugin.path)) as backend:
            take_steps(backend, [0], has_entropies=plugin.has("entropies"))
            backend.snapshot()(str(tmp_path))
            for file in [each for each in (tmp_path / TRAINING_FOLDER).rglob("*") if each.is_file()]:
                content = file.read_bytes()
                file.write_bytes(content[: len(content) // 2])
                with _refuses(f"{file.name} cut off"):
                    backend.restore(str(tmp_path))
                file.unlink()
                with _refuses(f"without {file.name}"):
                    backend.restore(str(tmp_path))
                file.write_bytes(content)
            backend.restore(str(tmp_path))

    def test_ranks_are_one_process(self, plugin: TrainingBackendCase, tmp_path: Path) -> None:
        """Outputs, norms before clipping, and weights after three steps, on each number of ranks."""
        needs(plugin, "ranks", "all_weights")
        for size in plugin.ranks:
            results = on_ranks(size, _train, plugin, plugin.path, [0, 1, 2], None, None, 0.05)
            self._check_steps(plugin, results[0].norms, results[0].weights, max_norm=0.05)
            for rank, other in enumerate(results[1:], 1):
                assert other.norms == pytest.approx(results[0].norms), f"rank {rank} clips by another norm than rank 0"

    def test_a_snapshot_moves_to_another_number_of_ranks(self, plugin: TrainingBackendCase, tmp_path: Path) -> None:
        """From several to one and back."""
        needs(plugin, "ranks", "all_weights")
        size = plugin.ranks[0]
        on_ranks(size, _train, plugin, plugin.path, [0], None, str(tmp_path / "several"), 1e9)
        on_ranks(1, _train, plugin, plugin.path, [1], str(tmp_path / "several"), str(tmp_path / "one"), 1e9)
        last = on_ranks(size, _train, plugin, plugin.path, [2], str(tmp_path / "one"), None, 1e9)[0]
        assert last.steps == 3, f"three steps were made, and it says {last.steps}"
        self._check_steps(plugin, last.norms, last.weights, first=2)

    def _check_steps(
        self, plugin: TrainingBackendCase, norms: list[float], weights: dict[str, Tensor],
        max_norm: float = 1e9, first: int = 0,
    ) -> None:  # fmt: skip
        plain = Plain(plugin.path, "tokens", plugin.has("entropies"))
        expected = [plain.step(step, max_norm) for step in range(3)]
        assert norms == pytest.approx(expected[first:], rel=1e-3), (
            f"the norms of the gradients are {norms}, those of plain PyTorch {expected[first:]}: gradients are sums "
            "over micro-batches and ranks"
        )
        own, tiny = plain.in_files(dict(plain.named_parameters())), plain.in_files(plain.tiny)
        for name, tensor in weights.items():
            _same(plugin, tensor, own[name].detach(), ~tiny[name], f"{name} after three steps", 10)


@contextmanager
def _refuses(what: str) -> Iterator[None]:
    """What is restored in the block must be refused with a CheckpointError."""
    try:
        yield
    except CheckpointError:
        return
    except Exception as error:
        raise AssertionError(f"{what}: restore raised {type(error).__name__} instead of CheckpointError") from error
    raise AssertionError(f"{what}: restore raised no CheckpointError")


def _train(
    rank: int, size: int, plugin: TrainingBackendCase, path: str, steps: list[int], restore: str | None,
    save: str | None, max_norm: float,
) -> Trained:  # fmt: skip
    """On one rank."""
    with closing(plugin.made(path, rank=rank, size=size)) as backend:
        if restore is not None:
            backend.restore(restore)
        norms = take_steps(backend, steps, max_norm=max_norm, has_entropies=plugin.has("entropies"))
        if save is not None:
            Path(save).mkdir(exist_ok=True)
            backend.snapshot()(save)
        return Trained(norms, gathered(backend), [], backend.steps)


def _failing(rank: int, size: int, plugin: TrainingBackendCase, path: str) -> None:
    """The loss of the first part of the rows raises."""
    micros = [micro_batch([0, 1])]
    with closing(plugin.made(path, rank=rank, size=size)) as backend, backend.on_device():

        def loss(number: int, outputs: Outputs) -> Tensor:
            if backend.share.index == 0:
                raise ArithmeticError("on purpose")
            return loss_of(0, micros, False)(number, outputs)

        backend.forward_backward(micros, Wanted(), loss)


def _sampled(row: int) -> Tensor:
    mask_br: Tensor = micro_batch([row])["response_mask"]
    return mask_br[:, : len(ROWS[row][1])]


def _same(
    plugin: TrainingBackendCase,
    found: Tensor | None,
    expected: Tensor | None,
    where: Tensor,
    what: str,
    more: float = 1,
) -> None:
    assert found is not None and expected is not None, f"{what}: there are none"
    gap = float((found.float() - expected.float())[where].abs().max())
    assert gap <= plugin.tolerance * more, f"{what} differ from those of plain PyTorch by {gap:.2g}"


def _check_outputs(plugin: TrainingBackendCase, plain: Plain, found: dict[int, Outputs]) -> None:
    with torch.no_grad():
        for row, outputs in found.items():
            _same(plugin, outputs.log_probs, plain.row(row).log_probs, _sampled(row), f"log_probs of {row}")


def _bits(expected: dict[str, Tensor], found: dict[str, Tensor], when: str) -> None:
    changed = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    assert not changed, f"{when} {changed} are not what they would be otherwise, bit for bit"
