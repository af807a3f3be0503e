"""Options of the scripted engine."""

from dataclasses import dataclass

from agentrl_core.api.config import option


@dataclass
class ScriptedConfig:
    """Options of the scripted engine."""

    turns: list[str] = option(
        default_factory=lambda: ["ok"], help="what to answer in turn 1, 2, …; the last one again after that"
    )
    stop: str = option("<|im_end|>", help="text of the stop token after each turn; empty: none")
    script: str | None = option(None, help="'module:function' (request_id, turn, prompt_ids) -> token ids, for more")
    delay: float = option(0.0, ge=0, unit="seconds", help="before each answer")
    log_prob: float = option(-0.5, le=0, help="of every token")
    fail_every: int = option(0, ge=0, unit="requests", help="raise on every so many requests; 0: never")
