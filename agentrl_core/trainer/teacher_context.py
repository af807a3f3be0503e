"""What the teacher reads and the policy does not: ``teacher.context`` in each prompt.

Legend: B rows.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from agentrl_core.api import DataError, Message, Renderer
from agentrl_core.api.agent_loop import Status
from agentrl_core.protocol import DataProto
from agentrl_core.protocol.ragged import Filled, Order, RaggedColumn, Rows, Values, values_in
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.workers.micro_batching import response_rows

TEACHER_PROMPTS = "teacher_prompts"
"""Column of the batch: the ids of each row's prompt as the teacher reads it."""
_FIELD = re.compile(r"\{(\w+)\}")


def add_teacher_prompts(
    batch: DataProto, results: Sequence[TrajectoryResult], context: str, renderer: Renderer
) -> None:
    """Add :data:`TEACHER_PROMPTS` to the batch that ``to_data_proto`` made of ``results``.

    Raises:
        DataError: a row lacks a field of the context, or a trajectory does not begin with its first messages.
    """
    prompts = [
        ids for result in results if result.status is Status.TRAINED for ids in _prompts(result, context, renderer)
    ]
    batch.non_tensor_batch[TEACHER_PROMPTS] = np.fromiter(iter(prompts), dtype=object, count=len(prompts))


def as_the_teacher_reads(batch: DataProto, pad_token_id: int) -> DataProto:
    """The batch with :data:`TEACHER_PROMPTS` in place of its prompts, if it has them; that column leaves the batch."""
    ids = batch.non_tensor_batch.pop(TEACHER_PROMPTS, None)
    if ids is None:
        return batch
    response = response_rows(batch.batch)
    flat, ends = values_in(batch.batch["responses"], response), zip(response.starts_B, response.ends_B, strict=True)
    parts = [part for prompt, (start, end) in zip(ids, ends, strict=True) for part in (prompt, flat[start:end])]
    prompts_B = np.array([len(prompt) for prompt in ids], dtype=np.int64)
    left = int(prompts_B.max(initial=0))
    rows = Rows(prompts_B + response.lengths_B, left + response.width, left - prompts_B)
    read = RaggedColumn(Values(np.concatenate(parts, dtype=np.int32)), rows, pad_token_id)
    tensors = {
        "prompts": read.part(0, left),
        "responses": read.part(left, response.width),
        "response_mask": batch.batch["response_mask"],
        "input_ids": read,
        "attention_mask": RaggedColumn(Filled(np.int8), rows),
        "position_ids": RaggedColumn(Order(), rows),
    }
    kept = {"uid", "trajectory_id", "images"} & batch.non_tensor_batch.keys()
    objects = {name: batch.non_tensor_batch[name] for name in kept}
    return DataProto.from_dict(tensors=tensors, non_tensors=objects, meta_info=dict(batch.meta_info))


def _prompts(result: TrajectoryResult, context: str, renderer: Renderer) -> list[list[int]]:
    """The prompt of each row of a trajectory, with the context in its first messages."""
    messages = list(takewhile(lambda message: message["role"] != "assistant", result.outputs[0].messages))
    shown, told = (
        renderer.render(each, result.tool_schemas, generation_prompt=True).ids
        for each in (messages, _with_context(messages, _filled(context, result.row)))
    )
    rows = [output for output in result.outputs if output.trained]
    for output in rows:
        if output.prompt_ids[: len(shown)] != shown:
            raise DataError(
                f"teacher.context: a prompt of {result.trajectory_id} does not begin with its first messages as the "
                "chat template renders them, so the context has no place there. Set teacher.context=null"
            )
    return [told + output.prompt_ids[len(shown) :] for output in rows]


def _filled(context: str, row: Mapping[str, Any]) -> str:
    """The context with ``{ground_truth}`` and the fields of ``extra_info``."""
    values = {**(row.get("extra_info") or {}), **(row.get("reward_model") or {})}
    if missing := sorted(set(_FIELD.findall(context)) - values.keys()):
        raise DataError(
            f"teacher.context: the row of {row['uid']} has no {', '.join(missing)}; it has {', '.join(sorted(values))}"
        )
    return _FIELD.sub(lambda found: str(values[found[1]]), context)


def _with_context(messages: Sequence[Message], context: str) -> list[Message]:
    """The messages with the context at the end of the last user's."""
    told = [dict(message) for message in messages]
    users = [message for message in told if message["role"] == "user"]
    if not users:
        return [*told, {"role": "user", "content": context}]
    content = users[-1]["content"]
    if isinstance(content, str):
        users[-1]["content"] = f"{content}\n\n{context}"
    else:
        users[-1]["content"] = [*content, {"type": "text", "text": f"\n\n{context}"}]
    return told
