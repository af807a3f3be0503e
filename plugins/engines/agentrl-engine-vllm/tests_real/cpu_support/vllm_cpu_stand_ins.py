"""Makes torchvision, which vLLM's models with images import, work with a torch that is built for CPUs.

A ``.pth`` file of the environment imports this when its interpreter starts, so it must cost nothing: what it stands in
for is put in place when torchvision is imported.
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


class StandIns(MetaPathFinder):
    """Finds no module, but sees which one is imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        if fullname == "torchvision._meta_registrations" and not _libraries:
            _define_schemas()


def _define_schemas() -> None:
    """Just before torchvision registers its fake kernels for them, where its own operators could not be loaded."""
    import torch
    import torchvision.extension

    if not torchvision.extension._has_ops():
        _libraries.append(torch.library.Library("torchvision", "DEF"))
        for schema in SCHEMAS:
            _libraries[0].define(schema)


sys.meta_path.insert(0, StandIns())
