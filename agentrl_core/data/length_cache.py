"""Lengths of prompts, kept between runs: rendering and tokenising is most of what loading many rows costs."""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

_FEWEST = 1000
"""Fewer rows take less than a second without a cache."""
_TOKENIZER_FILES = (
    "tokenizer",
    "chat_template",
    "vocab",
    "merges",
    "special_tokens",
    "added_tokens",
    "preprocessor",
    "processor",
)
_PACKAGES = "agentrl-core", "transformers", "tokenizers", "jinja2"


def cached_lengths(
    folder: Path, model: Path, settings: Any, prompts: Iterable[Any], measure: Callable[[], list[int]]
) -> list[int]:
    """What ``measure`` returns, from a file in ``folder`` if nothing has changed since it was written.

    Args:
        model: directory of the tokenizer and its chat template, whose contents count.
        settings: what else decides how prompts become tokens: plugins and their options, tool schemas.
        prompts: the content of each row, in order.
        measure: tokens of each prompt.
    """
    digest = hashlib.sha256(json.dumps([settings, *map(version, _PACKAGES)], sort_keys=True, default=str).encode())
    for file in sorted(model.iterdir()) if model.is_dir() else ():
        if file.name.startswith(_TOKENIZER_FILES) or file.suffix in {".jinja", ".model", ".py"}:
            content = file.read_bytes() if file.is_file() else b""
            digest.update(f"{file.name} {len(content)} ".encode() + content)
            if b"strftime_now" in content:
                # The template writes the day into the prompt.
                digest.update(str(date.today()).encode())
    rows = 0
    for rows, prompt in enumerate(prompts, 1):  # noqa: B007 - the last one counts them
        digest.update(json.dumps(prompt, default=str).encode() + b"\n")
    if rows < _FEWEST:
        return measure()
    file = folder / f"{digest.hexdigest()[:32]}.npy"
    try:
        found = np.load(file)
        if found.shape == (rows,):
            logger.info("data: the lengths of %d prompts are those of an earlier run (%s)", rows, file)
            return [int(length) for length in found]
    except (OSError, ValueError, EOFError):
        # There is none, or it was cut off.
        pass
    lengths = measure()
    _write(file, np.asarray(lengths, dtype=np.int32))
    return lengths


def _write(file: Path, lengths: Any) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as part:
            np.save(part, lengths)
        os.replace(part.name, file)
    except OSError as error:
        logger.warning("data: the lengths of prompts cannot be kept in %s, so they are computed again: %s", file, error)
