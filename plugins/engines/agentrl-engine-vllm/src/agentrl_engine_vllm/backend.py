"""What runs inside vLLM's worker processes: the weight transfer backend and the sampler's log-probabilities.

Only vLLM imports what needs vLLM here. :func:`register` is an entry point that it calls in each of its processes.
"""

from typing import Any

from agentrl_engine_vllm.launch import BACKEND


def register() -> None:
    """Make the backend known to vLLM; may be called again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "agentrl_engine_vllm.transfer", "FileTransferEngine")
    except ValueError:
        return  # it is there already


class WorkerExtension:
    """Mixed into vLLM's worker class, so that ``collective_rpc`` can call it."""

    model_runner: Any

    def agentrl_score_whole_distribution(self) -> None:
        """Log-probabilities are from now on those before top-p and top-k.

        Raises:
            RuntimeError: this version of vLLM samples elsewhere.
        """
        from agentrl_engine_vllm.sampler import WholeDistribution

        sampler = getattr(self.model_runner, "sampler", None)
        if not hasattr(sampler, "topk_topp_sampler"):
            raise RuntimeError(
                f"{type(self.model_runner).__module__} samples without a topk_topp_sampler; agentrl-engine-vllm needs "
                "vLLM's first model runner: leave VLLM_USE_V2_MODEL_RUNNER=0"
            )
        if not isinstance(sampler.topk_topp_sampler, WholeDistribution):
            sampler.topk_topp_sampler = WholeDistribution(sampler.topk_topp_sampler)
