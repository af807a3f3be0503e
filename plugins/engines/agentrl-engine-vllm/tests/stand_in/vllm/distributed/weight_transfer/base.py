from dataclasses import dataclass
from typing import Any


@dataclass
class WeightTransferUpdateRequest:
    update_info: dict[str, Any]
