import json

import pytest

from agentrl_core.testing.contracts import ToolParserCase, ToolParserContract
from agentrl_core.testing.tiny_model import CHATML_TEMPLATE
from agentrl_tool_parsers.plugin import HERMES


class TestHermes(ToolParserContract):
    @pytest.fixture
    def plugin(self) -> ToolParserCase:
        return ToolParserCase(
            HERMES,
            write=lambda name, arguments: (
                f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
            ),
            chat_templates={"chatml": CHATML_TEMPLATE},
        )
