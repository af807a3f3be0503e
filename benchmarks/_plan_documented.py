"""The configurations of docs/real-model.md, and predictions of them. Of models only config.json is needed."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentrl_core.config import ResolvedConfig, load_config
from agentrl_plan.devices import DEVICES, GIB
from agentrl_plan.prediction import Prediction, predict

PAGE = Path(__file__).parents[1] / "docs/real-model.md"
_BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
_REST = """
data: {train_files: [none.jsonl]}
rollout: {agent: {loops: [{name: single_turn}]}}
reward: {functions: [{name: exact_match}]}
"""


def _model(kind: str, layers: int, width: int, inner: int, heads: int, kv: int, vocabulary: int, **more: Any) -> Any:
    return {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocabulary,
        "max_position_embeddings": 32768, **more,
    }  # fmt: skip


MODELS = {
    "Qwen2.5-0.5B": _model("qwen2", 24, 896, 4864, 14, 2, 151936, tie_word_embeddings=True),
    "Qwen3-1.7B": _model("qwen3", 28, 2048, 6144, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "Qwen2.5-7B": _model("qwen2", 28, 3584, 18944, 28, 4, 152064, tie_word_embeddings=False),
    "Qwen3-30B-A3B": _model(
        "qwen3_moe", 48, 2048, 6144, 32, 4, 151936, head_dim=128, tie_word_embeddings=False, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
    ),
    "Qwen3-8B": _model("qwen3", 36, 4096, 12288, 32, 8, 151936, head_dim=128, tie_word_embeddings=False),
    "Qwen3-235B-A22B": _model(
        "qwen3_moe", 94, 4096, 12288, 64, 4, 151936, head_dim=128, tie_word_embeddings=False, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=1536, norm_topk_prob=True,
    ),
    "Llama-3.3-70B": _model("llama", 80, 8192, 28672, 64, 8, 128256, head_dim=128, tie_word_embeddings=False),
}  # fmt: skip


@dataclass(frozen=True)
class Documented:
    """A row of the page: a model, the GPU, and keys besides those of the page's file for one or for eight GPUs."""

    model: str
    gpu: str
    gpus: int = 1
    keys: tuple[str, ...] = ()


ROWS = (
    Documented("Qwen2.5-0.5B", "rtx-4090-24g"),
    Documented("Qwen3-1.7B", "rtx-4090-24g"),
    Documented("Qwen2.5-7B", "h100-80g"),
    Documented(
        "Qwen2.5-7B", "rtx-4090-24g", 1,
        ("model.dtype=bfloat16", "model.adapter.rank=16", "actor.offload_parameters=true"),
    ),
    Documented("Qwen3-30B-A3B", "h100-80g", 8, ("rollout.engine.tensor_parallel=2",)),
    Documented("Llama-3.3-70B", "h100-80g", 64, ("rollout.engine.tensor_parallel=4", "cluster.nodes=8")),
    Documented(
        "Llama-3.3-70B", "h100-80g", 8,
        ("rollout.engine.tensor_parallel=4", "model.dtype=bfloat16", "model.adapter.rank=16"),
    ),
)  # fmt: skip


@contextmanager
def config_of(row: Documented) -> Iterator[ResolvedConfig]:
    with config_in(PAGE, row.model, row.gpus > 1, row.keys) as config:
        yield config


@contextmanager
def config_in(
    page: Path, model: str, many: bool = False, keys: tuple[str, ...] = (), first: int = 0
) -> Iterator[ResolvedConfig]:
    """A file of a page, the ``first`` one from 0, with what the next one adds for many GPUs, for a model."""
    one, *others = _BLOCK.findall(page.read_text(encoding="utf-8"))[first:]
    with TemporaryDirectory(prefix="agentrl-plan-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODELS[model]))
        (folder / "rest.yaml").write_text(_REST)
        (folder / "one.yaml").write_text(f"extends: rest.yaml\n{one}")
        if many:
            (folder / "many.yaml").write_text(f"extends: one.yaml\n{others[0]}")
        overrides = [f"model.path={folder}", "rollout.engine.python=null", *keys]
        yield load_config(folder / ("many.yaml" if many else "one.yaml"), overrides, check_files=False)


def prediction_of(row: Documented) -> Prediction:
    with config_of(row) as config:
        return predict(config, DEVICES[row.gpu])


def line_of(row: Documented, found: Prediction) -> str:
    """The row of the page's table."""
    keys = ", ".join(f"`{key}`" for key in row.keys) or "none"
    phases = " | ".join(f"{found.phases[name].total / GIB:.1f}" for name in ("rollout", "update"))
    return f"| {row.model} | {row.gpus} x `{row.gpu}` | {keys} | {phases} | {found.usable / GIB:.1f} |\n"
