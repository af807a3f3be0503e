"""The interface of prompt datasets: random access to rows.

The factory ``(config, DatasetContext) -> PromptDataset`` is called once for each split that has files, in the trainer's
process, before any worker starts; all rows are read there, from one thread, and checked against the run. With
``data.streaming`` most training rows are read later, each when its step comes, so keep no rows in memory. Methods are
plain ones, never coroutines. What the factory or a row raises ends the run; a ``DataError`` should name file, row and
remedy. Rows are pickled to the workers.

    class Numbers(PromptDataset):
        def __init__(self, config, context):
            self.size = 100

        def __len__(self):
            return self.size

        def __getitem__(self, index):
            return {"raw_prompt": [{"role": "user", "content": str(index)}]}
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentrl_core.api.agent_loop import ChatRenderer

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class DatasetContext:
    """What a dataset gets when it is built.

    Args:
        files: absolute paths and addresses (``hf://…``) from ``data.train_files`` or ``data.validation_files``. Local
            patterns are replaced by the files that match, in alphabetical order; those in addresses are not.
        split: ``train`` or ``validation``.
        renderer: the loop's own tokenizer and template.
        tool_schemas: schemas that a row's prompt will be rendered with, given the row.
        max_prompt_length: tokens of a rendered prompt, generation prompt and tool schemas included.
    """

    files: Sequence[str]
    split: Split
    renderer: ChatRenderer
    tool_schemas: Callable[[dict[str, Any]], Sequence[dict[str, Any]]]
    max_prompt_length: int


class PromptDataset(ABC):
    """Rows by index; ``__getitem__`` must be deterministic.

    A row is a dict with ``raw_prompt`` (list of messages) and what else the run uses: ``data_source`` (str),
    ``agent_name`` (str), ``reward_model`` (``{"ground_truth": …}``), ``extra_info`` (``index``, ``tools_kwargs``,
    ``interaction_kwargs``, …).
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Any]: ...
