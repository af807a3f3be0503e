from dataclasses import dataclass


@dataclass
class WeightTransferConfig:
    backend: str
