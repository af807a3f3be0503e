"""Updates on the CPU whose memory is predicted and measured."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import _functional_collectives
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from agentrl_core.config import ResolvedConfig, load_config
from agentrl_core.workers.actor import ActorWorker
from agentrl_core.workers.ranks import TrainingRanks
from agentrl_plan.batches import batch_of, full_micro_batch, samples_of_a_prompt
from agentrl_plan.workers import simulate

CONFIG = """
model: {{path: {path}, packing: {packing}, gradient_checkpointing: {checkpointing}, adapter: {adapter}}}
data: {{max_prompt_length: {prompt}, train_files: [none.jsonl]}}
rollout: {{n: 4, max_response_length: {response}, agent: {{loops: [{{name: single_turn}}]}}}}
reward: {{functions: [{{name: exact_match}}]}}
actor: {{micro_batch_tokens: {tokens}}}
trainer: {{backend: {{config: {mesh}}}}}
cluster: {{device: cpu}}
"""


COLLECTIVES = (
    "all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce",
    "all_to_all_single",
)  # fmt: skip
"""Those of FSDP2, by their names in torch 2.13 and before, and of meshes."""
SETTLED_SECONDS = 0.02


@dataclass(frozen=True)
class Case:
    """A model of ``layers`` layers of this width, and how it is trained."""

    width: int
    layers: int
    packing: bool
    checkpointing: bool
    ranks: int = 1
    vocabulary: int = 2048
    prompt: int = 96
    response: int = 128
    tokens: int = 1024
    adapter: dict[str, int] | None = None
    mesh: dict[str, int] = field(default_factory=dict)
    experts: int = 0


@contextmanager
def config_of(case: Case) -> Iterator[ResolvedConfig]:
    """Its configuration, with a model of random weights."""
    with tempfile.TemporaryDirectory(prefix="agentrl-plan-") as folder:
        path = Path(folder) / "model"
        sizes: dict[str, Any] = {
            "vocab_size": case.vocabulary, "hidden_size": case.width, "intermediate_size": 3 * case.width,
            "num_hidden_layers": case.layers, "num_attention_heads": case.width // 32,
            "num_key_value_heads": case.width // 64, "head_dim": 32,
            "max_position_embeddings": 4096, "tie_word_embeddings": True,
        }  # fmt: skip
        if case.experts:
            sizes |= {"num_experts": case.experts, "num_experts_per_tok": 2, "moe_intermediate_size": case.width}
            Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(path)
        else:
            Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(path)
        shown = {name: json.dumps(value) for name, value in {**vars(case), "path": str(path)}.items()}
        file = Path(folder) / "config.yaml"
        file.write_text(CONFIG.format(**shown))
        yield load_config(file, check_files=False)


def predicted_peak(config: ResolvedConfig, ranks: int) -> int:
    """Bytes of the update's peak."""
    return simulate(config, "cpu", ranks).phases["update"].peak


class _Rank(ActorWorker):
    def _join(self) -> TrainingRanks:
        if not dist.is_initialized():
            return TrainingRanks()
        return TrainingRanks(dist.get_rank(), dist.get_world_size())


def measured_peak(config: ResolvedConfig, ranks: int) -> int:
    """The same of a real update, from what torch's allocator reports of rank 0."""
    if ranks == 1:
        return _measured(config, 1)
    with tempfile.TemporaryDirectory(prefix="agentrl-plan-ranks-") as folder:
        mp.spawn(_measure_rank, (ranks, config, folder), nprocs=ranks)
        return int((Path(folder) / "peak").read_text())


def _measure_rank(rank: int, ranks: int, config: ResolvedConfig, folder: str) -> None:
    torch.set_num_threads(1)
    for name in COLLECTIVES:
        if hasattr(dist, name):
            setattr(dist, name, _freed_here(getattr(dist, name)))
    wait = _functional_collectives.wait_tensor

    def settled(tensor: Any) -> Any:
        result = wait(tensor)
        time.sleep(SETTLED_SECONDS)
        return result

    _functional_collectives.wait_tensor = settled
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    peak = _measured(config, ranks)
    if rank == 0:
        (Path(folder) / "peak").write_text(str(peak))
    dist.barrier()
    dist.destroy_process_group()


def _freed_here(collective: Callable[..., Any]) -> Callable[..., Any]:
    """The collective, whose buffers this thread frees: the profiler does not see what gloo's threads free, and they let
    go of a collective a moment after it has returned. Up to 60% more memory was measured without this."""

    def run(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        work = collective(*args, **kwargs, async_op=True)
        if async_op:
            return work
        work.wait()
        time.sleep(SETTLED_SECONDS)
        return None

    return run


def _measured(config: ResolvedConfig, ranks: int) -> int:
    actor = _Rank(config, 1)
    actor.init_model()
    shapes = [full_micro_batch(config, config.actor.micro_batch_tokens)]
    if actor._backend._packing.is_possible and (shared := samples_of_a_prompt(config, config.actor.micro_batch_tokens)):
        shapes.append(shared)
    batches = [batch_of(shape, actor._backend.share.count) for shape in shapes]
    model = actor.module
    for module in model.modules():
        if isinstance(module, Qwen3MoeTopKRouter):
            module.forward = _equally(module)
    weights = {_local(each).untyped_storage() for each in (*model.parameters(), *model.buffers())}
    # The first step makes the moments.
    _, grown = _allocations(lambda: actor.update(batches[0]))
    resting = sum(each.nbytes() for each in weights) + grown
    return max(resting + _allocations(lambda each=batch: actor.update(each))[0] for batch in batches)


def _equally(router: Qwen3MoeTopKRouter) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """A forward that chooses all experts equally often, as a prediction assumes; a new router sends most tokens of a
    made-up batch to the same ones."""

    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
        chosen = torch.arange(len(logits) * router.top_k).view(-1, router.top_k) % router.num_experts
        weights = logits.softmax(-1, dtype=torch.float).gather(-1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    return forward


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _allocations(run: Any) -> tuple[int, int]:
    """Most bytes that were allocated in addition at once, and those that stayed."""
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        run()
    total = peak = 0
    events = [each for each in profiler.kineto_results.events() if each.name() == "[memory]"]
    for event in sorted(events, key=lambda each: each.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak, total
