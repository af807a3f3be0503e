"""Makes the package of a new plugin from the templates: it installs, and passes the contract of its kind."""

import difflib
import keyword
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from agentrl_core.api.errors import PluginError
from agentrl_core.api.plugin import KINDS

_NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_TORCH = ("torch>=2.11",)
_MODEL = (*_TORCH, "transformers>=5.16")


@dataclass(frozen=True)
class Blueprint:
    """What the templates of one kind are filled with.

    Args:
        summary: one line for the spec.
        option: the example option, a line of the config dataclass.
        hint: what the author changes.
        yaml: where a configuration names it; ``NAME`` stands for the plugin.
        capabilities: that the example has.
        requires: PEP 508 strings, besides agentrl-core.
        tests: what its tests need besides pytest.
    """

    summary: str
    option: str
    hint: str
    yaml: str
    capabilities: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()


_QUESTION = 'question: str = option("Check your answer.", help="what the policy is asked")'
_SCALE = 'scale: float = option(1.0, help="factor of the score")'
BLUEPRINTS = {
    "agent_loop": Blueprint(
        "asks the policy, then asks it to check its answer", _QUESTION,
        "`run` drives one trajectory; tokens go through `session.trajectory` only, so that nothing is tokenised twice.",
        "rollout:\n  agent:\n    name: NAME",
    ),
    "engine": Blueprint(
        "samples with a transformers model, one token after the other",
        'max_requests: int = option(8, ge=1, unit="requests", help="that are sampled at once")',
        "Declare in `plugin.py` what it can do (`abort`, `pause`, ...): each capability switches on its tests.",
        "rollout:\n  engine:\n    name: NAME",
        capabilities=("logprobs", "seeds", "weight_update"), requires=_MODEL, tests=("numpy", "safetensors"),
    ),
    "tool": Blueprint(
        "reverses a text", 'max_chars: int = option(1000, ge=1, unit="characters", help="that are read at most")',
        "`execute` is one call; an exception becomes an observation that the policy reads.",
        "tools:\n  - name: NAME",
    ),
    "tool_parser": Blueprint(
        '<call>{"name": ..., "arguments": ...}</call>',
        'max_calls: int = option(64, ge=1, unit="calls", help="that one turn may hold")',
        "`parse` must never raise, and must not lose a call without an error.",
        "rollout:\n  tool_parser:\n    name: NAME", tests=("hypothesis", "jinja2", "transformers>=5.16"),
    ),
    "interaction": Blueprint(
        "asks until a word is in the answer", _QUESTION,
        "`generate_response` answers the policy, and says whether the conversation ends.",
        "interactions:\n  - name: NAME",
    ),
    "reward_manager": Blueprint(
        "the weighted sum of the reward functions", _SCALE,
        "`score` makes one number of a trajectory; with the capability `group` also `score_group`.",
        "reward:\n  manager:\n    name: NAME",
    ),
    "reward_function": Blueprint(
        "1 if the ground truth is in the last turn", _SCALE,
        "`score` may be a coroutine function. It must return a finite number.",
        "reward:\n  functions:\n    - name: NAME", tests=("hypothesis",),
    ),
    "advantage_estimator": Blueprint(
        "every token gets the reward of its row", _SCALE,
        "Give the contract batches with known advantages, from the paper or by hand.",
        "algorithm:\n  advantage:\n    name: NAME", requires=_TORCH, tests=("numpy",),
    ),
    "policy_loss": Blueprint(
        "REINFORCE with a clipped importance ratio",
        'max_ratio: float = option(2.0, gt=0, help="largest importance ratio")',
        "Return losses per token: the core masks and aggregates them. Give the contract known values.",
        "algorithm:\n  loss:\n    name: NAME", requires=_TORCH,
    ),
    "dataset": Blueprint(
        "additions, made by index", 'rows: int = option(100, ge=1, unit="rows", help="how many there are")',
        "A row must be the same every time that it is asked for: a resumed run goes on with the same prompts.",
        "data:\n  dataset:\n    name: NAME",
    ),
    "tracker": Blueprint(
        "lines with tabs in a file of the run", 'file: str = option("metrics.tsv", help="name in the run directory")',
        "An exception ends the run: records are not lost in silence.",
        "trainer:\n  trackers:\n    - name: NAME",
    ),
    "hook": Blueprint(
        "tells when the reward is high", 'threshold: float = option(0.9, help="mean reward that is told")',
        "`agentrl_core.api.HookSpecs` lists all hooks.",
        "hooks:\n  - name: NAME",
    ),
}  # fmt: skip


