"""Reads the words of a shell script's commands without running anything.

Variables, arrays, defaults such as ``${N:-8}``, sums, ``$(pwd)`` and the script's own folder are replaced.
Branches whose condition is known are followed; of the others the first value stays, and the rest are its alternatives.
What cannot be known, such as the output of a command, stays in the text with its ``$``.
"""

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl_core.api import ConfigError

_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
_DECLARES = ("export", "local", "readonly", "declare", "typeset")
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_PARAMETER = re.compile(r"^(\w+)(?::?([-=+])(.*))?$", re.DOTALL)
_PATTERN = re.compile(r"[^\n;&()]*\)")
_ALL = re.compile(r"^\w+\[[@*]\]$")
_BITS = 64
"""Of a number in a shell; larger ones wrap around there."""
_LONGEST = 100_000
"""Characters of a word; the kernel takes no longer one than 128 KiB."""
_HERE = re.compile(r"^<<-?\s*(['\"]?)(\w+)\1")


@dataclass
class Word:
    """``text`` with variables replaced; ``alternatives``: what other branches of the script would give."""

    text: str
    alternatives: tuple[str, ...] = ()


@dataclass
class _Branch:
    """An ``if``, ``case`` or loop; ``known``: whether the branch that is being read is taken, None: unknown."""

    kind: str
    subject: str = ""
    known: bool | None = None
    done: bool = False


