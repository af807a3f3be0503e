"""The suites of all engines on real weights, kept by a real vLLM."""

from agentrl_engine_vllm.launch import CPU_BLOCK_SIZE
from tests_real.engine_suite import GenerationSuite, WeightsSuite


class TestGeneration(GenerationSuite):
    block = CPU_BLOCK_SIZE


class TestWeights(WeightsSuite):
    block = CPU_BLOCK_SIZE
    forgets_weights = True