def scaffold(kind: str, name: str, parent: Path) -> Path:
    """Write a package into ``parent / name`` and return that folder.

    Args:
        kind: a key of ``KINDS``; ``-`` may stand for ``_``.
        name: of the distribution: lower-case words with ``-`` or ``_`` between them.
        parent: an existing folder.

    Raises:
        PluginError: the kind or the name cannot be, or the folder exists.
    """
    kind = _known_kind(kind)
    module = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(module):
        raise PluginError(
            f"{name!r} cannot be the name of a package: write lower-case words with '-' between them, such as my-{kind}"
        )
    target = parent / name
    if target.exists():
        raise PluginError(f"{target} exists already: choose another name, or another folder with --output")
    for file, text in _render(kind, name, module).items():
        path = target / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return target


def _known_kind(kind: str) -> str:
    known = kind.replace("-", "_")
    if known not in KINDS:
        close = difflib.get_close_matches(known, KINDS, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise PluginError(f"there is no plugin kind {kind!r}{hint} Allowed are {', '.join(KINDS)}")
    return known


def _render(kind: str, name: str, module: str) -> dict[str, str]:
    blueprint = BLUEPRINTS[kind]
    class_name = "".join(word.capitalize() for word in module.split("_"))
    noun = "function" if kind == "reward_function" else kind if kind != module else "implementation"
    title = KINDS[kind].title
    values = {
        "kind": kind,
        "title": title,
        "article": "An" if title[0] in "aeio" else "A",
        "group": KINDS[kind].group,
        "api_version": str(KINDS[kind].api_version),
        "package": name,
        "module": module,
        "plugin": module,
        "class_name": class_name,
        "noun": noun,
        "factory": "build" if kind == "reward_function" else class_name,
        "summary": blueprint.summary.replace('"', '\\"'),
        "option": blueprint.option,
        "hint": blueprint.hint,
        "yaml": blueprint.yaml.replace("NAME", module),
        "more": _more(blueprint),
        "dependencies": _quoted(("agentrl-core", *blueprint.requires)),
        "test_dependencies": _quoted(("pytest>=8", *blueprint.tests)),
    }
    source = f"src/{module}"
    return {
        "pyproject.toml": _fill("common/pyproject.toml", values),
        "README.md": _fill("common/README.md", values),
        f"{source}/__init__.py": "",
        f"{source}/plugin.py": _fill("common/plugin.py", values),
        f"{source}/config.py": _fill("common/config.py", values),
        f"{source}/{noun}.py": _fill(f"{kind}/implementation.py", values),
        "tests/test_contract.py": _fill(f"{kind}/test_contract.py", values),
    }


def _more(blueprint: Blueprint) -> str:
    lines = []
    if blueprint.requires:
        comma = "," if len(blueprint.requires) == 1 else ""
        lines.append(f"requires=({_quoted(blueprint.requires)}{comma}),")
    if blueprint.capabilities:
        lines.append(f"capabilities=frozenset({{{_quoted(blueprint.capabilities)}}}),")
    return "".join(f"\n    {line}" for line in lines)


def _quoted(items: tuple[str, ...]) -> str:
    return ", ".join(f'"{item}"' for item in items)


def _fill(template: str, values: dict[str, str]) -> str:
    text = (files("agentrl_core") / "templates" / f"{template}.tmpl").read_text(encoding="utf-8")
    return Template(text).substitute(values)
