"""What runs inside vLLM's processes: the weight transfer backend, questions to the model, a watch.

Only vLLM imports what needs vLLM here. :func:`register` is an entry point that it calls in each of its processes.
"""

import multiprocessing
import os
import signal
import threading
from typing import Any

from agentrl_engine_vllm.launch import BACKEND, WATCH_VARIABLE


def register() -> None:
    """Make the backend known to vLLM, and see that a process of our engine ends with its parent.

    May be called again.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "agentrl_engine_vllm.transfer", "TransferEngine")
    except ValueError:
        return  # it is there already
    if os.environ.get(WATCH_VARIABLE):
        threading.Thread(target=_end_with_parent, name="agentrl-parent-watch", daemon=True).start()


def _end_with_parent() -> None:
    # After a server was killed vLLM's core takes a minute and more to notice, and holds its memory so long.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


class WorkerExtension:
    """Mixed into vLLM's worker class, so that ``collective_rpc`` can call it."""

    model_runner: Any

    def agentrl_score_whole_distribution(self, reserved_ids: list[int]) -> None:
        """Log-probabilities are from now on those before min-p, top-p and top-k; on a CPU, with adapters, also those of
        requests without one.

        Args:
            reserved_ids: that are never sampled, and whose probabilities count all the same.

        Raises:
            RuntimeError: this version of vLLM samples elsewhere.
        """
        from agentrl_engine_vllm.adapters import correct_rows_without_adapter
        from agentrl_engine_vllm.generators import Rewinder
        from agentrl_engine_vllm.sampler import WholeDistribution, before_min_p, without_reserved

        self._prepare_stage()
        sampler = getattr(self.model_runner, "sampler", None)
        if not hasattr(sampler, "topk_topp_sampler"):
            raise RuntimeError(
                f"{type(self.model_runner).__module__} samples without a topk_topp_sampler; agentrl-engine-vllm needs "
                "vLLM's first model runner: leave VLLM_USE_V2_MODEL_RUNNER=0"
            )
        if not isinstance(sampler.topk_topp_sampler, WholeDistribution):
            on_cpu = self.model_runner.device.type == "cpu"
            if on_cpu and self.model_runner.lora_config is not None:
                correct_rows_without_adapter()
            before = [Rewinder(self.model_runner).before_sampling] if on_cpu else []
            sampler.topk_topp_sampler = WholeDistribution(sampler.topk_topp_sampler, *before)
            sampler.sample = before_min_p(sampler.sample)
            if reserved_ids:
                sampler.sample = without_reserved(sampler.sample, reserved_ids)

    def _prepare_stage(self) -> None:
        # What a pipeline stage receives goes into tensors that vLLM makes as it measures memory: not on a CPU.
        runner = self.model_runner
        if runner.device.type == "cpu" and runner.parallel_config.pipeline_parallel_size > 1:
            runner._dummy_run(runner.max_num_tokens)
