"""What the entry points name."""

from functools import partial

from agentrl_algorithms.config import (
    CISPOConfig,
    ClipCovConfig,
    DivergenceConfig,
    DPPOConfig,
    DROConfig,
    GAEConfig,
    GDPOConfig,
    GeometricConfig,
    GMPOConfig,
    GRPOConfig,
    GSPOConfig,
    IcePopConfig,
    ImportanceConfig,
    KLCovConfig,
    OnPolicyDistillationConfig,
    PercentileConfig,
    PPOConfig,
    ReinforcePlusPlusConfig,
    SAPOConfig,
    SFTConfig,
    TISReinforceConfig,
    TurnGAEConfig,
    TurnRLOOConfig,
)
from agentrl_core.api import NoConfig, PluginSpec

TORCH = ("torch>=2.11",)


VERSIONS = {"advantage_estimator": 2, "policy_loss": 2, "rollout_correction": 1}


def _spec(kind: str, name: str, factory: str, summary: str, *capabilities: str, config: type = NoConfig) -> PluginSpec:
    return PluginSpec(
        kind=kind,
        name=name,
        api_version=VERSIONS[kind],
        summary=summary,
        factory=f"agentrl_algorithms.{factory}",
        config=config,
        requires=TORCH,
        capabilities=frozenset(capabilities),
    )


_estimator = partial(_spec, "advantage_estimator")
_loss = partial(_spec, "policy_loss")
_correction = partial(_spec, "rollout_correction")

GRPO = _estimator(
    "grpo",
    "grpo:GRPO",
    "reward relative to the other samples of the same prompt; no critic",
    "groups",
    "separate_groups",
    config=GRPOConfig,
)
GAE = _estimator(
    "gae", "gae:GAE", "generalised advantage estimation per token, from a critic's values", "values", config=GAEConfig
)
TURN_GAE = _estimator(
    "turn_gae",
    "turn_gae:TurnGAE",
    "GAE with a discount and lambda within turns, and others from turn to turn",
    "values",
    config=TurnGAEConfig,
)
RLOO = _estimator(
    "rloo", "rloo:RLOO", "score minus the mean of the prompt's other samples; unbiased", "groups", "separate_groups"
)
TURN_RLOO = _estimator(
    "turn_rloo",
    "turn_rloo:TurnRLOO",
    "credit per turn: what is earned from a turn on, minus that of the prompt's other samples",
    "groups",
    "separate_groups",
    config=TurnRLOOConfig,
)
REINFORCE_PLUS_PLUS = _estimator(
    "reinforce_plus_plus",
    "reinforce_plus_plus:ReinforcePlusPlus",
    "score normalised over the whole batch; one sample per prompt is enough",
    config=ReinforcePlusPlusConfig,
)
REINFORCE_PLUS_PLUS_BASELINE = _estimator(
    "reinforce_plus_plus_baseline",
    "reinforce_plus_plus:ReinforcePlusPlusBaseline",
    "score minus its group's mean, normalised over the whole batch",
    "groups",
)
REMAX = _estimator(
    "remax", "remax:ReMax", "score minus that of a greedy answer to the prompt", "greedy_baseline", "separate_groups"
)
OPO = _estimator("opo", "opo:OPO", "score minus the length-weighted mean of its group", "groups", "separate_groups")
GPG = _estimator("gpg", "gpg:GPG", "score minus its group's mean, scaled up for groups without signal", "groups")
GDPO = _estimator(
    "gdpo",
    "gdpo:GDPO",
    "normalises each component of the score in its group before it adds them up",
    "groups",
    "components",
    config=GDPOConfig,
)
GRPO_PASSK = _estimator(
    "grpo_passk",
    "grpo_passk:GRPOPassK",
    "pass@k: only the best sample of a group counts, with its lead",
    "groups",
    "separate_groups",
)
MAXRL = _estimator("maxrl", "maxrl:MaxRL", "maximum likelihood: centred scores over the group's success rate", "groups")
OPTIMAL_TOKEN_BASELINE = _estimator(
    "optimal_token_baseline",
    "optimal_token_baseline:OptimalTokenBaseline",
    "a group baseline per token, weighted by squared score norms",
    "groups",
    "entropies",
)
OPTIMAL_TURN_BASELINE = _estimator(
    "optimal_turn_baseline",
    "optimal_token_baseline:OptimalTurnBaseline",
    "a group baseline per turn, weighted by squared score norms",
    "groups",
    "entropies",
)
ON_POLICY_DISTILLATION = _estimator(
    "on_policy_distillation",
    "on_policy_distillation:OnPolicyDistillation",
    "reverse KL to a teacher per token, optionally with a group-relative score",
    "teacher_log_probs",
    config=OnPolicyDistillationConfig,
)

