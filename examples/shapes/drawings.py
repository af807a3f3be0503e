"""Drawings of triangles, circles and squares, and what the prompt shows of them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image, ImageDraw
from shapes import QUARTERS

KINDS = ("triangle", "circle", "square")
SHAPES = 5
CELL = 28
"""Pixels of a cell, which has at most one shape. One token of the model shows one cell."""
CELLS = 3
"""In a row and in a column of a quarter."""
SHRINK = 6
"""How much smaller the prompt shows a drawing: as one token."""


@dataclass(frozen=True)
class Shape:
    """A shape of a quarter: its kind, its cell, its centre in the quarter, and its radius, in pixels."""

    kind: str
    cell: int
    x: int
    y: int
    radius: int
    colour: tuple[int, int, int]


@dataclass(frozen=True)
class Drawing:
    """Shapes in one of four quarters."""

    quarter: str
    shapes: tuple[Shape, ...]

    @property
    def triangles(self) -> int:
        return sum(shape.kind == "triangle" for shape in self.shapes)

    @property
    def cells(self) -> list[str | None]:
        """The kind of the shape in each cell of the quarter; None where there is none."""
        kinds = {shape.cell: shape.kind for shape in self.shapes}
        return [kinds.get(cell) for cell in range(CELLS**2)]

    def image(self) -> Image.Image:
        """The whole drawing, 168 x 168 pixels."""
        image = Image.new("RGB", (2 * CELLS * CELL, 2 * CELLS * CELL), "white")
        draw = ImageDraw.Draw(image)
        row, column = divmod(QUARTERS.index(self.quarter), 2)
        for shape in self.shapes:
            x, y, radius = shape.x + column * CELLS * CELL, shape.y + row * CELLS * CELL, shape.radius
            left, top, right, bottom = box = (x - radius, y - radius, x + radius, y + radius)
            if shape.kind == "triangle":
                draw.polygon([(x, top), (right, bottom), (left, bottom)], fill=shape.colour)
            elif shape.kind == "circle":
                draw.ellipse(box, fill=shape.colour)
            else:
                draw.rectangle(box, fill=shape.colour)
        return image


def overview(image: Image.Image) -> Image.Image:
    """What the prompt shows: where the shapes are, but not which."""
    return image.resize((image.width // SHRINK, image.height // SHRINK), Image.Resampling.BOX)


def drawings(rng: random.Random) -> Iterator[Drawing]:
    """An endless stream of drawings; each number of triangles is equally frequent."""
    while True:
        triangles = rng.randint(1, 4)
        kinds = ["triangle"] * triangles + rng.choices(KINDS[1:], k=SHAPES - triangles)
        shapes = []
        for kind, cell in zip(kinds, rng.sample(range(CELLS**2), SHAPES), strict=True):
            radius = rng.randint(7, 10)
            room = CELL // 2 - radius - 1
            x, y = (CELL * place + CELL // 2 + rng.randint(-room, room) for place in (cell % CELLS, cell // CELLS))
            colour = (rng.randrange(160), rng.randrange(160), rng.randrange(160))
            shapes.append(Shape(kind, cell, x, y, radius, colour))
        yield Drawing(rng.choice(QUARTERS), tuple(shapes))
