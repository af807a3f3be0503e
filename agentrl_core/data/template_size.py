"""What a chat template may compute: Jinja's sandbox limits ``range``, but not ``'x' * 10**10``."""

import math

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from agentrl_core.api import TemplateError

_LARGEST_FACTOR = 1_000_000


def check_template_size(template: str) -> None:
    """Reject a template that multiplies by a huge number: Jinja computes it when it compiles, and nothing stops it.

    Raises:
        TemplateError: naming the line.
    """
    environment = Environment(extensions=[_Generation, "jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(template)
    except TemplateSyntaxError:
        # Rendering says what is wrong.
        return
    for node in tree.find_all((nodes.Mul, nodes.Pow)):
        if _magnitude(node) > _LARGEST_FACTOR:
            raise TemplateError(
                f"the chat template multiplies by more than {_LARGEST_FACTOR:,} in line {node.lineno}, which would "
                "fill the memory. Set model.chat_template to a file with another template"
            )


def _magnitude(node: nodes.Node) -> float:
    """The number that an expression of constants is; text counts as 1, and what is not known too."""
    if isinstance(node, nodes.Const):
        return float(abs(node.value)) if isinstance(node.value, int | float) else 1.0
    if not isinstance(node, nodes.Mul | nodes.Pow):
        return 1.0
    left, right = _magnitude(node.left), _magnitude(node.right)
    try:
        return left**right if isinstance(node, nodes.Pow) else left * right
    except OverflowError:
        return math.inf


class _Generation(Extension):
    """The tag of transformers that marks what the policy said."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)
