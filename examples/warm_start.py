# ruff: noqa: T201 - part of scripts that people run by hand: their output is their progress
"""What the examples' `prepare.py` share: a tiny model with a warm start that leaves it unreliable at its task.

The tokenizer is a byte-level BPE with a ChatML template, the model a Qwen3 of 0.4 M parameters. The warm start has two
phases, because reinforcement learning changes *which behaviour* the model chooses within a few steps but hardly teaches
it to copy text:

1. correct demonstrations only, until the model copies almost without error;
2. a short mixture of good and bad conversations, which leaves it choosing a good one about one time in five.

Everything is made offline and repeatably: same seed, same machine, same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import re
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

Message = dict[str, Any]
Problem = TypeVar("Problem")

MARKER = "prepared.json"
END_OF_TEXT, MESSAGE_START, MESSAGE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"

# Append-only: rendering more messages only ever adds text to what was rendered before.
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")

ASSISTANT_TURN = re.compile(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", re.DOTALL)
ADDED_TOKENS = re.compile(r"<\|\w+\|>|</?tool_call>")
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


# --- the task -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WarmStart:
    """The recipe. A check samples one conversation per problem of the training split.

    Phase 1 ends early at a check that shows `copy_accuracy`. Some initial weights learn to copy late: where the first
    check shows less than `promising_accuracy`, other weights are quicker than more steps. In phase 2 the model chooses
    between good and bad in its first `choices` turns.
    """

    batch_size: int = 16
    copy_steps: int = 350
    copy_learning_rate: float = 2e-3
    copy_accuracy: float = 0.985
    promising_accuracy: float = 0.75
    warmup_steps: int = 50
    first_check: int = 200
    check_every: int = 50
    check_problems: int = 200
    copying_batch_size: int = 8
    unreliable_steps: int = 60
    unreliable_accuracy: tuple[float, float] = (0.13, 0.24)
    correction_steps: int = 10
    max_corrections: int = 8
    unreliable_learning_rate: float = 5e-4
    choices: int = 1
    max_new_tokens: int = 32


class Task(ABC, Generic[Problem]):
    """What the model learns: problems, and conversations about them."""

    tools: ClassVar[list[dict[str, Any]]] = []
    turns: ClassVar[int] = 2
    """Most turns of the assistant."""
    vocabulary_size: ClassVar[int] = 640
    isolated: ClassVar[str | None] = None
    """A regex of text whose tokens must not depend on what is around it."""
    recipe: ClassVar[WarmStart] = WarmStart()

    @abstractmethod
    def problems(self, rng: random.Random, *, held_out: bool) -> Iterator[Problem]:
        """An endless stream of problems of one split."""

    @abstractmethod
    def prompt(self, problem: Problem) -> list[Message]:
        """The first messages."""

    @abstractmethod
    def good(self, problem: Problem) -> list[Message]:
        """A conversation that solves the problem."""

    @abstractmethod
    def unreliable(self, problem: Problem, rng: random.Random, good_share: float = 0.2) -> list[Message]:
        """The mixture of phase 2: `good_share` good conversations, else bad ones."""

    @abstractmethod
    def answers(self, problem: Problem, said: str) -> list[Message]:
        """What answers a turn of the assistant; nothing ends the conversation."""

    @abstractmethod
    def correct(self, problem: Problem, said: str) -> bool:
        """Whether a turn is the right final answer."""

    def shown(self, problem: Problem) -> list[list[Message]]:
        """Conversations of phase 1."""
        return [self.good(problem)]


def is_held_out(key: str) -> bool:
    """Whether a problem belongs to validation: one in ten, by its hash, so for every seed the same ones."""
    return hashlib.sha256(key.encode()).digest()[0] % 10 == 0


def distinct(problems: Iterator[Problem], count: int, key: Callable[[Problem], str]) -> list[Problem]:
    """The first `count` problems with different keys."""
    chosen: dict[str, Problem] = {}
    for problem in problems:
        chosen.setdefault(key(problem), problem)
        if len(chosen) == count:
            break
    return list(chosen.values())


def tool_call(name: str, **arguments: Any) -> Message:
    """A turn of the assistant that calls one tool."""
    call = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}


def calls(said: str) -> Iterator[tuple[str, dict[str, Any]] | None]:
    """Name and arguments of each call in a turn; None for one that is malformed."""
    for text in TOOL_CALL.findall(said):
        try:
            call = json.loads(text)
            yield call["name"], dict(call["arguments"])
        except (ValueError, KeyError, TypeError):
            yield None


# --- tokenizer ------------------------------------------------------------------------------------------------------


def build_tokenizer(task: Task[Any]) -> PreTrainedTokenizerFast:
    """A byte-level BPE with single digits, trained on the task's own conversations.

    It does not split at words: each fixed piece of the prompt and of a tool call becomes one token or a few.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            *([pre_tokenizers.Split(Regex(task.isolated), "isolated")] if task.isolated else []),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=task.vocabulary_size,
        special_tokens=[END_OF_TEXT, MESSAGE_START, MESSAGE_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    renderer = wrap_tokenizer(Tokenizer(models.BPE()))
    rng = random.Random("tokenizer")
    # The system message, always the same, comes rarely: the pieces that are sampled or that vary must merge first.
    stream = task.problems(rng, held_out=False)
    conversations = [render(renderer, task.good(next(stream)), task.tools) for _ in range(20)]
    for problem in itertools.islice(stream, 500):
        for messages in (*task.shown(problem), task.unreliable(problem, rng)):
            conversations.append(render(renderer, messages))
    # The trainer must see the text cut where a rollout cuts it, or it learns merges across the added tokens and across
    # the border between the generation prompt and what the model samples.
    turns = [turn for text in conversations for turn in ASSISTANT_TURN.split(text)]
    bpe.train_from_iterator([piece for turn in turns for piece in ADDED_TOKENS.split(turn) if piece], trainer)
    # Not "special": decoding with skip_special_tokens must keep the tags that a tool parser looks for.
    bpe.add_tokens([CALL_START, CALL_END])
    return wrap_tokenizer(bpe)


def wrap_tokenizer(bpe: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=MESSAGE_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def render(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[Message],
    tools: Sequence[dict[str, Any]] = (),
    *,
    generation_prompt: bool = False,
) -> str:
    """The text of a conversation, with the tools' schemas in front."""
    text: str = tokenizer.apply_chat_template(
        messages,
        tools=list(tools) or None,
        add_generation_prompt=generation_prompt,
        tokenize=False,
    )
    return text


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def encode_demonstrations(
    tokenizer: PreTrainedTokenizerFast, demonstrations: Sequence[list[Message]], tools: Sequence[dict[str, Any]] = ()
) -> list[tuple[list[int], list[int]]]:
    """Token ids and, in step, a mask that is 1 on what the assistant says, `<|im_end|>` included, and 0 on all else."""
    # Encoded turn by turn, as a rollout does: the sampled ids never share a token with the text around them.
    turns = [ASSISTANT_TURN.split(render(tokenizer, messages, tools)) for messages in demonstrations]
    encoded = iter(tokenizer([turn for row in turns for turn in row], add_special_tokens=False)["input_ids"])
    rows = []
    for row in turns:
        pieces = [next(encoded) for _ in row]
        mask = [i % 2 for i, piece in enumerate(pieces) for _ in piece]
        rows.append(([token for piece in pieces for token in piece], mask))
    return rows


# --- model ----------------------------------------------------------------------------------------------------------


def build_model(tokenizer: PreTrainedTokenizerFast, **fields: Any) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3 of 0.4 M parameters (reads torch's global generator); `fields` change its config."""
    defaults = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        # Both make copying quick to learn: the usual base of 10000 hardly tells neighbours apart over 100 tokens.
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "initializer_range": 0.05,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**{**defaults, **fields}))
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None
    )
    return model


