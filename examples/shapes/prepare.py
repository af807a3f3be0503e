# ruff: noqa: T201 - part of scripts that people run by hand: their output is their progress
"""Makes the shapes example: drawings, and a tiny vision-language model that seldom looks at them closely.

A drawing has five shapes in one of its quarters, one to four of them triangles. The prompt shows it at a sixth of its
size; the tool `crop` shows a quarter as it was drawn. The warm start has three phases: the vision tower learns what is
where, the model learns to crop the right quarter and to count, and then to do so about one time in twenty.

Usage: python examples/shapes/prepare.py [--output DIR] [--seed N] [--force]
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2VLImageProcessorPil
from transformers import Qwen2_5_VLForConditionalGeneration as Qwen

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
import warm_start  # noqa: E402 - beside the examples, which are no package
from drawings import CELL, CELLS, KINDS, Drawing, drawings, overview  # noqa: E402
from shapes import QUARTERS, Crop, quarter_of  # noqa: E402
from warm_start import MESSAGE_END, Message, calls, tool_call, write_rows  # noqa: E402

RECIPE_VERSION = 1
TRAIN_PROMPTS, VALIDATION_PROMPTS = 1024, 200
QUESTION = "How many triangles are there?"
START, END, PAD, VIDEO_PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"


# --- conversations --------------------------------------------------------------------------------------------------


def crop(quarter: str) -> list[Message]:
    """A call and its answer, with the tokens of the image in it."""
    return [tool_call("crop", quarter=quarter), {"role": "tool", "content": START + CELLS**2 * PAD + END}]


class Shapes(warm_start.Task[Drawing]):
    tools = [Crop.schema]

    def problems(self, rng: random.Random, *, held_out: bool) -> Iterator[Drawing]:
        # Of so many drawings that none is drawn twice.
        return drawings(rng)

    def prompt(self, problem: Drawing) -> list[Message]:
        return [{"role": "user", "content": START + PAD + END + QUESTION}]

    def good(self, problem: Drawing) -> list[Message]:
        answer = {"role": "assistant", "content": f"#### {problem.triangles}"}
        return [*self.prompt(problem), *crop(problem.quarter), answer]

    def unreliable(self, problem: Drawing, rng: random.Random, good_share: float = 0.05) -> list[Message]:
        """A good conversation or a guess; one guess in three comes after a look at an empty quarter."""
        if rng.random() < good_share:
            return self.good(problem)
        empty = [quarter for quarter in QUARTERS if quarter != problem.quarter]
        looked = crop(rng.choice(empty)) if rng.random() < 1 / 3 else []
        return [*self.prompt(problem), *looked, {"role": "assistant", "content": f"#### {rng.randint(1, 4)}"}]

    def answers(self, problem: Drawing, said: str) -> list[Message]:
        quarters = [call[1].get("quarter") for call in calls(said) if call is not None]
        return [crop(quarter)[1] for quarter in quarters if quarter in QUARTERS]

    def correct(self, problem: Drawing, said: str) -> bool:
        return said == f"#### {problem.triangles}"


TASK = Shapes()


def images_of(problem: Drawing, text: str) -> list[Image.Image]:
    """The images of a conversation: the overview, and what its calls show."""
    image = problem.image()
    quarters = [call[1].get("quarter") for call in calls(text) if call is not None]
    return [overview(image), *(quarter_of(image, quarter) for quarter in quarters if quarter in QUARTERS)]


# --- model ----------------------------------------------------------------------------------------------------------


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen:
    """A Qwen2.5-VL of 0.6 M parameters with random weights (reads torch's global generator)."""
    start, end, image, video = tokenizer.convert_tokens_to_ids([START, END, PAD, VIDEO_PAD])
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3,
        "num_attention_heads": 3, "num_key_value_heads": 3, "max_position_embeddings": 1024, "initializer_range": 0.05,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 96,
        "fullatt_block_indexes": [0, 1], "window_size": CELLS * CELL, "initializer_range": 0.05,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config={**text, **ends}, vision_config=vision, tie_word_embeddings=True, vision_start_token_id=start,
        vision_end_token_id=end, image_token_id=image, video_token_id=video,
    )  # fmt: skip
    model = Qwen(config)
    model.generation_config = GenerationConfig(**ends)
    return model


