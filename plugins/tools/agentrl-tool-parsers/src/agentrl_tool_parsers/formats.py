"""The formats, each as its family's chat templates write it."""

from agentrl_tool_parsers.blocks import (
    BlockParser,
    Format,
    arguments_in_tags,
    calls_in_json,
    read_fields,
    read_python,
)

_NAME = r"(?P<name>[\w.\-]+)"


class HermesParser(BlockParser):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as many as the model likes.

    The JSON ends where a JSON decoder says so, thus ``</tool_call>`` may occur in its strings. ``arguments`` may be an
    object, a string that holds one, or absent. A call without its closing tag is an error: it may have been cut off.
    """

    format = Format(opening="<tool_call>", read=calls_in_json(), closing="</tool_call>")


class Qwen3CoderParser(BlockParser):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: arguments are texts.

    A function outside ``<tool_call>`` is a call too, because models forget the outer tag.
    """

    format = Format(
        section=("<tool_call>", "</tool_call>"),
        opening="<function=",
        header=r"(?P<name>[^<>\s]+)>",
        read=arguments_in_tags(r"<parameter=(?P<key>[^<>\n]+)>", "</parameter>", own_lines=True),
        closing="</function>",
    )


class SeedOssParser(BlockParser):
    """Qwen 3 Coder's tags within ``<seed:tool_call>``, without line breaks round values; reasoning in
    ``<seed:think>``."""

    format = Format(
        section=("<seed:tool_call>", "</seed:tool_call>"),
        opening="<function=",
        header=r"(?P<name>[^<>\s]+)>",
        read=arguments_in_tags(r"<parameter=(?P<key>[^<>\n]+)>", "</parameter>"),
        closing="</function>",
        reasoning=("<seed:think>", "</seed:think>"),
    )


class MiniMaxM2Parser(BlockParser):
    """``<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>…``: arguments are
    texts."""

    format = Format(
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        opening="<invoke name=",
        header=r'"(?P<name>[^"\n]+)">',
        read=arguments_in_tags(r'<parameter name="(?P<key>[^"\n]+)">', "</parameter>"),
        closing="</invoke>",
    )


class Glm4Parser(BlockParser):
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``: arguments are texts."""

    format = Format(
        opening="<tool_call>",
        header=r"(?P<name>[^<>\s]+)",
        read=arguments_in_tags(r"<arg_key>(?P<key>[^<>\n]+)</arg_key>\s*<arg_value>", "</arg_value>"),
        closing="</tool_call>",
    )


class DeepSeekV3Parser(BlockParser):
    """DeepSeek V3, R1 and V3.1: a name and JSON between ``<｜tool▁call▁begin｜>`` and ``<｜tool▁call▁end｜>``.

    V3 and R1 write ``function`` before the name and put the JSON in a Markdown fence.
    """

    format = Format(
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        opening="<｜tool▁call▁begin｜>",
        header=r"(?:function<｜tool▁sep｜>)?(?P<name>[^\s<`{]+)(?:<｜tool▁sep｜>|(?=\s*```))\s*(?:```(?:json)?\s*)?",
        read=calls_in_json(),
        tail=r"\s*(?:```)?\s*",
        closing="<｜tool▁call▁end｜>",
    )


class DeepSeekV32Parser(BlockParser):
    """DeepSeek V3.2 and V4: ``<｜DSML｜invoke name="NAME">`` round parameters that say whether they are strings."""

    format = Format(
        section=("<｜DSML｜(?:function_calls|tool_calls)>", "</｜DSML｜(?:function_calls|tool_calls)>"),
        opening="<｜DSML｜invoke name=",
        header=r'"(?P<name>[^"\n]+)">',
        read=arguments_in_tags(
            r'<｜DSML｜parameter name="(?P<key>[^"\n]+)"(?: string="(?P<is_text>true|false)")?>', "</｜DSML｜parameter>"
        ),
        closing="</｜DSML｜invoke>",
    )


class KimiK2Parser(BlockParser):
    """``<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`` in a section."""

    format = Format(
        section=(r"<\|tool_calls_section_begin\|>", r"<\|tool_calls_section_end\|>"),
        opening=r"<\|tool_call_begin\|>",
        header=r"(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*",
        read=calls_in_json(),
        closing="<|tool_call_end|>",
    )


class MistralParser(BlockParser):
    """``[TOOL_CALLS]NAME[ARGS]{…}``, as many as the model likes, or ``[TOOL_CALLS][{"name": …, "arguments": {…}}]`` of
    the tokenizers before version 11; reasoning in ``[THINK]``.

    Neither has an end of its own: the JSON's is the call's.
    """

    format = Format(
        opening=r"\[TOOL_CALLS\]",
        header=rf"(?:{_NAME}\s*(?:\[CALL_ID\]\s*[\w\-]*\s*)?(?:\[ARGS\])?\s*(?=\{{))?",
        read=calls_in_json(more=["id"], lists=True),
        reasoning=("[THINK]", "[/THINK]"),
    )


class Llama3JsonParser(BlockParser):
    """``{"name": …, "parameters": {…}}`` at the start of a line or behind ``<|python_tag|>``; several are separated by
    semicolons.

    Without the tag, an object that has a name but no parameters is content.
    """

    format = Format(
        opening=r'<\|python_tag\|>|(?:(?m:^)[ \t]*|;\s*)(?=\{\s*"(?:name|type|function)"\s*:)',
        read=calls_in_json(arguments=["parameters", "arguments"], more=["type", "id"], marked_only=False),
    )


class Llama4PythonicParser(BlockParser):
    """``[NAME(key=value), …]`` at the start of a line, or between ``<|python_start|>`` and ``<|python_end|>``.

    Without the tags, a list that cannot be read is content unless it begins with the name of a tool.
    """

    format = Format(
        section=(r"<\|python_start\|>(?!\s*\[\s*[A-Za-z_][\w.\-]*\()", r"<\|python_end\|>"),
        opening=r"(?:<\|python_start\|>\s*|(?m:^)[ \t]*)(?=\[\s*[A-Za-z_][\w.\-]*\()",
        read=read_python,
    )


class Lfm2Parser(BlockParser):
    """``<|tool_call_start|>[NAME(key=value), …]<|tool_call_end|>``."""

    format = Format(opening=r"<\|tool_call_start\|>", read=read_python, closing="<|tool_call_end|>")


class Olmo3Parser(BlockParser):
    """``<function_calls>``, with one ``NAME(key=value)`` per line and JSON's true, false and null."""

    format = Format(opening="<function_calls>", read=read_python, closing="</function_calls>")


