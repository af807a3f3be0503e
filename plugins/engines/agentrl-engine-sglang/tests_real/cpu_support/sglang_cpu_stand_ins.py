"""Makes SGLang run with a torch that is built for CPUs: torchvision, models with images and adapters can be loaded,
and the experts of tokens kept.

A ``.pth`` file of the environment imports this when its interpreter starts, so it must cost nothing: what it stands in
for is put in place when the module that needs it is imported.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
NEVER_CALLED = (
    "fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu", "fused_gdn_gating_cpu",
)  # fmt: skip
"""Operators of a model beside those that are tested, which the processors of their images import."""
FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")
_libraries: list[Any] = []


class StandIns(MetaPathFinder):
    """Finds no module, but sees which one is imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        if fullname == "torchvision._meta_registrations":
            _define_schemas()
        if fullname == "sglang.srt.models.qwen3_5":
            _define_operators()
        if fullname == "sglang.srt.lora.layers":
            _forget_pinned_memory()
        if fullname == "sglang.srt.state_capturer.base":
            _register_nothing()


def _define_schemas() -> None:
    """Just before torchvision registers its fake kernels for them, where its own operators could not be loaded."""
    import torch
    import torchvision.extension

    if not torchvision.extension._has_ops():
        library = torch.library.Library("torchvision", "DEF")
        _libraries.append(library)
        for schema in SCHEMAS:
            library.define(schema)


def _define_operators() -> None:
    import torch

    missing = [name for name in NEVER_CALLED if not hasattr(torch.ops.sgl_kernel, name)]
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    _libraries.append(library)
    for name in missing:
        library.define(f"{name}(Tensor x) -> Tensor")


def _register_nothing() -> None:
    """SGLang registers the memory for the experts of tokens with CUDA."""
    from sglang.srt.mem_cache.pool_host import common

    def plain(dims: Any, dtype: Any, device: str, pin_memory: bool, allocator: Any) -> Any:
        return allocator.allocate(dims, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS["cpu"] = plain


def _forget_pinned_memory() -> None:
    """SGLang's adapters ask for pages that a GPU can read, which torch refuses where there is none."""
    import torch

    if torch.cuda.is_available():
        return
    for name in FACTORIES:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def unpinned(*arguments: Any, **named: Any) -> Any:
        named.pop("pin_memory", None)
        return make(*arguments, **named)

    return unpinned


sys.meta_path.insert(0, StandIns())