class Student:
    """A model in its warm start, with its tokenizer and its processor of images."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.tokenizer = warm_start.build_tokenizer(TASK)
        self.tokenizer.add_special_tokens({"additional_special_tokens": [START, END, PAD, VIDEO_PAD]})
        self.processor = Qwen2VLImageProcessorPil(size={"shortest_edge": CELL**2, "longest_edge": 64 * CELL**2})
        self.model = build_model(self.tokenizer)
        self.rng = random.Random(f"warm start/{seed}")
        self.stream = drawings(self.rng)

    def hidden(self, rows: Sequence[list[int]], images: Sequence[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids, padded on the right, and the last hidden states; causal, so padding needs no mask."""
        length = max(map(len, rows))
        ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
        kinds = (ids == self.model.config.image_token_id).int()
        pixels = self.processor(list(images), return_tensors="pt")
        output = self.model.model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **pixels)
        return ids, output.last_hidden_state

    def learn_to_see(self, steps: int = 150, rate: float = 2e-3) -> None:
        """Phase 1: the vision tower alone. A linear layer, which is then thrown away, must tell what a token shows: a
        crop's the shape in its cell, or none, and an overview's the quarter of the shapes."""
        names = (None, *KINDS, *QUARTERS)
        both = torch.nn.ModuleList([tower := self.model.model.visual, layer := torch.nn.Linear(96, len(names))])
        optimizer = warm_start.optimizer_for(both, rate)
        for step in range(1, steps + 1):
            optimizer.param_groups[0]["lr"] = rate * min(step / 30, 1 - 0.95 * step / steps)
            batch = [(problem, problem.image()) for problem in itertools.islice(self.stream, 32)]
            seen = [quarter_of(image, problem.quarter) for problem, image in batch]
            kinds = [kind for problem, _ in batch for kind in problem.cells]
            labels = torch.tensor([names.index(name) for name in [*kinds, *(problem.quarter for problem, _ in batch)]])
            pixels = self.processor([*seen, *(overview(image) for _, image in batch)], return_tensors="pt")
            told = layer(tower(pixels["pixel_values"], pixels["image_grid_thw"]).pooler_output)
            warm_start.train_step(both, optimizer, F.cross_entropy(told, labels))
        print(f"  vision tower: {(told.argmax(-1) == labels).float().mean():.3f} of the last batch right", flush=True)

    def learn(self, shown: Callable[[Drawing], list[Message]], steps: int, rate: float, kept: int = 0) -> None:
        """Phases 2 and 3: imitate conversations. `kept` of a batch are good ones that do not teach how to begin."""
        optimizer = warm_start.optimizer_for(self.model, rate)
        for step in range(1, steps + 1):
            optimizer.param_groups[0]["lr"] = rate * min(step / 20, 1 - 0.95 * step / steps)
            batch = list(itertools.islice(self.stream, 32))
            talks = [shown(problem) if i >= kept else TASK.good(problem) for i, problem in enumerate(batch)]
            rows = warm_start.encode_demonstrations(self.tokenizer, talks, TASK.tools)
            rows = warm_start.without_choice(rows[:kept]) + rows[kept:]
            texts = [warm_start.render(self.tokenizer, talk) for talk in talks]
            images = [image for pair in zip(batch, texts, strict=True) for image in images_of(*pair)]
            ids, hidden = self.hidden([row for row, _ in rows], images)
            mask = torch.tensor([bits + [0] * (ids.shape[1] - len(bits)) for _, bits in rows]).bool()[:, 1:]
            loss = F.cross_entropy(self.model.lm_head(hidden[:, :-1][mask]), ids[:, 1:][mask])
            warm_start.train_step(self.model, optimizer, loss)

    @torch.no_grad()
    def said(self, rows: Sequence[list[int]], images: Sequence[list[Image.Image]]) -> list[list[int]]:
        """A turn for each row, sampled at temperature 1 (torch's global generator), of at most eight tokens."""
        turns: list[list[int]] = [[] for _ in rows]
        for _ in range(8):
            if not (live := [i for i, turn in enumerate(turns) if self.tokenizer.eos_token_id not in turn]):
                break
            _, hidden = self.hidden([rows[i] + turns[i] for i in live], [image for i in live for image in images[i]])
            last = torch.tensor([len(rows[i] + turns[i]) - 1 for i in live])
            logits = self.model.lm_head(hidden[torch.arange(len(live)), last])
            for i, token in zip(live, torch.distributions.Categorical(logits=logits).sample().tolist(), strict=True):
                turns[i].append(token)
        return turns

    def accuracy(self, problems: Sequence[Drawing]) -> float:
        """Share of right answers, of one sampled conversation per drawing."""
        right, talks = 0, [(problem, TASK.prompt(problem)) for problem in problems]
        while talks:
            texts = [warm_start.render(self.tokenizer, talk, TASK.tools, generation_prompt=True) for _, talk in talks]
            images = [images_of(problem, text) for (problem, _), text in zip(talks, texts, strict=True)]
            turns = self.said([warm_start.encode(self.tokenizer, text) for text in texts], images)
            going_on = []
            for (problem, talk), turn in zip(talks, self.tokenizer.batch_decode(turns), strict=True):
                said = turn.removesuffix(MESSAGE_END)
                right += TASK.correct(problem, said)
                if len(talk) == 1 and (answers := TASK.answers(problem, said)):
                    going_on.append((problem, [*talk, {"role": "assistant", "content": said}, *answers]))
            talks = going_on
        return right / len(problems)

    def save(self, directory: Path) -> None:
        """Writes tokenizer, processor and model in the layout of `from_pretrained`."""
        warm_start.save(directory, self.model, self.tokenizer)
        self.processor.save_pretrained(directory)
        file = directory / "preprocessor_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "processor_class": "Qwen2_5_VLProcessor"}))


