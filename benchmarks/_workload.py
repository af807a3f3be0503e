"""What the orchestration benchmark runs: a tokenizer of realistic cost, prompts, and what the policy answers.

Everything is made here from a seed. Words are invented but follow Zipf's law, so that the tokenizer sees frequent words
as one token and rare ones as several, as it does in English.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentrl_testing.scripted_config import ScriptedConfig

TOOL_CALLS = 3
STOP = "<|im_end|>"

# The pre-tokenizer of Qwen 2 and 3; most of the time of encoding goes into this expression.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", STOP, "<tool_call>", "</tool_call>")

# ChatML with tools in the words of Qwen 2.5; append-only.
CHAT_TEMPLATE = """\
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
{%- if tools %}
{{- '\\n\\n# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' }}
{{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif not loop.first or message.role != 'system' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

SYSTEM = "You solve problems step by step and never calculate in your head. Write the answer after ####."


class Writer:
    """Writes text of invented words, the same for the same seed."""

    def __init__(self, seed: int, words: int = 6000) -> None:
        self._random = random.Random(seed)
        syllables = [first + vowel + last for first in "bdfglmnprst" for vowel in "aeiou" for last in ("", "n", "r")]
        lengths = self._random.choices((1, 2, 3, 4), (3, 5, 3, 1), k=words)
        self._words = ["".join(self._random.choices(syllables, k=length)) for length in lengths]
        self._weights = [1 / rank for rank in range(3, words + 3)]

    def sentence(self, words: int) -> str:
        return " ".join(self._random.choices(self._words, self._weights, k=words)).capitalize() + "."

    def number(self) -> int:
        return self._random.randint(2, 99)


def train_tokenizer(directory: Path, schema_text: str, vocabulary: int, seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template, saved in ``directory``."""
    writer = Writer(seed)
    corpus = [writer.sentence(60) for _ in range(max(vocabulary // 2, 200))]
    # Real tokenizers have seen much English and JSON: one token is about a word of it.
    corpus += [schema_text, CHAT_TEMPLATE, SYSTEM, _call("1 + 1"), "The result is, so the next step"] * 20
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=STOP, pad_token=_SPECIAL[0])
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    return fast


@dataclass(frozen=True)
class Workload:
    """Dataset rows, and for each row the texts of the policy's turns."""

    rows: list[dict[str, Any]]
    turns: list[list[str]]


def make_workload(prompts: int, words: int, seed: int) -> Workload:
    """Three turns that think for ``words`` words and call, one that answers; every prompt has its own.

    Prompts are four sentences of as many words; without words, of three words each.
    """
    writer = Writer(seed)
    rows, turns = [], []
    for index in range(prompts):
        value, texts = writer.number(), []
        for _ in range(TOOL_CALLS):
            expression = f"{value} * {writer.number()} + {writer.number()}"
            texts.append(f"{writer.sentence(words)}\n{_call(expression)}" if words else _call(expression))
            value = writer.number()
        texts.append(f"{writer.sentence(words)}\n#### {value}" if words else f"#### {value}")
        turns.append(texts)
        rows.append(
            {
                "data_source": "benchmark",
                "agent_name": "tool_agent",
                "raw_prompt": [
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": " ".join(writer.sentence(words or 3) for _ in range(4))},
                ],
                "reward_model": {"ground_truth": str(value)},
                "extra_info": {"index": index},
            }
        )
    return Workload(rows, turns)


def _call(expression: str) -> str:
    return f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


class Script:
    """What the scripted engine says: the turns of the prompt whose number is in the request id."""

    def __init__(self) -> None:
        self.answers: list[list[list[int]]] = []

    def play(self, turns: list[list[str]], tokenizer: PreTrainedTokenizerFast) -> None:
        """From now on answer with these turns."""
        self.answers = [
            [tokenizer.encode(text + STOP, add_special_tokens=False) for text in prompt_turns] for prompt_turns in turns
        ]

    def __call__(self, request_id: str, turn: int, prompt_ids: Sequence[int]) -> list[int]:
        # train-<step>-<prompt>-<sample>-<attempt>
        return self.answers[int(request_id.split("-", 3)[2])][turn]


script = Script()
ENGINE = ScriptedConfig(script=f"{__name__}:script")
