"""Options for measurements of `python train.py` at several sequence lengths."""

from dataclasses import dataclass

from scripts.arguments import Count, Json, default
from scripts.tables import Row
from training.device import pick_device
from training.environment import measured_on
from training.files import write_json


@dataclass
class LengthOptions:
    seq_len: list[Count] = default(1024, 8192, 32768)
    tokens: Count = 32768
    out: Json = Json("lengths.json")
    overrides: list[str] = default()  # train.py's own settings

    def shape(self, seq_len: int) -> list[str]:
        """Settings of train.py for steps of `tokens` tokens, in one pass."""
        return [f"seq_len={seq_len}", f"batch_size={self.tokens // seq_len}"]

    def write(self, runs: list[Row]) -> None:
        where = measured_on(pick_device("auto"))
        write_json(self.out, {"environment": where, "overrides": self.overrides, "runs": runs})
