from dataclasses import dataclass

import pytest

from agentrl_testing.contracts import ToolCase, ToolContract


@dataclass
class Silent:
    limit: int = 3


class Demanding:
    def __init__(self, config, context, more):
        raise AssertionError("never built")


def case(spec, factory=Demanding, **fields):
    return ToolCase(spec("tool", factory, **fields), arguments={})


def test_a_spec_without_a_summary_or_with_an_unknown_capability_is_caught(spec) -> None:
    with pytest.raises(AssertionError, match="summary is empty"):
        ToolContract().test_spec_is_complete(case(spec, summary=""))
    with pytest.raises(AssertionError, match="unknown capability 'flies'"):
        ToolContract().test_spec_is_complete(case(spec, capabilities=frozenset({"flies"})))


def test_an_option_without_help_is_caught(spec) -> None:
    with pytest.raises(AssertionError, match=r"options of Silent without help: \['limit'\]"):
        ToolContract().test_config_can_be_made_and_documents_its_options(case(spec, config=Silent))


def test_a_factory_with_other_arguments_is_caught(spec) -> None:
    with pytest.raises(AssertionError, match="cannot be called with"):
        ToolContract().test_factory_takes_config_and_context(case(spec))


def test_a_suite_without_its_fixture_says_so(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from agentrl_testing.contracts import ToolContract

        class TestNothing(ToolContract):
            pass
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "spec_is_complete")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*TestNothing must define the fixture `plugin`*"])


def test_the_base_classes_are_not_collected(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("from agentrl_testing.contracts import *")
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes()
