"""What the server answers to a request that it does not carry out."""

from agentrl_core.api.errors import AgentRLError


class Refusal(AgentRLError):
    """A request that is not carried out, with the sentence that the client sees and the status of HTTP."""

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.status = status
