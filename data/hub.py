"""Datasets of the Hugging Face hub, or a refusal within about a second if the hub is out of reach.

By itself, `datasets` retries for about 25 seconds. So the hub's host is tried first.
"""

import sys
from typing import TYPE_CHECKING

from config import DataConfig
from data.network import answers

if TYPE_CHECKING:
    from datasets import Dataset


def load_from_hub(config: DataConfig) -> "Dataset":
    """One split of a dataset; with HF_HUB_OFFLINE=1, from this machine's cache alone.

    Raises ValueError if it cannot be had.
    """
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        if not datasets.config.HF_HUB_OFFLINE and not answers(datasets.config.HF_ENDPOINT):
            raise OSError(
                f"{datasets.config.HF_ENDPOINT} does not answer; HF_HUB_OFFLINE=1 reads what this "
                "machine has cached"
            )
        return datasets.load_dataset(config.name, config.subset, split=config.split)
    except (OSError, ValueError, RuntimeError) as error:
        chosen = f"data.name={config.name} data.subset={config.subset} data.split={config.split}"
        way_out = ""
        if isinstance(error, OSError):
            way_out = (
                "; data=stdlib, data=torch_source and data=text data.path=FILE need no network"
            )
        raise ValueError(f"{chosen}: {error}{way_out}") from error
