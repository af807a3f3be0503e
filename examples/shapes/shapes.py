"""The tool `crop`, which answers with an image, and the reward."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from agentrl_core.api import RewardTrajectory, Tool, ToolError, ToolResponse, ToolResult, function_schema, option

QUARTERS = ("top left", "top right", "bottom left", "bottom right")


def quarter_of(drawing: Image.Image, quarter: str) -> Image.Image:
    """A quarter of a drawing.

    Raises:
        ToolError: there is no such quarter.
    """
    if quarter not in QUARTERS:
        raise ToolError(f"quarter is {quarter!r}; allowed are {', '.join(QUARTERS)}")
    row, column = divmod(QUARTERS.index(quarter), 2)
    width, height = drawing.width // 2, drawing.height // 2
    return drawing.crop((column * width, row * height, (column + 1) * width, (row + 1) * height))


@dataclass
class CropConfig:
    folder: str = option(path=True, help="folder of the drawings, to which the rows' paths are relative")


class Crop(Tool):
    """Shows a quarter of the row's drawing as it was drawn; the prompt shows all of it, at a third of the size."""

    config_class = CropConfig
    schema = function_schema(
        "crop", "Enlarges a quarter of the drawing.", {"quarter": {"type": "string", "enum": list(QUARTERS)}}
    )

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        self._drawings: dict[str, Path] = {}

    async def create(self, instance_id: str, *, drawing: str) -> None:
        self._drawings[instance_id] = Path(self.config.folder) / drawing

    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> ToolResult:
        with Image.open(self._drawings[instance_id]) as drawing:
            return ToolResult(ToolResponse("", images=[quarter_of(drawing.convert("RGB"), parameters["quarter"])]))

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        self._drawings.pop(instance_id, None)


def counted(trajectory: RewardTrajectory) -> float:
    """1 if the last number of the last turn is the right one."""
    numbers = re.findall(r"\d+", trajectory.last_text)
    return float(numbers[-1:] == [str(trajectory.ground_truth)])
