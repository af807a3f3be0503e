"""How the ranks of a model are arranged, and whether that divides the model."""

from collections.abc import Iterator
from dataclasses import dataclass

from agentrl_backend_megatron.config import MegatronConfig
from agentrl_backend_megatron.families import Family
from agentrl_core.api.errors import ConfigError

KEY = "trainer.backend.config"


@dataclass(frozen=True)
class Mesh:
    """Args:
    tensor, pipeline, expert, context: ranks in each direction.
    size: ranks of the model.
    """

    tensor: int
    pipeline: int
    expert: int
    context: int
    size: int

    @classmethod
    def of(cls, config: MegatronConfig, family: Family, size: int) -> "Mesh":
        """Raises:
        ConfigError: it does not divide the model or the ranks; says which, and the nearest sizes that do.
        """
        mesh = cls(
            config.tensor_parallel, config.pipeline_parallel, config.expert_parallel, config.context_parallel, size
        )  # fmt: skip
        if problems := list(mesh._problems(family, config.sequence_parallel)):
            raise ConfigError(problems)
        return mesh

    def _problems(self, family: Family, sequence_parallel: bool) -> Iterator[str]:
        for key, value, whole, what in (
            ("tensor_parallel", self.tensor, family.groups, f"the {family.groups} key-value heads of a layer"),
            ("tensor_parallel", self.tensor, family.heads, f"the {family.heads} attention heads of a layer"),
            ("tensor_parallel", self.tensor, family.inner, f"the {family.inner} inner channels of a layer"),
            ("pipeline_parallel", self.pipeline, family.layers, f"the model's {family.layers} layers"),
            *([("expert_parallel", self.expert, family.experts, f"the {family.experts} experts of a layer")]
              if family.experts else []),
        ):  # fmt: skip
            if whole % value:
                yield f"{KEY}.{key}: {value} does not divide {what}; the nearest that do are {_nearest(value, whole)}"
        if self.expert > 1 and not family.experts:
            yield f"{KEY}.expert_parallel: found {self.expert}, but {family.name} has no experts; set it to 1"
        if family.experts and self.tensor > 1 and not sequence_parallel:
            yield f"{KEY}.sequence_parallel: experts with tensor_parallel > 1 need it, found false; set it to true"
        ranks = "cluster.nodes x cluster.processes_per_node"
        if self.size % (self.tensor * self.pipeline * self.context):
            yield (
                f"{KEY}: tensor_parallel {self.tensor} x pipeline_parallel {self.pipeline} x context_parallel "
                f"{self.context} does not divide the {self.size} training processes ({ranks}); their product must be "
                f"one of {_divisors(self.size)}"
            )
        elif (self.size // self.pipeline) % self.expert:
            yield (
                f"{KEY}.expert_parallel: {self.expert} does not divide the {self.size // self.pipeline} ranks of a "
                f"pipeline stage ({ranks} / pipeline_parallel); the nearest that do are "
                f"{_nearest(self.expert, self.size // self.pipeline)}"
            )


def _divisors(whole: int) -> list[int]:
    return [value for value in range(1, whole + 1) if whole % value == 0]


def _nearest(value: int, whole: int) -> str:
    fitting = _divisors(whole)
    below = max((each for each in fitting if each < value), default=None)
    above = min((each for each in fitting if each > value), default=None)
    return " and ".join(str(each) for each in (below, above) if each is not None)