class Gemma4Parser(BlockParser):
    """``<|tool_call>call:NAME{key:<|"|>text<|"|>,number:3}<tool_call|>``; reasoning in ``<|channel>thought``."""

    format = Format(
        opening=r"<\|tool_call>",
        header=rf"call:{_NAME}\s*(?=\{{)",
        read=read_fields,
        closing="<tool_call|>",
        reasoning=("<|channel>thought", "<channel|>"),
    )


class GraniteParser(BlockParser):
    """Granite 3: ``<|tool_call|>[{"name": …, "arguments": {…}}]``. Granite 4 writes Hermes's format."""

    format = Format(opening=r"<\|tool_call\|>|<tool_call>(?=\s*\[)", read=calls_in_json(more=["id"], lists=True))


class NemotronParser(BlockParser):
    """Nemotron 2: ``<TOOLCALL>[{"name": …, "arguments": {…}}]</TOOLCALL>``. Nemotron 3 writes Qwen 3 Coder's format."""

    format = Format(opening="<TOOLCALL>", read=calls_in_json(more=["id"], lists=True), closing="</TOOLCALL>")


class XlamParser(BlockParser):
    """xLAM: ``[{"name": …, "arguments": {…}}, …]`` at the start of a line.

    There is no mark: a list of which no object has arguments is content.
    """

    format = Format(
        opening=r'(?m:^)[ \t]*(?=\[\s*\{\s*"(?:name|arguments)"\s*:)',
        read=calls_in_json(more=["id"], lists=True, marked_only=False),
    )


class Phi4MiniParser(BlockParser):
    """Phi-4-mini: ``functools[{"name": …, "arguments": {…}}, …]``."""

    format = Format(opening=r"functools(?=\s*\[)", read=calls_in_json(more=["id"], lists=True))


class InternLM2Parser(BlockParser):
    """InternLM 2: ``<|action_start|><|plugin|>{"name": …, "parameters": {…}}<|action_end|>``.

    An action of the interpreter is code, not a call.
    """

    format = Format(
        opening=r"<\|action_start\|>\s*<\|plugin\|>",
        read=calls_in_json(arguments=["parameters", "arguments"]),
        closing="<|action_end|>",
    )
