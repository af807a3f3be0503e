"""How a forward pass is split over ranks that compute the same rows."""

from dataclasses import dataclass

from agentrl_core.fsdp2.mesh import Peers
from agentrl_core.fsdp2.sharded_log_probs import VocabularyPart


@dataclass(frozen=True)
class Split:
    """What of a forward pass this rank computes.

    Args:
        sequence: the ranks over which the tokens of rows are spread; None: it has all of them.
        attention: name of the attention that these compute, of the whole sequence, for some heads.
        vocabulary: the logits that it computes; None: all of them.
    """

    sequence: Peers | None = None
    attention: str = "sdpa"
    vocabulary: VocabularyPart | None = None


WHOLE = Split()
