"""GAE with a discount and a lambda within turns, and others from turn to turn.

Shapes: B rows, R response tokens.
"""

import torch
from torch import Tensor

from agentrl_algorithms.config import TurnGAEConfig
from agentrl_algorithms.gae import GAE
from agentrl_core.api import AdvantageInput


class TurnGAE(GAE):
    r"""GAE (arXiv 1506.02438, equations 11, 12 and 16) whose discount depends on where a step leads.

        delta_t = r_t + g_t * V_{t+1} - V_t
        A_t     = delta_t + g_t * l_t * A_{t+1}
        (g_t, l_t) = (gamma, lam) if t + 1 is in the turn of t, else (turn_gamma, turn_lam)

    ``t + 1`` is the next sampled token of the row. With ``gamma = lam = 1`` the tokens of a turn are discounted alike,
    by the turns that lie between them and a reward, however long these are. With ``turn_gamma = gamma`` and
    ``turn_lam = lam`` this is ``gae``. Everything else is as there.

    "VAGEN" (Bi-Level GAE, arXiv 2510.16907) has the same two pairs, but computes the advantages of turns first, from
    values at their ends, and starts the recursion over a turn's tokens from them. Left out: this split, because one
    recursion has no second definition of a turn's value; and turns in other rows of the trajectory, as in ``gae``,
    where every row is an episode.
    """

    config: TurnGAEConfig

    def discounts(self, batch: AdvantageInput) -> tuple[Tensor, Tensor]:
        gamma_BR, lam_BR = super().discounts(batch)
        mask_BR, turns_BR = batch.response_mask.bool(), batch.turn_ids
        width = mask_BR.shape[1]
        positions_BR = torch.where(mask_BR, torch.arange(width), width)
        next_BR = torch.nn.functional.pad(positions_BR, (0, 1), value=width)[:, 1:].flip(-1).cummin(-1).values.flip(-1)
        next_turns_BR = torch.nn.functional.pad(turns_BR, (0, 1), value=-1).gather(1, next_BR)
        leaves_BR = next_turns_BR != turns_BR
        return (
            gamma_BR.masked_fill(leaves_BR, self.config.turn_gamma),
            lam_BR.masked_fill(leaves_BR, self.config.turn_lam),
        )
