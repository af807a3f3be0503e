"""The suites of all engines on real weights, kept by a real SGLang server."""

from collections.abc import Callable

import pytest

from tests_real.engine_suite import Case, GenerationSuite, WeightsSuite


class TestGeneration(GenerationSuite):
    @pytest.fixture
    def case(self, serve: Callable[[str], Case]) -> Case:
        return serve("files")


class TestWeights(WeightsSuite):
    """The output layer is tied to the embedding by one transport, and not by the other."""

    @pytest.fixture(params=["files", "broadcast"])
    def case(self, request: pytest.FixtureRequest, serve: Callable[[str], Case]) -> Case:
        return serve(request.param)
