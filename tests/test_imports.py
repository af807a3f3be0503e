"""The import rules of the tree: which part may know which."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "agentrl_core"

# From the bottom to the top; a part may import its own layer and those below.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("api",),
    ("engine_kit",),
    ("plugins", "config", "protocol"),
    ("controller", "data", "algorithms"),
    ("hosting", "runs"),
    ("workers",),
    ("fsdp2",),
    ("serving",),
    ("rollout",),
    ("trainer",),
    ("cli",),
)
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
LIGHT_PARTS = ("api", "engine_kit", "plugins", "config", "cli")
HEAVY_MODULES = {"torch", "ray", "transformers", "tensordict", "datasets", "vllm", "sglang"}
EXTENDS = {
    "agentrl-backend-megatron": ("fsdp2",),
    "agentrl-compat-verl": ("protocol", "controller"),
    "agentrl-engines": ("cli", "config", "plugins", "serving", "trainer"),
    "agentrl-plan": (
        "", "cli", "config", "controller", "protocol", "fsdp2", "rollout", "serving", "trainer",
        "workers",
    ),
    "agentrl-tinker": ("algorithms", "cli", "config", "fsdp2", "plugins", "runs", "workers"),
    "agentrl-viewer": ("cli", "config", "runs"),
    "agentrl-testing": (
        "algorithms", "cli", "config", "controller", "data", "hosting", "plugins", "rollout", "runs", "serving",
        "trainer",
    ),
}  # fmt: skip
"""Parts of the core that a plugin knows: agentrl-backend-megatron reads checkpoints of fsdp2, agentrl-compat-verl has
verl's further operations of batches and worker groups, agentrl-plan runs the workers on tensors without data,
agentrl-tinker trains a model that the workers load, agentrl-testing runs plugins as the core does."""
TESTING = "agentrl_testing"
TRIED = {"agentrl-testing": {"agentrl_algorithms", "agentrl_engine_hf"}}
"""Packages of plugins that the tests of another one use: the contract suites are tried on them."""
RAY_MODULES = set((CORE / "controller").glob("ray_*.py"))


@dataclass(frozen=True)
class Import:
    """One import statement; ``eager``: it runs when the module is imported."""

    file: Path
    line: int
    module: str
    eager: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


@cache
def imports_of(file: Path) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, eager: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(file, node.lineno, alias.name, eager) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import; write the whole name"
            # `from agentrl_core import cli` imports agentrl_core.cli.
            for alias in node.names:
                module = f"{node.module}.{alias.name}" if node.module == "agentrl_core" else str(node.module)
                found.append(Import(file, node.lineno, module, eager))
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_type_checking(node)
        for child in ast.iter_child_nodes(node):
            visit(child, eager and not lazy)

    visit(ast.parse(file.read_text(encoding="utf-8"), filename=str(file)), eager=True)
    return found


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def python_files(*folders: Path) -> list[Path]:
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


def core_imports() -> Iterator[tuple[str, Import]]:
    """Every import in a part of the core, with the part's name."""
    for file in python_files(CORE):
        part = file.relative_to(CORE).parts[0]
        for statement in imports_of(file):
            yield part, statement


def part_of(module: str) -> str:
    """``rollout`` for ``agentrl_core.rollout.session``; empty for what is not a part of the core."""
    root, _, rest = module.partition(".")
    return rest.partition(".")[0] if root == "agentrl_core" else ""


def is_in(module: str, packages: set[str]) -> bool:
    return module.partition(".")[0] in packages


def plugin_folders() -> list[Path]:
    """Ours, and the example of an outsider, who has to live by the same rules."""
    files = [*ROOT.glob("plugins/*/*/pyproject.toml"), *ROOT.glob("examples/third_party/*/pyproject.toml")]
    return sorted(file.parent for file in files)


def packages_of(folder: Path) -> set[str]:
    return {each.name for each in (folder / "src").iterdir() if each.is_dir() and each.suffix != ".egg-info"}