@dataclass
class Script:
    """The commands of a script.

    Args:
        text: of the script.
        environment: values of variables that the script does not set.
        folder: of the script; None: unknown.
    """

    text: str
    environment: Mapping[str, str]
    folder: Path | None = None
    commands: list[list[Word]] = field(default_factory=list)
    _variables: dict[str, Word] = field(default_factory=dict)
    _arrays: dict[str, list[Word]] = field(default_factory=dict)
    _branches: list[_Branch] = field(default_factory=list)
    _at: int = 0

    def __post_init__(self) -> None:
        self.text = self.text.replace("\\\r\n", " ").replace("\\\n", " ")
        while self._at < len(self.text):
            self._statement()

    # Statements -----------------------------------------------------------------------------------------------------

    def _statement(self) -> None:
        """Up to the end of a line, or to a separator."""
        raw: list[str] = []
        array: list[Word] | None = None
        here: str | None = None
        while self._at < len(self.text):
            char = self.text[self._at]
            if char in " \t\r":
                self._at += 1
            elif char == "#":
                self._at = self._end_of_line()
            elif char == "<" and (found := _HERE.match(self.text[self._at : self._at + _LONGEST])):
                here, self._at = found[2], self._at + found.end()
            elif array is not None and char == ")":
                self._at += 1
                self._keep_array(raw.pop(), array)
                array = None
            elif char in "\n;&|()" and array is not None:
                self._at += 1
            elif char in "\n;&|()":
                self._at += 1
                if char == ")" and self._branches and self._branches[-1].kind == "case" and raw:
                    self._pattern(raw)
                    return
                if char == ";" and self.text[self._at : self._at + 1] == ";":
                    self._at += 1
                if char == "\n" and here is not None:
                    self._skip_document(here)
                if char == "|" and self._in_case():
                    continue
                break
            else:
                word = self._raw_word()
                if array is not None:
                    array += self._expanded_all(word)
                elif re.fullmatch(r"\w+\+?=", word) and self.text[self._at : self._at + 1] == "(":
                    self._at += 1
                    array = []
                    raw.append(word)
                else:
                    raw.append(word)
        if raw:
            self._do(raw)

    def _in_case(self) -> bool:
        """Within a pattern such as ``a|b)``."""
        in_case = bool(self._branches) and self._branches[-1].kind == "case"
        return in_case and _PATTERN.match(self.text, self._at) is not None

    def _do(self, raw: list[str]) -> None:
        first, *rest = raw
        if first in ("if", "elif", "while", "until", "for", "case"):
            self._begin(first, rest)
        elif first in ("fi", "done", "esac") and self._branches:
            self._branches.pop()
        elif first == "else" and self._branches:
            self._next(None if self._branches[-1].known is None else True)
            self._do_rest(rest)
        elif first in ("then", "do", "{", "!", "time", "exec"):
            self._do_rest(rest)
        elif all(branch.known is not False for branch in self._branches):
            self._run(raw)

    def _do_rest(self, rest: list[str]) -> None:
        if rest:
            self._do(rest)

    def _begin(self, first: str, rest: list[str]) -> None:
        if first == "elif" and self._branches:
            self._next(self._holds(rest))
            return
        branch = _Branch("case" if first == "case" else "if")
        if first == "case":
            branch.subject = self._expanded(rest[0]).text if rest else "$"
        elif first == "if":
            branch.known = self._holds(rest)
            branch.done = branch.known is True
        elif first == "for" and len(rest) > 2 and rest[1] == "in":
            values = [word for item in rest[2:] for word in self._expanded_all(item)]
            texts = [word.text for word in values]
            self._variables[rest[0]] = Word(texts[0], tuple(texts[1:])) if texts else Word("$")
            branch.known = True
        self._branches.append(branch)

    def _next(self, holds: bool | None) -> None:
        """Another branch of the same statement."""
        branch = self._branches[-1]
        branch.known = False if branch.done else holds
        branch.done = branch.done or holds is True

    def _pattern(self, raw: list[str]) -> None:
        branch = self._branches[-1]
        texts = [self._expanded(word).text for word in raw if word not in ("in", "esac")]
        known = None if "$" in branch.subject else any(fnmatch.fnmatchcase(branch.subject, text) for text in texts)
        if known is None and texts == ["*"]:
            # What is left over is an error message in most scripts.
            known = False
        self._next(known)

    def _holds(self, words: list[str]) -> bool | None:
        """Whether a test of strings or numbers is true."""
        texts = [self._expanded(word).text for word in words if word not in ("[", "[[", "]", "]]", "test")]
        if any("$" in text or "`" in text for text in texts):
            return None
        match texts:
            case ["-z", text]:
                return not text
            case ["-n", text]:
                return bool(text)
            case [left, "=" | "==" | "-eq", right]:
                return left == right
            case [left, "!=" | "-ne", right]:
                return left != right
        return None

    def _run(self, raw: list[str]) -> None:
        """Assignments, or a command."""
        if raw[0] in _DECLARES:
            raw = [word for word in raw[1:] if not word.startswith("-")]
            assigns_only = True
        else:
            assigns_only = all(_ASSIGNMENT.match(word) and "." not in word.split("=")[0] for word in raw)
        for word in raw:
            assigned = _ASSIGNMENT.match(word)
            if not assigned:
                break
            self._assign(assigned[1], self._expanded(assigned[3]), bool(assigned[2]))
        if not assigns_only:
            self.commands.append([word for item in raw for word in self._expanded_all(item)])

    def _assign(self, name: str, value: Word, adds: bool) -> None:
        before = self._variables.get(name)
        if adds:
            value = Word((before.text if before else "") + value.text, value.alternatives)
        if len(value.text) > _LONGEST:
            raise ConfigError(f"the variable {name} has more than {_LONGEST} characters")
        if before is not None and self._unsure:
            if before.text != value.text:
                self._variables[name] = Word(before.text, (*before.alternatives, value.text))
            return
        self._variables[name] = value

    def _keep_array(self, target: str, words: list[Word]) -> None:
        if any(branch.known is False for branch in self._branches):
            return
        name = target.rstrip("+=")
        before = self._arrays.get(name, [])
        if target.endswith("+="):
            # It is there in one branch only.
            added = [Word(word.text, (*word.alternatives, "nothing")) for word in words] if self._unsure else words
            self._arrays[name] = before + added
        elif not (before and self._unsure):
            self._arrays[name] = words

    @property
    def _unsure(self) -> bool:
        return any(branch.known is None for branch in self._branches)

    # Words ----------------------------------------------------------------------------------------------------------

    def _end_of_line(self) -> int:
        end = self.text.find("\n", self._at)
        return len(self.text) if end < 0 else end

    def _skip_document(self, mark: str) -> None:
        found = re.compile(rf"^\s*{mark}\s*$", re.MULTILINE).search(self.text, self._at)
        self._at = found.end() if found else len(self.text)

    def _raw_word(self) -> str:
        start = self._at
        self._at = _end_of_word(self.text, start)
        return self.text[start : self._at]

    def _expanded_all(self, raw: str) -> list[Word]:
        """The words that one becomes: those of an array, or itself."""
        inner = raw.strip('"')
        if inner in ("$@", "$*", "${@}", "${*}"):
            return []
        if inner.startswith("${") and inner.endswith("}") and _ALL.match(inner[2:-1]):
            return list(self._arrays.get(inner[2:].split("[")[0], [Word(inner)]))
        word = self._expanded(raw)
        # Without quotation marks a variable may hold several words.
        if raw.startswith("$") and " " in word.text:
            return [Word(part, word.alternatives) for part in word.text.split()]
        return [word]

    def _expanded(self, raw: str, quoted: bool = False) -> Word:
        text, alternatives, at = "", [], 0
        while at < len(raw):
            char = raw[at]
            if char == "'" and not quoted:
                end = raw.find("'", at + 1)
                end = len(raw) if end < 0 else end
                text += raw[at + 1 : end]
                at = end + 1
            elif char == '"' and not quoted:
                end = _end_of_quotation(raw, at)
                inner = self._expanded(raw[at + 1 : end - 1], quoted=True)
                alternatives += [text + other for other in inner.alternatives]
                text += inner.text
                at = end
            elif char == "\\":
                keeps = quoted and raw[at + 1 : at + 2] not in ('"', "\\", "$", "`")
                text += raw[at : at + 2] if keeps else raw[at + 1 : at + 2]
                at += 2
            elif char in "$`":
                end = _end_of_expansion(raw, at)
                found = self._value(raw[at:end])
                alternatives += [text + other for other in found.alternatives]
                text += found.text
                at = end
            else:
                text += char
                at += 1
        return Word(text, tuple(dict.fromkeys(other for other in alternatives if other != text)))

    def _value(self, raw: str) -> Word:
        """Of one ``$…``; itself if it cannot be known."""
        if raw.startswith("$(("):
            return Word(self._computed(raw[3:-2]) or raw)
        if raw.startswith("$(") or raw.startswith("`"):
            return Word(self._output(raw) or raw)
        body = raw[2:-1] if raw.startswith("${") else raw[1:]
        if body in ("BASH_SOURCE[0]", "BASH_SOURCE", "0"):
            return Word(str(self.folder / "script") if self.folder else raw)
        parameter = _PARAMETER.match(body)
        if parameter is None:
            return Word(raw)
        name, kind, other = parameter.groups()
        known = self._variables.get(name)
        if known is None and name in self.environment and name != "PWD":
            known = Word(self.environment[name])
        if name == "PWD":
            known = Word(".")
        if kind == "+":
            return self._expanded(other) if known is not None and known.text else Word("")
        if kind is not None and (known is None or not known.text):
            return self._expanded(other)
        return Word(raw) if known is None else known

    def _output(self, raw: str) -> str | None:
        """Of the commands that say where the script is, or was started."""
        inner = raw.strip("`").removeprefix("$(").removesuffix(")").strip()
        if inner == "pwd":
            return "."
        if self.folder and ("$0" in inner or "BASH_SOURCE" in inner) and "dirname" in inner:
            further = re.search(r"\)[\"']?((?:/\.\.)+)", inner)
            return str((self.folder / (further[1].lstrip("/") if further else ".")).resolve())
        return None

    def _computed(self, text: str) -> str | None:
        def number(node: ast.expr) -> int:
            if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
                left, right = number(node.left), number(node.right)
                if isinstance(node.op, ast.Pow) and not 0 <= right * left.bit_length() <= _BITS:
                    raise OverflowError
                return _OPERATORS[type(node.op)](left, right)
            if isinstance(node, ast.Name):
                return number(ast.parse(self._value(f"${node.id}").text, mode="eval").body)
            return int(ast.literal_eval(node))

        try:
            return str(number(ast.parse(self._expanded(text.strip()).text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, OverflowError, MemoryError):
            return None


def _end_of_word(text: str, at: int) -> int:
    while at < len(text) and text[at] not in " \t\r\n;&|()":
        char = text[at]
        if char == "\\":
            at += 2
        elif char == "'":
            end = text.find("'", at + 1)
            at = len(text) if end < 0 else end + 1
        elif char == '"':
            at = _end_of_quotation(text, at)
        elif char in "$`":
            at = _end_of_expansion(text, at)
        else:
            at += 1
    return at


def _end_of_quotation(text: str, at: int) -> int:
    at += 1
    while at < len(text) and text[at] != '"':
        at = at + 2 if text[at] == "\\" else _end_of_expansion(text, at) if text[at] in "$`" else at + 1
    return at + 1


def _end_of_expansion(text: str, at: int) -> int:
    """Of what begins with ``$`` or a backtick."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        return len(text) if end < 0 else end + 1
    opens = text[at + 1 : at + 2]
    if opens not in ("{", "("):
        name = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]").match(text, at + 1)
        return name.end() if name else at + 1
    closes, depth, at = {"{": "}", "(": ")"}[opens], 0, at + 1
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char == "'" and opens == "(":
            end = text.find("'", at + 1)
            at = len(text) if end < 0 else end
        elif char == opens:
            depth += 1
        elif char == closes:
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return at
