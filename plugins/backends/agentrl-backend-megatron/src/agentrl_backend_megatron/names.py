"""Each parameter of Megatron-Core as tensors of the Hugging Face hub, and back.

A unit is one parameter of the whole model, numbered over all pipeline stages and experts, as no rank may have it.

Shapes: V vocabulary, H hidden size, I inner size, g groups of q queries with a key and a value each, d head size, o
other dimensions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentrl_backend_megatron.families import Family

Cut = Literal["whole", "vocabulary", "rows", "columns", "halves"]
"""How tensor parallelism cuts a parameter: not; its padded rows; its rows; its columns; the rows of each half."""
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


@dataclass(frozen=True)
class Unit:
    """Args:
    name: of Megatron-Core, with the number of the layer in the whole model.
    aliases: other names of the same with Transformer Engine, which fuses norms into the layers that follow.
    hub: names of the tensors on the hub.
    shapes: of these.
    layer: None: of no layer.
    expert: None: of no expert.
    groups: of queries, of a parameter that has them interleaved with keys and values.
    stack: of an expert: the tensor in which transformers has those of all experts of the layer, one after the other.
    """

    name: str
    hub: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    cut: Cut = "whole"
    aliases: tuple[str, ...] = ()
    layer: int | None = None
    expert: int | None = None
    groups: int = 0
    stack: str = ""

    @property
    def is_split(self) -> bool:
        """Ranks that split a layer have different parts of it; an expert is another one on each."""
        return self.cut != "whole" or self.expert is not None

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """The parameter, from the tensors of the hub."""
        if not self.groups:
            return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]
        parts = [tensor.unflatten(0, (self.groups, -1)) for tensor in tensors]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def separated(self, whole: Tensor) -> dict[str, Tensor]:
        """The tensors of the hub by name, from the parameter."""
        if not self.groups:
            parts: Sequence[Tensor] = whole.split([shape[0] for shape in self.shapes])
        else:
            sizes = [shape[0] // self.groups for shape in self.shapes]
            parts = [part.flatten(0, 1) for part in whole.unflatten(0, (self.groups, -1)).split(sizes, dim=1)]
        return {name: part.contiguous() for name, part in zip(self.hub, parts, strict=True)}

    def shard(self, whole: Tensor, index: int, count: int) -> Tensor:
        """What one of ``count`` ranks has of it."""
        match self.cut:
            case "whole":
                return whole
            case "vocabulary":
                rows = -(-len(whole) // count)
                own = whole[rows * index : rows * (index + 1)]
                return own if len(own) == rows else torch.cat([own, own.new_zeros(rows - len(own), *own.shape[1:])])
            case "rows":
                return whole.chunk(count)[index]
            case "columns":
                return whole.chunk(count, dim=1)[index].contiguous()
            case "halves":
                return whole.unflatten(0, (2, -1)).chunk(count, dim=1)[index].flatten(0, 1)

    def shard_shape(self, count: int) -> tuple[int, ...]:
        """Of what each of ``count`` ranks has."""
        rows, *others = sum(shape[0] for shape in self.shapes), *self.shapes[0][1:]
        match self.cut:
            case "whole":
                return rows, *others
            case "columns":
                return rows, others[0] // count, *others[1:]
            case _:
                return -(-rows // count), *others

    def unsharded(self, shards: Sequence[Tensor]) -> Tensor:
        """The parameter, from what each rank has."""
        match self.cut:
            case "whole":
                return shards[0]
            case "columns":
                return torch.cat(list(shards), dim=1)
            case "halves":
                return torch.cat([shard.unflatten(0, (2, -1)) for shard in shards], dim=1).flatten(0, 1)
            case _:
                return (
                    torch.cat(list(shards))[: self.shapes[0][0]]
                    if self.cut == "vocabulary"
                    else torch.cat(list(shards))
                )

    def names_in(self, first_layer: int, first_expert: int) -> Iterator[str]:
        """What it may be called on a rank whose first layer and expert have these numbers."""
        for name in (self.name, *self.aliases):
            layer = None if self.layer is None else self.layer - first_layer
            expert = None if self.expert is None else self.expert - first_expert
            yield name.format(layer=layer, expert=expert)


def units_of(family: Family) -> list[Unit]:
    """All parameters of the model, in the order of its layers; tied ones once."""
    hidden, vocabulary = family.hidden, family.vocabulary
    found = [Unit(EMBEDDING, ("model.embed_tokens.weight",), ((vocabulary, hidden),), "vocabulary")]
    for layer in range(family.layers):
        found += _layer(family, layer)
    found.append(Unit("decoder.final_layernorm.weight", ("model.norm.weight",), ((hidden,),)))
    if not family.is_tied:
        found.append(Unit(OUTPUT, ("lm_head.weight",), ((vocabulary, hidden),), "vocabulary"))
    return found


def _layer(family: Family, layer: int) -> Iterator[Unit]:
    own, hub = "decoder.layers.{layer}.", f"model.layers.{layer}."
    hidden, head = family.hidden, family.head_size
    sizes = family.heads * head, family.groups * head, family.groups * head
    yield Unit(
        f"{own}input_layernorm.weight", (f"{hub}input_layernorm.weight",), ((hidden,),),
        aliases=(f"{own}self_attention.linear_qkv.layer_norm_weight",), layer=layer,
    )  # fmt: skip
    for part in ("weight", "bias") if family.qkv_bias else ("weight",):
        yield Unit(
            f"{own}self_attention.linear_qkv.{part}",
            tuple(f"{hub}self_attn.{letter}_proj.{part}" for letter in "qkv"),
            tuple((size, hidden) if part == "weight" else (size,) for size in sizes),
            "rows", layer=layer, groups=family.groups,
        )  # fmt: skip
    for letter in "qk" if family.qk_norm else "":
        yield Unit(
            f"{own}self_attention.{letter}_layernorm.weight", (f"{hub}self_attn.{letter}_norm.weight",), ((head,),),
            layer=layer,
        )  # fmt: skip
    yield Unit(
        f"{own}self_attention.linear_proj.weight", (f"{hub}self_attn.o_proj.weight",),
        ((hidden, family.heads * head),), "columns", layer=layer,
    )  # fmt: skip
    yield Unit(
        f"{own}pre_mlp_layernorm.weight", (f"{hub}post_attention_layernorm.weight",), ((hidden,),),
        aliases=(f"{own}mlp.linear_fc1.layer_norm_weight",), layer=layer,
    )  # fmt: skip
    if not family.experts or layer in family.dense_layers:
        yield from _mlp(family.hidden, family.inner, f"{own}mlp.", f"{hub}mlp.", layer)
        return
    yield Unit(f"{own}mlp.router.weight", (f"{hub}mlp.gate.weight",), ((family.experts, hidden),), layer=layer)
    for expert in range(family.experts):
        yield from _mlp(
            hidden, family.inner_expert, f"{own}mlp.experts.local_experts.{{expert}}.", f"{hub}mlp.experts.{expert}.",
            layer, expert, f"{hub}mlp.experts.",
        )  # fmt: skip


def _mlp(
    hidden: int, inner: int, own: str, hub: str, layer: int, expert: int | None = None, stacks: str = ""
) -> Iterator[Unit]:  # fmt: skip
    # Experts are not cut: each is whole on one rank of a stage.
    dense = expert is None
    yield Unit(
        f"{own}linear_fc1.weight", (f"{hub}gate_proj.weight", f"{hub}up_proj.weight"), ((inner, hidden),) * 2,
        "halves" if dense else "whole", layer=layer, expert=expert, stack=stacks and f"{stacks}gate_up_proj",
    )  # fmt: skip
    yield Unit(
        f"{own}linear_fc2.weight", (f"{hub}down_proj.weight",), ((hidden, inner),),
        "columns" if dense else "whole", layer=layer, expert=expert, stack=stacks and f"{stacks}down_proj",
    )  # fmt: skip
