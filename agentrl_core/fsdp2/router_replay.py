"""Router replay: the model sends tokens to the experts that the engine chose for them (arXiv 2510.11370).

Engine and trainer compute a router's scores a little differently. Where two experts are almost as good, another one is
chosen, and the log-prob of the same token with the same weights is another one. The scores of the experts, and with
them the gradients of the routers, are always those of the model.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from agentrl_core.api.errors import ConfigError
from agentrl_core.api.training_backend import MicroBatch
from agentrl_core.engine_kit.routers import Routers
from agentrl_core.fsdp2.media import Media
from agentrl_core.fsdp2.packed_attention import example_rows, rounding

KEY = "actor.router_replay"


def replayed_routers(
    model: Any, media: Media | None, compute: Callable[[MicroBatch], tuple[Tensor, Tensor]], device: torch.device
) -> Routers:
    """The routers of a model, if it takes given experts: a few rows are computed with those that it chooses itself,
    and with others.

    Args:
        model: of transformers.
        media: of a model that is shown images.
        compute: predictions [n, C] of padded rows.

    Raises:
        ConfigError: it cannot.
    """
    if media is not None:
        raise ConfigError(f"{KEY}: the engine's experts cannot be replayed for a model that is shown images; remove it")
    name, routers = type(model).__name__.removeprefix("FSDP"), Routers(model, KEY)
    micro = example_rows(model).to(device)
    with torch.no_grad():
        with routers.kept() as kept:
            own = compute(micro)[0]
        if not kept:
            raise ConfigError(f"{KEY}: the routers of {name} do not choose with torch.topk; remove the key")
        experts = routers.stacked(kept)
        if experts.shape[-1] == routers.experts:
            raise ConfigError(f"{KEY}: {name} sends every token to all {routers.experts} experts; remove the key")
        predictions = []
        for given in (experts, (experts + 1) % routers.experts):
            routers.given = given
            predictions.append(compute(micro)[0])
        routers.given = None
        routers.share_that_differs()
    same, other = (float((own - each).abs().max()) for each in predictions)
    limit = rounding(own, model) * float(own.abs().max())
    if same > limit:
        raise ConfigError(
            f"{KEY}: {name} computes something else when it is given the experts that it chose: its predictions differ "
            f"by {same:.2g}; remove the key"
        )
    if other <= same:
        raise ConfigError(f"{KEY}: {name} computes the same when it is given other experts; remove the key")
    return routers
