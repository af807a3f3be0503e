"""Makes Megatron-Core run with a torch that is built for CPUs: what it asks of CUDA, torch does on the host.

A ``.pth`` file of the environment imports this when its interpreter starts, so it must cost nothing: what it stands in
for is put in place when Megatron-Core is imported.
"""

import builtins
import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.abc import MetaPathFinder
from typing import Any

FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")


class StandIns(MetaPathFinder):
    """Finds no module, but sees when Megatron-Core is imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        if fullname == "megatron.core":
            _stand_in()
        elif fullname == "megatron.core.models.backends" and not _has_cuda():
            # The first module that names a class of attention.
            import megatron_cpu_attention  # noqa: F401


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _stand_in() -> None:
    import torch
    import torch.distributed as dist
    from torch.utils._device import _device_constructors

    if _has_cuda():
        return
    cuda: Any = torch.cuda
    host = torch.device("cpu")
    cuda.current_device = lambda: host
    cuda.synchronize = lambda *_: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.manual_seed = torch.manual_seed
    cuda.default_generators = _Generators()
    cuda._lazy_call = lambda call, **_: call()
    cuda._lazy_init = lambda: None
    cuda.Stream = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_: _STREAM
    cuda.stream = lambda *_: nullcontext()
    # ``with torch.device(...)`` knows factories by identity, from its first use on.
    _device_constructors()
    for name in FACTORIES:
        setattr(torch, name, _on_host(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.Tensor.type = _cuda_type(torch.Tensor.type)  # type: ignore[method-assign]
    # Without Transformer Engine one module reads a name that it never defines.
    builtins.te_general_gemm = None  # type: ignore[attr-defined]
    # gloo takes split sizes as lists alone.
    dist.all_to_all_single = _with_lists(dist.all_to_all_single)


class _Generators:
    def __getitem__(self, _: object) -> Any:
        import torch

        return torch.default_generator


class _Stream:
    """A stream in which everything has happened."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_: object) -> "_Stream":
        return self


_STREAM = _Stream()


def _on_host(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*arguments: Any, **named: Any) -> Any:
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        named.pop("pin_memory", None)
        return make(*arguments, **named)

    return made


def _cuda_type(own: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's optimizer tells data types by names that begin with torch.cuda."""

    @functools.wraps(own)
    def named(self: Any, *arguments: Any, **keywords: Any) -> Any:
        found = own(self, *arguments, **keywords)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return found.replace("torch.", "torch.cuda.") if caller.startswith("megatron.") and not arguments else found

    return named


def _with_lists(exchange: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(exchange)
    def exchanged(output: Any, tensor: Any, *arguments: Any, **named: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if hasattr(named.get(name), "tolist"):
                named[name] = named[name].tolist()
        return exchange(output, tensor, *arguments, **named)

    return exchanged


sys.meta_path.insert(0, StandIns())
