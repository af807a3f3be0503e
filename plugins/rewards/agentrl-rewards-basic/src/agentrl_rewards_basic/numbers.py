"""Numbers in text: one value for ``1665``, ``1,665``, ``$1665`` and ``1665.00``."""

import re
from decimal import Decimal

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_WHOLE = re.compile(rf"([+-]?)\$?([+-]?)({_DIGITS})\.?")
# A minus between two operands ("12-3") subtracts; only elsewhere is it a sign.
_INSIDE = re.compile(rf"(?:(?<![\w.)])(-))?\$?(?:(?<![\w.)])(-))?({_DIGITS})")


def parse_number(text: str) -> Decimal | None:
    """The number that a text is, None if it is anything else."""
    match = _WHOLE.fullmatch(text.strip())
    return _decimal(match) if match else None


def normal_form(text: str) -> str:
    """One text for all forms of a number; anything else as it is."""
    number = parse_number(text)
    return text if number is None else f"{number.normalize():f}"


def last_number(text: str) -> Decimal | None:
    """The last number in a text."""
    matches = list(_INSIDE.finditer(text))
    return _decimal(matches[-1]) if matches else None


def _decimal(match: re.Match[str]) -> Decimal | None:
    outer, inner, digits = match.groups()
    if outer and inner:
        return None
    return Decimal((outer or inner or "") + digits.replace(",", ""))
