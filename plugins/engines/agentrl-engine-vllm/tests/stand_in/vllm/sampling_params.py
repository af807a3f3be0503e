from dataclasses import dataclass


@dataclass
class StructuredOutputsParams:
    json: str


class RequestOutputKind:
    FINAL_ONLY = "final only"
