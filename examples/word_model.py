# ruff: noqa: T201 - part of scripts that people run by hand: their output is their progress
"""What the `prepare.py` of small games share: a tokenizer with one token for each of the game's words, and a model that
plays at random.

The model is a Qwen3 of two layers. Its supervised warm start makes the words that a player may say at a point of the
game equally likely there.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar
from warm_start import build_model, save

USER, ASSISTANT, END, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer(words: Sequence[str], pattern: str = r" ?\w+") -> PreTrainedTokenizerFast:
    """Bytes, and one token for each word of the game; ``pattern`` is where text is cut into words."""
    pieces = [*(word.replace(" ", "Ġ") for word in words), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    # A piece that is in the vocabulary is one token, whatever pairs it consists of.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (USER, ASSISTANT, END, PAD)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )


def small_model(tokenizer: PreTrainedTokenizerFast, length: int) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers for conversations of at most ``length`` tokens, before its warm start."""
    return build_model(
        tokenizer,
        hidden_size=64,
        head_dim=32,
        num_hidden_layers=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=length,
        tie_word_embeddings=False,
    )


def random_player(
    words: Sequence[str], actions: Sequence[str], prompts: Sequence[str], length: int, steps: int
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """A model that takes each action equally often at the end of each prompt.

    Args:
        words: of the game.
        actions: those of the words that a player may say.
        prompts: what a player has seen where it may act.
        length: tokens of the longest conversation.
        steps: of the warm start.
    """
    tokenizer = build_tokenizer(words)
    model = small_model(tokenizer, length)
    warm_start(model, tokenizer, prompts, actions, steps)
    return model, tokenizer


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    actions: Sequence[str],
    steps: int,
) -> None:
    """Teach all actions as equally likely at the end of each prompt, and the end after them.

    In the first half the model says another token at each prompt, so that it tells them apart. In the second half only
    the last layer learns, from hidden states that stay the same.
    """
    chosen_ids, end = tokenizer.convert_tokens_to_ids(list(actions)), tokenizer.eos_token_id
    rows = [[*tokenizer.encode(text), action, end] for text in prompts for action in chosen_ids]
    length = max(map(len, rows))
    ids = torch.tensor([row + [end] * (length - len(row)) for row in rows])
    place = torch.tensor([len(row) - 3 for row in rows])
    number = torch.arange(len(rows))
    own_token = len(tokenizer) - 4 - 256 + number // len(actions)  # bytes follow the words
    uniform = torch.zeros(len(rows), len(tokenizer))
    uniform[:, chosen_ids] = 1 / len(actions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(steps):
        if step <= steps // 2:
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            hidden = torch.stack([hidden[number, place], hidden[number, place + 1]])
        if step >= steps // 2:
            hidden = hidden.detach()
        optimizer.param_groups[0]["lr"] = 3e-3 if step < steps // 2 else 1e-2
        chosen, after = model.lm_head(hidden)
        loss = F.cross_entropy(chosen, own_token if step < steps // 2 else uniform)
        loss = loss + F.cross_entropy(after, torch.full_like(place, end))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    print(f"  warm start of {steps} steps: {loss.item() - math.log(len(actions)):.4f} nats off")


def command_line(
    script: str,
    about: str | None,
    make: Callable[[argparse.Namespace], tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]],
    steps: int = 400,
    **options: Any,
) -> None:
    """What a `prepare.py` does: makes the model in its folder.

    Args:
        script: its `__file__`.
        about: its docstring.
        make: makes the model from the options of the command line.
        steps: of the warm start, unless the command line says otherwise.
        options: more options, as argparse takes them, by name.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--output", type=Path, default=Path(script).parent)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=steps, help="steps of the warm start")
    for name, option in options.items():
        parser.add_argument(f"--{name}", **option)
    arguments = parser.parse_args()
    start = time.monotonic()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # more only slow down a model this small
    disable_progress_bar()
    save(arguments.output / "model", *make(arguments))
    print(f"made {arguments.output / 'model'} in {time.monotonic() - start:.0f} s")