def test_every_part_has_a_layer() -> None:
    parts = {folder.name for folder in CORE.iterdir() if (folder / "__init__.py").exists()}
    assert parts == set(RANK)


def test_imports_point_one_way() -> None:
    wrong = [
        str(statement)
        for part, statement in core_imports()
        if part in RANK and RANK.get(part_of(statement.module), -1) > RANK[part]
    ]
    assert wrong == []


def test_parts_do_not_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {part: set() for part in RANK}
    for part, statement in core_imports():
        if part in RANK and part_of(statement.module) in RANK and part_of(statement.module) != part:
            graph[part].add(part_of(statement.module))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"circle: {' -> '.join(error.args[1])}")


def test_api_imports_nothing_of_ours() -> None:
    wrong = [str(each) for part, each in core_imports() if part == "api" and part_of(each.module) not in ("", "api")]
    assert wrong == []


def test_light_parts_import_nothing_heavy() -> None:
    wrong = [
        str(each)
        for part, each in core_imports()
        if part in (*LIGHT_PARTS, "__init__.py") and each.eager and is_in(each.module, HEAVY_MODULES)
    ]
    assert wrong == []


def test_ray_is_imported_in_one_module_only() -> None:
    wrong = [str(each) for _, each in core_imports() if each.file not in RAY_MODULES and is_in(each.module, {"ray"})]
    assert wrong == []


def test_core_imports_no_plugin_package() -> None:
    packages = set().union(*(packages_of(folder) for folder in plugin_folders()))
    assert packages, "no plugin folders found"
    assert [str(each) for _, each in core_imports() if is_in(each.module, packages)] == []


@pytest.mark.parametrize("folder", plugin_folders(), ids=lambda folder: folder.name)
def test_plugin_imports_only_the_api_and_the_engine_kit(folder: Path) -> None:
    others = set().union(*(packages_of(each) for each in plugin_folders() if each != folder))
    statements = [each for file in python_files(folder / "src") for each in imports_of(file)]
    assert [str(each) for each in statements if is_in(each.module, others)] == []
    wrong = [
        str(each)
        for each in statements
        if is_in(each.module, {"agentrl_core"})
        and part_of(each.module) not in ("api", "engine_kit", *EXTENDS.get(folder.name, ()))
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", plugin_folders(), ids=lambda folder: folder.name)
def test_tests_of_a_plugin_import_only_the_api_the_engine_kit_and_the_testing_helpers(folder: Path) -> None:
    others = set().union(*(packages_of(each) for each in plugin_folders() if each != folder))
    statements = [each for file in python_files(folder / "tests") for each in imports_of(file)]
    wrong = [
        str(each)
        for each in statements
        if is_in(each.module, others - {TESTING} - TRIED.get(folder.name, set()))
        or (
            is_in(each.module, {"agentrl_core"})
            and part_of(each.module) not in ("api", "engine_kit", *EXTENDS.get(folder.name, ()))
        )
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", plugin_folders(), ids=lambda folder: folder.name)
def test_specs_of_a_plugin_import_nothing_heavy(folder: Path) -> None:
    for package in packages_of(folder):
        source = folder / "src" / package
        assert (source / "__init__.py").read_text(encoding="utf-8") == "", "__init__.py of a plugin stays empty"
        light = [file for file in (source / "plugin.py", source / "config.py") if file.exists()]
        statements = [each for file in light for each in imports_of(file)]
        assert [str(each) for each in statements if is_in(each.module, HEAVY_MODULES)] == []


def test_every_package_of_the_core_begins_with_what_it_owns() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    for init in CORE.glob("*/__init__.py"):
        text = init.read_text()
        assert text.startswith('"""'), f"{init.relative_to(ROOT)}: begin with what the package owns"
        assert f"`{init.parent.name}/`" in page, f"docs/architecture.md: the table of packages lacks {init.parent.name}"
