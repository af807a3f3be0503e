# ruff: noqa: T201 - an example script that people run by hand: its output is its progress
"""Makes the calculator example: a tiny model that is unreliable at calling a calculator, and problems to train it on.

Everything is built here, offline and repeatably (same seed, same machine: same bytes): a byte-level BPE tokenizer with
a ChatML template, a 0.4 M-parameter Qwen3 with a supervised warm start, and two parquet files in the layout that
agentrl reads. The warm start has two phases, because reinforcement learning changes *which behaviour* the model chooses
within a few steps but hardly teaches it to copy digits:

1. correct demonstrations only, until the model copies the expression and the result almost without error;
2. a short mixture of good calls, broken calls and bare guesses, which leaves it choosing the good call about one time
   in five.

Usage: python examples/calculator/prepare.py [--output DIR] [--seed N] [--force]
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import operator
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

Message = dict[str, Any]

RECIPE_VERSION = 3
DATA_SOURCE = "calculator"
TRAIN_PROMPTS = 4096
VALIDATION_PROMPTS = 200
MARKER = "prepared.json"

# The prompt contains this schema as JSON, in this key order. It must equal the schema of the `calculator` tool of
# agentrl-tools-basic: the warm start sees the prompt that the rollout will show, to the token.
CALCULATOR_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression and returns the result.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "the expression, for example 37 * 45"},
            },
            "required": ["expression"],
        },
    },
}

QUESTIONS = ("What is {}?", "Calculate {}.", "How much is {}?", "Please work out {}.")
# Random guesses would teach noise in every digit and destroy the copying of phase 1.
GUESSES = ("0", "1", "10", "100")

END_OF_TEXT, MESSAGE_START, MESSAGE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
VOCABULARY_SIZE = 640

# Append-only: rendering more messages only ever adds text to what was rendered before.
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- 'You can call these functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{% endfor %}
{{- '\\n</tools>\\nTo call one, write its name and arguments as JSON:\\n<tool_call>\\n' }}
{{- '{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for tool_call in message.tool_calls or [] %}
{%- set call = tool_call.function or tool_call %}
{%- if message.content or not loop.first %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": ' + call.name | tojson + ', "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'user' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

ASSISTANT_TURN = re.compile(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", re.DOTALL)
ADDED_TOKENS = re.compile(r"<\|im_start\|>|<\|im_end\|>|</?tool_call>")
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


# --- problems -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """One question, the expression in it, and the result."""

    question: str
    expression: str
    result: str


def evaluate(expression: str) -> int:
    """The value of an expression of integers, +, - and *; ValueError for anything else. Never calls `eval`."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError(f"{expression!r} holds {type(node).__name__}; allowed are integers, +, - and *")

    if not re.fullmatch(r"[\d\s+*()-]+", expression):
        raise ValueError(f"{expression!r} is not arithmetic; allowed are integers, +, -, * and parentheses")
    try:
        return value(ast.parse(expression, mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is not an expression: {error.msg}") from error


def is_held_out(expression: str) -> bool:
    """Whether the expression belongs to validation: one in ten, by its hash, so for every seed the same ones."""
    return hashlib.sha256(expression.encode()).digest()[0] % 10 == 0


def problems(rng: random.Random, *, held_out: bool) -> Iterator[Problem]:
    """An endless stream of problems of one split."""
    while True:
        expression = f"{rng.randint(1, 99)} {rng.choice('+-*')} {rng.randint(1, 99)}"
        if is_held_out(expression) == held_out:
            yield Problem(rng.choice(QUESTIONS).format(expression), expression, str(evaluate(expression)))


def distinct_problems(rng: random.Random, count: int, *, held_out: bool) -> list[Problem]:
    """`count` problems of one split, no expression twice."""
    chosen: dict[str, Problem] = {}
    for problem in problems(rng, held_out=held_out):
        chosen.setdefault(problem.expression, problem)
        if len(chosen) == count:
            break
    return list(chosen.values())


# --- demonstrations -------------------------------------------------------------------------------------------------


def conversation(problem: Problem, *turns: Message) -> list[Message]:
    return [{"role": "user", "content": problem.question}, *turns]


def good_call(problem: Problem) -> list[Message]:
    call = {"name": "calculator", "arguments": {"expression": problem.expression}}
    return conversation(
        problem,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": problem.result},
        {"role": "assistant", "content": f"#### {problem.result}"},
    )


def bad_call(problem: Problem, rng: random.Random) -> list[Message]:
    """A call that lacks a brace or names a tool that does not exist, the error, and a guess."""
    if rng.random() < 0.5:
        call = f'{{"name": "calculator", "arguments": {{"expression": "{problem.expression}"}}'
    else:
        call = f'{{"name": "compute", "arguments": {{"expression": "{problem.expression}"}}}}'
    return conversation(
        problem,
        {"role": "assistant", "content": f"{CALL_START}\n{call}\n{CALL_END}"},
        {"role": "tool", "content": "Error: this call cannot be answered."},
        {"role": "assistant", "content": f"#### {rng.choice(GUESSES)}"},
    )


def guess(problem: Problem, rng: random.Random) -> list[Message]:
    return conversation(problem, {"role": "assistant", "content": f"#### {rng.choice(GUESSES)}"})


def unreliable(problem: Problem, rng: random.Random, good_share: float = 0.2) -> list[Message]:
    """The mixture of phase 2: `good_share` good calls; of the rest, one in four a bad call, the others guesses."""
    if rng.random() < good_share:
        return good_call(problem)
    return bad_call(problem, rng) if rng.random() < 0.25 else guess(problem, rng)


# --- tokenizer ------------------------------------------------------------------------------------------------------


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with single digits, trained on this example's own conversations.

    It does not split at words: each fixed piece of the prompt and of a tool call becomes one token or a few.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT, MESSAGE_START, MESSAGE_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    renderer = wrap_tokenizer(Tokenizer(models.BPE()))
    rng = random.Random("tokenizer")
    # The system message, always the same, comes rarely: the pieces that are sampled or that vary must merge first.
    stream = problems(rng, held_out=False)
    conversations = [render(renderer, good_call(next(stream))) for _ in range(20)]
    for problem in itertools.islice(stream, 500):
        for messages in (good_call(problem), unreliable(problem, rng)):
            conversations.append(render(renderer, messages, tools=False))
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
    tokenizer: PreTrainedTokenizerFast, messages: list[Message], *, tools: bool = True, generation_prompt: bool = False
) -> str:
    """The text of a conversation, with the calculator's schema in front if `tools`."""
    text: str = tokenizer.apply_chat_template(
        messages,
        tools=[CALCULATOR_SCHEMA] if tools else None,
        add_generation_prompt=generation_prompt,
        tokenize=False,
    )
    return text


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def encode_demonstrations(
    tokenizer: PreTrainedTokenizerFast, demonstrations: Sequence[list[Message]]
) -> list[tuple[list[int], list[int]]]:
    """Token ids and, in step, a mask that is 1 on what the assistant says, `<|im_end|>` included, and 0 on all else."""
    # Encoded turn by turn, as a rollout does: the sampled ids never share a token with the text around them.
    turns = [ASSISTANT_TURN.split(render(tokenizer, messages)) for messages in demonstrations]
    encoded = iter(tokenizer([turn for row in turns for turn in row], add_special_tokens=False)["input_ids"])
    rows = []
    for row in turns:
        pieces = [next(encoded) for _ in row]
        mask = [i % 2 for i, piece in enumerate(pieces) for _ in piece]
        rows.append(([token for piece in pieces for token in piece], mask))
    return rows


# --- model ----------------------------------------------------------------------------------------------------------


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3 of 0.4 M parameters (reads torch's global generator)."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        # Both make copying quick to learn: the usual base of 10000 hardly tells neighbours apart over 100 tokens.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=0.05,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
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


def run_calls(text: str) -> list[Message]:
    """The tool messages that answer the calls in an assistant's turn."""
    answers = []
    for call in TOOL_CALL.findall(text):
        try:
            request = json.loads(call)
            if request["name"] != "calculator":
                raise ValueError(f"no tool is named {request['name']!r}")
            answers.append(str(evaluate(request["arguments"]["expression"])))
        except (ValueError, KeyError, TypeError):
            answers.append("Error: this call cannot be answered.")
    return [{"role": "tool", "content": answer} for answer in answers]


@torch.no_grad()
def rollout(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: Sequence[Problem]) -> list[Rollout]:
    """One conversation of at most two turns per task, sampled at temperature 1 (torch's global generator)."""
    texts = [render(tokenizer, conversation(task), generation_prompt=True) for task in tasks]
    rows = [Rollout(ids, [0] * len(ids), False) for ids in (encode(tokenizer, text) for text in texts)]
    live = list(range(len(rows)))
    for _ in range(2):
        spoken = generate(model, tokenizer, [rows[i].ids for i in live])
        going_on = []
        for i, new in zip(live, spoken, strict=True):
            row, said = rows[i], tokenizer.decode(new)
            row.ids, row.mask = row.ids + new, row.mask + [1] * len(new)
            answer = re.search(r"#### (-?\d+)<\|im_end\|>$", said)
            row.correct = answer is not None and answer.group(1) == tasks[i].result
            if new[-1] == tokenizer.eos_token_id and (answers := run_calls(said)):
                before = render(tokenizer, conversation(tasks[i]))
                added = render(tokenizer, [*conversation(tasks[i]), *answers], generation_prompt=True)[len(before) :]
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


@dataclass(frozen=True)
class WarmStart:
    """The recipe. A check samples one rollout per problem of the training split.

    Phase 1 ends early at a check that shows `copy_accuracy`. Some initial weights learn to copy late: where the first
    check shows less than `promising_accuracy`, other weights are quicker than more steps.
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


RECIPE = WarmStart()


def optimizer_for(model: Qwen3ForCausalLM, learning_rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def train_step(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def learn_to_copy(tokenizer: PreTrainedTokenizerFast, rng: random.Random, attempts: int = 4) -> Qwen3ForCausalLM:
    """Phase 1: a new model, trained on correct demonstrations only."""
    stream = problems(rng, held_out=False)
    model = build_model(tokenizer)
    optimizer = optimizer_for(model, RECIPE.copy_learning_rate)
    for step in range(1, RECIPE.copy_steps + 1):
        decay = 1 - 0.95 * step / RECIPE.copy_steps
        optimizer.param_groups[0]["lr"] = RECIPE.copy_learning_rate * min(step / RECIPE.warmup_steps, decay)
        batch = [good_call(problem) for problem in itertools.islice(stream, RECIPE.batch_size)]
        train_step(model, optimizer, supervised_loss(model, encode_demonstrations(tokenizer, batch)))
        if step < RECIPE.first_check or step % RECIPE.check_every:
            continue
        reached = accuracy(rollout(model, tokenizer, list(itertools.islice(stream, RECIPE.check_problems))))
        print(f"  correct demonstrations, step {step}: sampled accuracy {reached:.3f}", flush=True)
        if reached >= RECIPE.copy_accuracy:
            break
        if step == RECIPE.first_check and reached < RECIPE.promising_accuracy and attempts > 1:
            print("  a slow start: beginning again from other weights", flush=True)
            return learn_to_copy(tokenizer, rng, attempts - 1)
    return model


def without_choice(rows: list[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[int]]]:
    """The rows with the mask 0 on the first two sampled tokens, the tag and the tool's name, where the choice is made.

    Trained so, a good call keeps the copying alive and does not make good calls more frequent.
    """
    starts = [mask.index(1) + 2 for _, mask in rows]
    return [(ids, [0] * start + mask[start:]) for (ids, mask), start in zip(rows, starts, strict=True)]


def make_unreliable(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
    """Phase 2: the mixture, then a few steps with fewer or more good calls until accuracy lies in the wanted range."""
    stream = problems(rng, held_out=False)
    optimizer = optimizer_for(model, RECIPE.unreliable_learning_rate)
    low, high = RECIPE.unreliable_accuracy
    steps, scale, good_share = RECIPE.unreliable_steps, 1.0, 0.2
    for _ in range(1 + RECIPE.max_corrections):
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = RECIPE.unreliable_learning_rate * (1 - step / steps) * scale
            batch = [unreliable(problem, rng, good_share) for problem in itertools.islice(stream, RECIPE.batch_size)]
            copying = [good_call(problem) for problem in itertools.islice(stream, RECIPE.copying_batch_size)]
            rows = encode_demonstrations(tokenizer, batch) + without_choice(encode_demonstrations(tokenizer, copying))
            train_step(model, optimizer, supervised_loss(model, rows))
        reached = accuracy(rollout(model, tokenizer, list(itertools.islice(stream, RECIPE.check_problems))))
        print(f"  mixture with {good_share:.0%} good calls: sampled accuracy {reached:.3f}", flush=True)
        if low <= reached <= high:
            break
        steps, scale, good_share = RECIPE.correction_steps, 0.3, 0.1 if reached > high else 0.3


# --- files ----------------------------------------------------------------------------------------------------------


def data_row(problem: Problem, split: str, index: int, *, tutor: bool) -> dict[str, Any]:
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.question}],
        "reward_model": {"style": "rule", "ground_truth": problem.result},
        "extra_info": {
            "index": index,
            "split": split,
            "tools_kwargs": {"calculator": {"create_kwargs": None}},
            "interaction_kwargs": {"name": "tutor", "ground_truth": problem.result} if tutor else None,
        },
    }


# Parquet has no empty struct, and the calculator takes no arguments: `create_kwargs` is therefore null.
DATA_SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct(
            {
                "index": pa.int64(),
                "split": pa.string(),
                "tools_kwargs": pa.struct({"calculator": pa.struct({"create_kwargs": pa.null()})}),
                "interaction_kwargs": pa.struct({"name": pa.string(), "ground_truth": pa.string()}),
            }
        ),
    }
)


def make_data(directory: Path, seed: int) -> None:
    """Writes train.parquet and validation.parquet; no expression is in both, or twice in one.

    The same rows stand in tutor-train.parquet and tutor-validation.parquet, where each names its tutor.
    """
    for split, count in (("train", TRAIN_PROMPTS), ("validation", VALIDATION_PROMPTS)):
        chosen = distinct_problems(random.Random(f"{split}/{seed}"), count, held_out=split == "validation")
        for prefix, tutor in (("", False), ("tutor-", True)):
            rows = [data_row(problem, split, index, tutor=tutor) for index, problem in enumerate(chosen)]
            pq.write_table(pa.Table.from_pylist(rows, schema=DATA_SCHEMA), directory / f"{prefix}{split}.parquet")
        print(f"  {count} prompts in {split}.parquet", flush=True)


def make_model(directory: Path, seed: int) -> None:
    """Writes the tokenizer and the warm-started model in the layout of `from_pretrained`."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = learn_to_copy(tokenizer, random.Random(f"copy/{seed}"))
    make_unreliable(model, tokenizer, random.Random(f"unreliable/{seed}"))
    held_out = distinct_problems(random.Random(f"validation/{seed}"), VALIDATION_PROMPTS, held_out=True)
    reached = accuracy(rollout(model, tokenizer, held_out))
    print(f"  sampled accuracy on {VALIDATION_PROMPTS} held-out problems: {reached:.3f}", flush=True)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)


def prepare(directory: Path, make: Callable[[Path, int], None], seed: int, *, force: bool) -> None:
    """Calls `make(directory, seed)` unless a run of the same recipe and seed filled the directory before.

    It is made beside its place and renamed when whole, so that an interrupted run leaves nothing half-written.
    Raises SystemExit where the directory holds something that this script did not make.
    """
    marker = directory / MARKER
    wanted = {"recipe": RECIPE_VERSION, "seed": seed}
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Makes the model and the data of the calculator example.")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).resolve().parent, help="where model/ and data/ go"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="make both again, whatever is there")
    options = parser.parse_args(arguments)
    # One thread: repeatable, and faster than two whenever anything else runs.
    torch.set_num_threads(1)
    disable_progress_bar()
    prepare(options.output / "data", make_data, options.seed, force=options.force)
    prepare(options.output / "model", make_model, options.seed, force=options.force)


if __name__ == "__main__":
    main()
