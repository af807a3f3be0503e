"""What code asks of CUDA, answered without a GPU, where tensors have no data."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from agentrl_core.api.errors import SimulationError
from agentrl_plan.mode import Simulation

aten = torch.ops.aten
FSDPParamGroup = _fsdp_param_group.FSDPParamGroup
_FSDP = (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state)
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
"""``c10::impl::device_guard_impl_registry``, a pointer for each type of device."""
_CUDA, _META = 1, 14
"""Numbers of these types of device in ``c10::DeviceType``."""
_LARGEST_HEAD = 256
"""Dimensions of a head that flash attention takes."""


class _Calls(TorchFunctionMode):
    """Chooses the kernel of ``scaled_dot_product_attention`` as torch does on CUDA with cuDNN's switched off.

    While autograd's engine runs, and no code in Python that it calls, it is told that tensors have no data: it would
    look for the streams of an accelerator.
    """

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation
        self._run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            found = _attention(*args, **kwargs)
            if found is not None:
                return found
        if not self._simulation.hides_device:
            return func(*args, **kwargs)
        with self._simulation.device_hidden(False):
            return func(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's, in which this is active: modules whose activations are recomputed run in it."""
        with self, self._simulation.device_hidden(any(each.device.type == "cuda" for each in args[0])):
            return self._run_backward(*args, **kwargs)

    def seen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function in Python that the engine calls."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._simulation.device_hidden(False):
                return function(*args, **kwargs)

        return run


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """None for torch's own code, which computes all scores."""
    if torch.is_autocast_enabled("cuda"):
        # Torch casts before it chooses a kernel.
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    half = query.dtype in (torch.float16, torch.bfloat16)
    head = query.shape[-1]
    if query.device.type != "cuda" or query.dim() != 4:
        return None
    if attn_mask is None and half and head <= _LARGEST_HEAD and head == value.shape[-1]:
        scale = head**-0.5 if scale is None else scale
        pad = -head % 8
        states = [torch.nn.functional.pad(each, (0, pad)) if pad else each for each in (query, key, value)]
        found = aten._scaled_dot_product_flash_attention(*states, dropout_p, is_causal, scale=scale)[0]
        result: Tensor = found[..., :head] if pad else found
        return result
    if enable_gqa or key.shape[1] != query.shape[1]:
        return None
    bias = None
    if attn_mask is not None:
        bias = attn_mask
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
        if bias.shape[-1] % 8:
            bias = torch.nn.functional.pad(bias, (0, -bias.shape[-1] % 8))[..., : bias.shape[-1]]
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    needs_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    attended: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale
    )[0]
    return attended


class _Idle:
    """A stream on which nothing is pending."""

    def synchronize(self) -> None:
        pass


class _Stream(torch.cpu.Stream):
    def record_event(self, event: Any = None) -> torch.cpu.Event:  # type: ignore[override]
        """Of what has happened already."""
        return torch.cpu.Event()


class _Device:
    """Streams and events of a device on which everything happens in order; in place of ``torch.cuda`` in FSDP2."""

    Stream, Event = _Stream, torch.cpu.Event
    stream, synchronize = torch.cpu.stream, torch.cpu.synchronize

    @staticmethod
    def current_stream(device: Any = None) -> _Stream:
        return _Stream()

    @staticmethod
    def current_device() -> int:
        return 0


def _forbidden() -> None:
    raise RuntimeError("a simulation must not touch a GPU")


@contextmanager
def _device_guard() -> Iterator[None]:
    """Torch asks for the streams and the present device of CUDA, which a build for CPUs does not have, and which would
    start CUDA where there is a GPU. Inside, the device of tensors without data answers."""
    library = next((Path(torch.__file__).parent / "lib").glob("*c10.*"), None)
    if library is None:
        raise SimulationError("this build of torch has no libc10, without which a GPU cannot be simulated")
    slots = (ctypes.c_void_p * (_META + 1)).in_dll(ctypes.CDLL(str(library)), _GUARDS)
    before, slots[_CUDA] = slots[_CUDA], slots[_META]
    try:
        yield
    finally:
        slots[_CUDA] = before


@contextmanager
def _shards_nowhere(simulation: Simulation) -> Iterator[None]:
    """Autograd's engine looks for the streams of shards on a GPU, too: to torch's code in C++ they are nowhere. Code in
    Python sees the device of this rank's part."""
    new: Any = DTensor.__new__

    def made(*args: Any, **kwargs: Any) -> Any:
        with simulation.device_hidden():
            return new(*args, **kwargs)

    with (
        patch.object(DTensor, "__new__", staticmethod(made)),
        patch.object(DTensor, "device", property(lambda shards: shards._local_tensor.device), create=True),
        patch.object(torch._C, "_group_tensors_by_device_and_dtype", _grouped_by_kind),
    ):
        yield


def _grouped_by_kind(lists: list[list[Tensor]], with_indices: bool = False) -> dict[Any, Any]:
    """Parameters, gradients and states of an optimizer as torch groups them, by device and dtype of a parameter."""
    groups: dict[Any, Any] = {}
    for place, parameter in enumerate(lists[0]):
        parts, places = groups.setdefault((parameter.device, parameter.dtype), ([[] for _ in lists], []))
        for part, each in zip(parts, lists, strict=True):
            part += each[place : place + 1]
        places.append(place)
    return groups


@contextmanager
def imitated_cuda(simulation: Simulation) -> Iterator[None]:
    """Inside, tensors without data can be on ``cuda``, and no context of CUDA is made."""
    answers: dict[str, Any] = {
        "torch.cuda._lazy_init": _forbidden,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.current_stream": lambda device=None: _Idle(),
        "torch.cuda.set_device": lambda device: None,
        "torch.cuda.empty_cache": lambda: None,
        "torch.cuda.max_memory_allocated": lambda device=None: 0,
        "torch.cuda.get_device_name": lambda device=None: "simulated",
        "torch.cuda.get_device_capability": lambda device=None: (9, 0),
        "torch.cuda.is_bf16_supported": lambda including_emulation=True: True,
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
    }
    with ExitStack() as stack:
        stack.enter_context(_device_guard())
        # Otherwise autograd would want a thread for each device.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        for name, answer in answers.items():
            stack.enter_context(patch(name, answer))
        for module in _FSDP:
            stack.enter_context(patch.object(module, "_get_device_handle", lambda device_type="cuda": _Device))
        calls = stack.enter_context(_Calls(simulation))
        stack.enter_context(_shards_nowhere(simulation))
        stack.enter_context(patch("torch.autograd._engine_run_backward", calls.backward))
        for name in ("pre_backward", "post_backward", "finalize_backward"):
            stack.enter_context(patch.object(FSDPParamGroup, name, calls.seen(getattr(FSDPParamGroup, name))))
        yield
