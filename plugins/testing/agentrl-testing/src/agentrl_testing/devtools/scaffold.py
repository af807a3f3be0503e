"""Writes a new plugin package from the templates of ``agentrl_testing/templates``.

``common`` holds the files that every kind has, a folder per kind the rest. A file's path loses ``.tmpl`` and has
``__package__`` replaced; its text is a :class:`string.Template`. ``steps.md`` and ``slot.yaml`` go into the README.
"""

import difflib
import keyword
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

import agentrl_core.api
from agentrl_core.api.errors import PluginConflictError, PluginError
from agentrl_core.api.plugin import KINDS
from agentrl_core.plugins.registration import registrations, same_package

_NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_SUFFIX = ".tmpl"
_TEMPLATES = files("agentrl_testing") / "templates"
_IN_README = {"steps": "steps.md.tmpl", "yaml": "slot.yaml.tmpl"}


@dataclass(frozen=True)
class _Recipe:
    """What one kind adds to its templates: ``noun`` ends the class's name, ``module`` holds the class."""

    noun: str
    module: str
    summary: str
    capabilities: tuple[str, ...] = ()
    dependencies: tuple[str, ...] = ()


_RECIPES = {
    "agent_loop": _Recipe("Loop", "loop", "calls tools until the model answers", ("tools",)),
    "engine": _Recipe(
        "Engine",
        "engine",
        "samples with transformers, one request at a time",
        ("logprobs", "seeds", "weight_update"),
        ("torch>=2.11", "transformers>=5.16"),
    ),  # fmt: skip
    "tool": _Recipe("Tool", "tool", "counts the words of a text"),
    "renderer": _Recipe("Renderer", "renderer", "the chat template, and calls as JSON in tags"),
    "tool_parser": _Recipe("Parser", "parser", "reads calls written as JSON in tags"),
    "interaction": _Recipe("Interaction", "interaction", "asks again until the answer is right"),
    "environment": _Recipe("Environment", "environment", "asks for the sum of two numbers"),
    "reward_manager": _Recipe("Manager", "manager", "scales the weighted sum of the functions"),
    "reward_function": _Recipe("Reward", "reward", "1 if the last turn ends with the ground truth"),
    "advantage_estimator": _Recipe("Estimator", "estimator", "the reward above a baseline"),
    "policy_loss": _Recipe("Loss", "loss", "policy gradient with a truncated importance weight"),
    "rollout_correction": _Recipe("Correction", "correction", "truncated importance weight per token"),
    "dataset": _Recipe("Dataset", "dataset", "questions and answers from JSON lines"),
    "sampler": _Recipe("Sampler", "sampler", "short prompts before long ones"),
    "batch_policy": _Recipe("Policy", "policy", "trains groups in the order in which they started"),
    "training_backend": _Recipe(
        "Backend",
        "backend",
        "trains a model of transformers in one process",
        ("all_weights", "entropies", "temperature"),
        ("torch>=2.11", "transformers>=5.16", "safetensors>=0.5"),
    ),  # fmt: skip
    "tracker": _Recipe("Tracker", "tracker", "metrics as lines of a CSV file"),
    "hook": _Recipe("Hooks", "hooks", "keeps the step with the best value of a metric"),
}


def scaffold(kind: str, name: str, output: Path) -> Path:
    """Write the package of a new plugin, which installs and passes its own tests, to ``output / name``.

    Args:
        kind: a key of :data:`~agentrl_core.api.KINDS`; ``-`` counts as ``_``.
        name: of plugin, distribution and folder; the import name has ``_`` in place of ``-``.
        output: the parent folder, created if it is missing.

    Returns:
        The new folder.

    Raises:
        PluginError: unknown kind, invalid name, or the folder exists.
        PluginConflictError: another package has a plugin of this kind and name already.
    """
    kind = _known(kind)
    _check_name(kind, name)
    folder = output / name
    if folder.exists():
        raise PluginError(f"{folder} exists already. Choose another name, or another folder with --output")
    for path, text in render(kind, name).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return folder


def render(kind: str, name: str) -> dict[str, str]:
    """Render the files of a package: text by path below its folder. ``kind`` and ``name`` were checked before."""
    values = _values(kind, name)
    own = _TEMPLATES / kind
    for key, file in _IN_README.items():
        text = Template((own / file).read_text(encoding="utf-8")).substitute(values)
        values[key] = text.rstrip("\n")
    rendered = {}
    for path, source in [*_walk(_TEMPLATES / "common", ""), *_walk(own, "")]:
        if path not in _IN_README.values():
            target = path.removesuffix(_SUFFIX).replace("__package__", values["package"])
            rendered[target] = Template(source.read_text(encoding="utf-8")).substitute(values)
    return rendered


def _values(kind: str, name: str) -> dict[str, str]:
    recipe, about = _RECIPES[kind], KINDS[kind]
    camel = "".join(word.capitalize() for word in re.split("[_-]", name))
    stem = camel.removesuffix(recipe.noun)
    cls = stem + recipe.noun
    if not stem or cls in agentrl_core.api.__all__:
        # A class of the API has this name, and the module imports it.
        stem, cls = f"My{stem}", f"My{cls}"
    dependencies = ("agentrl-core", *recipe.dependencies)
    names = ", ".join(f'"{name}"' for name in recipe.capabilities)
    return {
        "kind": kind,
        "title": about.title,
        "group": about.group,
        "api_version": str(about.api_version),
        "name": name,
        "dist": name.replace("_", "-"),
        "package": name.replace("-", "_"),
        "cls": cls,
        "config": f"{stem}Config",
        "module": recipe.module,
        "summary": recipe.summary,
        "capabilities": f"\n    capabilities=frozenset({{{names}}})," if names else "",
        "dependencies": ", ".join(f'"{name}"' for name in dependencies),
    }


def _known(kind: str) -> str:
    plain = kind.replace("-", "_")
    if plain in KINDS:
        return plain
    close = difflib.get_close_matches(plain, KINDS, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise PluginError(f"unknown kind {kind!r}: {hint}Allowed are {', '.join(KINDS)}")


def _check_name(kind: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise PluginError(
            f"the name {name!r} cannot be used: it must begin with a lower-case letter and hold only lower-case "
            "letters, digits, and '-' or '_' between them, such as 'word-count'"
        )
    package = name.replace("-", "_")
    if keyword.iskeyword(package) or package in sys.stdlib_module_names or package == "agentrl_core":
        raise PluginError(f"the name {name!r} cannot be used: {package!r} is a word or module of Python or of agentrl")
    for each in registrations():
        if (each.kind, each.name) == (kind, name) and not same_package(each.dist, name):
            raise PluginConflictError(
                f"{each.title} exists already, in package {each.package}: choose another name, because two packages "
                "with the same name are ambiguous in every configuration"
            )


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(_SUFFIX):
            yield prefix + entry.name, entry
