"""What all suites share: the plugin under test, and the checks of its spec."""

import asyncio
import dataclasses
import importlib
import inspect
import math
import operator
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import pytest

from agentrl_core.api import PluginSpec
from agentrl_core.plugins.spec import spec_problems

T = TypeVar("T")

DEADLINE = 60.0
"""Seconds after which a coroutine of a test has hung."""


@dataclass(kw_only=True)
class PluginCase:
    """The plugin under test.

    Args:
        spec: what the entry point names.
        config: an instance of the spec's config class; None builds one from its defaults.
    """

    spec: PluginSpec = dataclasses.field(kw_only=False)
    config: Any = None

    def build(self, context: Any) -> Any:
        """The object that the factory makes."""
        config = self.spec.config() if self.config is None else self.config
        return factory_of(self.spec)(config, context)

    def has(self, capability: str) -> bool:
        """The spec declares the capability."""
        return capability in self.spec.capabilities


class PluginContract:
    """Checks of the spec, which every suite has. Authors override the fixture ``plugin``."""

    kind: ClassVar[str]

    @pytest.fixture
    def plugin(self) -> Any:
        """The case under test."""
        pytest.fail(f"{type(self).__name__} must define the fixture `plugin`, which returns the case under test")

    def test_spec_is_complete(self, plugin: PluginCase) -> None:
        """Its kind, name, version, summary, capabilities and requirements are what the entry point needs."""
        problems = spec_problems(plugin.spec, self.kind, plugin.spec.name)
        assert not problems, "the spec is not right: " + "; ".join(problems)

    def test_config_can_be_made_and_documents_its_options(self, plugin: PluginCase) -> None:
        """The config is a dataclass, and each option has a help text."""
        cls = plugin.spec.config
        assert dataclasses.is_dataclass(cls), f"{cls.__name__} is not a dataclass"
        silent = [
            field.name for field in dataclasses.fields(cls) if not getattr(field.metadata.get("agentrl"), "help", "")
        ]
        assert not silent, f"options of {cls.__name__} without help: {silent}; declare them with option(help=…)"

    def test_factory_takes_config_and_context(self, plugin: PluginCase) -> None:
        """The factory can be imported and called with two arguments."""
        factory = factory_of(plugin.spec)
        try:
            inspect.signature(factory).bind(None, None)
        except TypeError as error:
            raise AssertionError(f"{plugin.spec.factory} cannot be called with (config, context): {error}") from error


def factory_of(spec: PluginSpec) -> Any:
    """The imported factory."""
    module, _, attribute = spec.factory.partition(":")
    return operator.attrgetter(attribute)(importlib.import_module(module))


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; one that hangs fails."""

    async def bounded() -> T:
        async with asyncio.timeout(DEADLINE):
            return await coroutine

    return asyncio.run(bounded())


def is_number(value: Any) -> bool:
    """A finite int, float or bool, also as a zero-dimensional array of some library."""
    try:
        return not isinstance(value, str | bytes) and math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def needs(plugin: PluginCase, *capabilities: str) -> None:
    """Skip a test of what the plugin does not claim to do."""
    for capability in capabilities:
        if not plugin.has(capability):
            pytest.skip(f"the plugin does not declare the capability {capability!r}")
