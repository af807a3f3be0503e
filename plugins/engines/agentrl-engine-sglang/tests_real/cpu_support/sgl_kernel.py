"""Stands in for SGLang's kernels, whose wheels are for CUDA: the names that SGLang imports on a CPU.

SGLang falls back to torch where the real package's operators are missing, so nothing here is ever called.
"""

from typing import Any


def _missing(name: str) -> Any:
    def call(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} was called, but this environment has only its stand-in")

    call.__name__ = name
    return call


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)