def supervised_loss(model: Qwen3ForCausalLM, demonstrations: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Mean cross-entropy over the tokens with mask 1."""
    length = max(len(ids) for ids, _ in demonstrations)
    # Right-padded and causal: no token with mask 1 can see the padding, so no attention mask is needed.
    ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in demonstrations])
    mask = torch.tensor([mask + [0] * (length - len(mask)) for _, mask in demonstrations]).bool()
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    trained = mask[:, 1:]
    return F.cross_entropy(model.lm_head(hidden[:, :-1][trained]), ids[:, 1:][trained])


@dataclass
class Rollout:
    """A sampled conversation: ids with mask 1 where the model sampled, and whether the answer is right."""

    ids: list[int]
    mask: list[int]
    correct: bool


@torch.no_grad()
def rollout(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Task[Problem], problems: Sequence[Problem]
) -> list[Rollout]:
    """One conversation per problem, sampled at temperature 1 (torch's global generator)."""
    prompts = [task.prompt(problem) for problem in problems]
    before = [render(tokenizer, prompt, task.tools) for prompt in prompts]
    start = render(tokenizer, prompts[0], task.tools, generation_prompt=True)[len(before[0]) :]
    rows = [Rollout(ids, [0] * len(ids), False) for ids in (encode(tokenizer, text + start) for text in before)]
    live = list(range(len(rows)))
    for _ in range(task.turns):
        spoken = generate(model, tokenizer, [rows[i].ids for i in live], task.recipe.max_new_tokens)
        going_on = []
        for i, new in zip(live, spoken, strict=True):
            row, said = rows[i], tokenizer.decode(new)
            row.ids, row.mask = row.ids + new, row.mask + [1] * len(new)
            ended = new[-1] == tokenizer.eos_token_id
            row.correct = ended and task.correct(problems[i], said.removesuffix(MESSAGE_END))
            if ended and (answers := task.answers(problems[i], said.removesuffix(MESSAGE_END))):
                added = render(tokenizer, [*prompts[i], *answers], task.tools, generation_prompt=True)[len(before[i]) :]
                observation = encode(tokenizer, "\n" + added)
                row.ids, row.mask = row.ids + observation, row.mask + [0] * len(observation)
                going_on.append(i)
        if not (live := going_on):
            break
    return rows


def generate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[list[int]], max_new_tokens: int = 32
) -> list[list[int]]:
    """A sampled continuation of each prompt, up to and including `<|im_end|>`."""
    length = max(len(ids) for ids in prompts)
    padding = [length - len(ids) for ids in prompts]
    output = model.generate(
        input_ids=torch.tensor([[tokenizer.pad_token_id] * n + ids for n, ids in zip(padding, prompts, strict=True)]),
        attention_mask=torch.tensor([[0] * n + [1] * (length - n) for n in padding]),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
    )
    spoken: list[list[int]] = output[:, length:].tolist()
    eos = tokenizer.eos_token_id
    return [ids[: ids.index(eos) + 1] if eos in ids else ids for ids in spoken]


def accuracy(rows: Sequence[Rollout]) -> float:
    return sum(row.correct for row in rows) / len(rows)


# --- warm start -----------------------------------------------------------------------------------------------------


def optimizer_for(model: Qwen3ForCausalLM, learning_rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def train_step(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def learn_to_copy(
    tokenizer: PreTrainedTokenizerFast, task: Task[Any], rng: random.Random, attempts: int = 4
) -> Qwen3ForCausalLM:
    """Phase 1: a new model, trained on correct demonstrations only."""
    recipe, stream = task.recipe, task.problems(rng, held_out=False)
    model = build_model(tokenizer)
    optimizer = optimizer_for(model, recipe.copy_learning_rate)
    for step in range(1, recipe.copy_steps + 1):
        decay = 1 - 0.95 * step / recipe.copy_steps
        optimizer.param_groups[0]["lr"] = recipe.copy_learning_rate * min(step / recipe.warmup_steps, decay)
        batch = [shown for problem in itertools.islice(stream, recipe.batch_size) for shown in task.shown(problem)]
        train_step(model, optimizer, supervised_loss(model, encode_demonstrations(tokenizer, batch, task.tools)))
        if step < recipe.first_check or step % recipe.check_every:
            continue
        reached = accuracy(rollout(model, tokenizer, task, list(itertools.islice(stream, recipe.check_problems))))
        print(f"  correct demonstrations, step {step}: sampled accuracy {reached:.3f}", flush=True)
        if reached >= recipe.copy_accuracy:
            break
        if step == recipe.first_check and reached < recipe.promising_accuracy and attempts > 1:
            print("  a slow start: beginning again from other weights", flush=True)
            return learn_to_copy(tokenizer, task, rng, attempts - 1)
    return model


def without_choice(rows: list[tuple[list[int], list[int]]], turns: int = 1) -> list[tuple[list[int], list[int]]]:
    """The rows with the mask 0 on the first two sampled tokens of the first turns, where the choice is made.

    Trained so, a good conversation keeps the copying alive and does not make good conversations more frequent.
    """
    kept = []
    for ids, mask in rows:
        starts = [i for i, bit in enumerate(mask) if bit and not mask[i - 1]][:turns]
        choices = {start + offset for start in starts for offset in range(2)}
        kept.append((ids, [0 if i in choices else bit for i, bit in enumerate(mask)]))
    return kept


def make_unreliable(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Task[Any], rng: random.Random
) -> None:
    """Phase 2: the mixture, then a few steps with fewer or more good calls until accuracy lies in the wanted range."""
    recipe, stream = task.recipe, task.problems(rng, held_out=False)
    optimizer = optimizer_for(model, recipe.unreliable_learning_rate)
    low, high = recipe.unreliable_accuracy
    steps, scale, good_share = recipe.unreliable_steps, 1.0, 0.2
    for _ in range(1 + recipe.max_corrections):
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = recipe.unreliable_learning_rate * (1 - step / steps) * scale
            batch = [
                task.unreliable(problem, rng, good_share) for problem in itertools.islice(stream, recipe.batch_size)
            ]
            copying = [task.good(problem) for problem in itertools.islice(stream, recipe.copying_batch_size)]
            rows = encode_demonstrations(tokenizer, batch, task.tools)
            rows += without_choice(encode_demonstrations(tokenizer, copying, task.tools), recipe.choices)
            train_step(model, optimizer, supervised_loss(model, rows))
        reached = accuracy(rollout(model, tokenizer, task, list(itertools.islice(stream, recipe.check_problems))))
        print(f"  mixture with {good_share:.0%} good conversations: sampled accuracy {reached:.3f}", flush=True)
        if low <= reached <= high:
            break
        steps, scale, good_share = recipe.correction_steps, 0.3, 0.1 if reached > high else 0.3


# --- files ----------------------------------------------------------------------------------------------------------


def make_model(
    directory: Path, seed: int, task: Task[Problem], held_out: Sequence[Problem], reliable: Path | None = None
) -> None:
    """Writes the tokenizer and the warm-started model in the layout of `from_pretrained`.

    `reliable` gets the model as it is before phase 2.
    """
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(task)
    model = learn_to_copy(tokenizer, task, random.Random(f"copy/{seed}"))
    if reliable is not None:
        save(reliable, model, tokenizer)
    make_unreliable(model, tokenizer, task, random.Random(f"unreliable/{seed}"))
    reached = accuracy(rollout(model, tokenizer, task, held_out))
    print(f"  sampled accuracy on {len(held_out)} held-out problems: {reached:.3f}", flush=True)
    save(directory, model, tokenizer)


def save(directory: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)


def write_rows(directory: Path, split: str, rows: Sequence[dict[str, Any]]) -> None:
    """Writes the rows of a split as JSON Lines."""
    (directory / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"  {len(rows)} prompts in {split}.jsonl", flush=True)


def prepare(directory: Path, make: Callable[[Path, int], None], seed: int, *, recipe: int, force: bool) -> None:
    """Calls `make(directory, seed)` unless a run of the same recipe and seed filled the directory before.

    It is made beside its place and renamed when whole, so that an interrupted run leaves nothing half-written.
    Raises SystemExit where the directory holds something that this script did not make.
    """
    marker = directory / MARKER
    wanted = {"recipe": recipe, "seed": seed}
    if marker.exists() and not force and json.loads(marker.read_text()) == wanted:
        print(f"{directory}: already there (seed {seed})")
        return
    if directory.exists() and any(directory.iterdir()) and not marker.exists() and not force:
        raise SystemExit(f"{directory} holds files that this script did not make; move them, or replace with --force")
    print(f"{directory}: making it (seed {seed})", flush=True)
    started = time.monotonic()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        fresh, replaced = Path(scratch) / "fresh", Path(scratch) / "replaced"
        fresh.mkdir()
        make(fresh, seed)
        (fresh / MARKER).write_text(json.dumps(wanted) + "\n")
        if directory.exists():
            directory.rename(replaced)
        fresh.rename(directory)
    print(f"{directory}: done in {time.monotonic() - started:.1f} s", flush=True)


def command_line(
    script: str, arguments: Sequence[str] | None, recipe: int, **directories: Callable[[Path, int], None]
) -> None:
    """Make the directories that the script's command line asks for, in their order.

    Args:
        script: its `__file__`; the directories are beside it unless `--output` says otherwise.
        arguments: of the command line; None: those of this process.
        recipe: version of what is made; another one replaces what is there.
        directories: what fills each one, by its name; called with the directory and the seed.
    """
    names = " and ".join(f"{name}/" for name in directories)
    parser = argparse.ArgumentParser(description="Makes the model and the data of an example.")
    parser.add_argument("--output", type=Path, default=Path(script).resolve().parent, help=f"where {names} go")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="make all again, whatever is there")
    options = parser.parse_args(arguments)
    # One thread: repeatable, and faster than two whenever anything else runs.
    torch.set_num_threads(1)
    disable_progress_bar()
    for name, make in directories.items():
        prepare(options.output / name, make, options.seed, recipe=recipe, force=options.force)