# --- files ----------------------------------------------------------------------------------------------------------


def make_model(directory: Path, seed: int) -> None:
    """The three phases of the warm start."""
    student = Student(seed)
    unseen = list(itertools.islice(drawings(random.Random(f"check/{seed}")), 400))
    student.learn_to_see()
    student.learn(TASK.good, steps=200, rate=2e-3)
    print(f"  good conversations: sampled accuracy {student.accuracy(unseen):.3f}", flush=True)
    student.learn(lambda problem: TASK.unreliable(problem, student.rng), steps=80, rate=5e-4, kept=12)
    print(f"  mostly guesses: sampled accuracy {student.accuracy(unseen):.3f}", flush=True)
    student.save(directory)


def make_data(directory: Path, seed: int) -> None:
    """Writes the drawings and the rows; in `shuffled-*.jsonl` each row has the drawing of the next one."""
    (directory / "images").mkdir()
    for split, count in (("train", TRAIN_PROMPTS), ("validation", VALIDATION_PROMPTS)):
        chosen = list(itertools.islice(drawings(random.Random(f"{split}/{seed}")), count))
        for index, problem in enumerate(chosen):
            image = problem.image()
            image.save(directory / f"images/{split}-{index}.png")
            overview(image).save(directory / f"images/{split}-{index}-overview.png")
        for prefix, further in (("", 0), ("shuffled-", 1)):
            shown = [f"images/{split}-{(index + further) % count}" for index in range(count)]
            rows = [data_row(index, *pair) for index, pair in enumerate(zip(chosen, shown, strict=True))]
            write_rows(directory, f"{prefix}{split}", rows)


def data_row(index: int, problem: Drawing, shown: str) -> dict[str, Any]:
    return {
        "data_source": "shapes",
        "prompt": [{"role": "user", "content": f"<image>{QUESTION}"}],
        "images": [f"{shown}-overview.png"],
        "reward_model": {"ground_truth": str(problem.triangles)},
        "extra_info": {"index": index, "tools_kwargs": {"crop": {"create_kwargs": {"drawing": f"{shown}.png"}}}},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    warm_start.command_line(__file__, arguments, RECIPE_VERSION, data=make_data, model=make_model)


if __name__ == "__main__":
    main()
