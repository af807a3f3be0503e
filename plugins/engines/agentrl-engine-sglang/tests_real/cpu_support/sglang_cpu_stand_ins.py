"""Makes PyPI's torchvision, a CUDA build, importable with a torch that is not one.

A ``.pth`` file of the environment imports this when its interpreter starts, so it must cost nothing: the schemas are
defined when torchvision is imported, and only if its own operators could not be loaded.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[Any] = []


class TorchvisionSchemas(MetaPathFinder):
    """Defines the schemas just before torchvision registers its fake kernels for them."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        if fullname == "torchvision._meta_registrations" and not _libraries:
            import torch
            import torchvision.extension

            if not torchvision.extension._has_ops():
                _libraries.append(torch.library.Library("torchvision", "DEF"))
                for schema in SCHEMAS:
                    _libraries[0].define(schema)


sys.meta_path.insert(0, TorchvisionSchemas())