PPO = _loss("ppo", "ppo:PPO", "clipped surrogate with asymmetric and dual clip", config=PPOConfig)
GSPO = _loss("gspo", "gspo:GSPO", "ratio and clip of whole sequences, in the token form", config=GSPOConfig)
CISPO = _loss(
    "cispo",
    "cispo:CISPO",
    "policy gradient with a clipped importance weight; no token loses its gradient",
    config=CISPOConfig,
)
GMPO = _loss("gmpo", "gmpo:GMPO", "geometric mean of clipped token ratios", config=GMPOConfig)
SAPO = _loss("sapo", "sapo:SAPO", "a smooth gate in place of the clip", config=SAPOConfig)
DPPO = _loss(
    "dppo",
    "dppo:DPPO",
    "masks tokens by divergence from the engine's policy (tv, kl)",
    "rollout_log_probs",
    config=DPPOConfig,
)
CLIP_COV = _loss(
    "clip_cov",
    "clip_cov:ClipCov",
    "ppo without the gradient of high-covariance tokens, against entropy collapse",
    "mini_batch_log_probs",
    config=ClipCovConfig,
)
KL_COV = _loss(
    "kl_cov",
    "kl_cov:KLCov",
    "KL penalty on high-covariance tokens, against entropy collapse",
    "mini_batch_log_probs",
    config=KLCovConfig,
)
GPG_LOSS = _loss("gpg", "gpg_loss:GPGLoss", "plain policy gradient without ratio and clip")
TIS_REINFORCE = _loss(
    "tis_reinforce",
    "tis_reinforce:TISReinforce",
    "policy gradient with truncated weights against the engine's policy",
    "rollout_log_probs",
    config=TISReinforceConfig,
)
DRO = _loss(
    "dro",
    "dro:DRO",
    "regression of the advantage on the answer's log-ratio to the reference",
    "ref_log_probs",
    config=DROConfig,
)
SFT = _loss(
    "sft",
    "sft:SFT",
    "negative log-likelihood of all sampled tokens, or of those with a positive advantage",
    config=SFTConfig,
)

TOKEN_TIS = _correction("token_tis", "tis:TokenTIS", "truncated importance weights of tokens", config=ImportanceConfig)
SEQUENCE_TIS = _correction(
    "sequence_tis", "tis:SequenceTIS", "truncated importance weight of each row", config=ImportanceConfig
)
TOKEN_MIS = _correction(
    "token_mis", "mis:TokenMIS", "importance weights of tokens; rejects large ones", config=ImportanceConfig
)
SEQUENCE_MIS = _correction(
    "sequence_mis", "mis:SequenceMIS", "importance weight of each row; rejects large ones", config=ImportanceConfig
)
ICEPOP = _correction(
    "icepop", "mis:IcePop", "importance weights of tokens; rejects those far from 1", config=IcePopConfig
)
SEQUENCE_ICEPOP = _correction(
    "sequence_icepop", "mis:SequenceIcePop", "importance weight of each row; rejects those far from 1",
    config=IcePopConfig,
)  # fmt: skip
DIVERGENCE_REJECTION = _correction(
    "divergence_rejection",
    "rejection:DivergenceRejection",
    "rejects tokens or rows by one or more estimates of the divergence (k1, k2, k3)",
    config=DivergenceConfig,
)
GEOMETRIC_REJECTION = _correction(
    "geometric_rejection",
    "rejection:GeometricRejection",
    "rejects rows by the geometric mean of their ratios",
    config=GeometricConfig,
)
PERCENTILE_REJECTION = _correction(
    "percentile_rejection",
    "rejection:PercentileRejection",
    "rejects the tokens whose probabilities differ most",
    config=PercentileConfig,
)
