"""Datasets of the Hugging Face hub, or a refusal within about a second if the hub is out of reach.

By itself, `datasets` retries for about 25 seconds. So the hub's host is tried first. If it does not
answer, only this machine's cache is read, as with HF_HUB_OFFLINE=1.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from config import DataConfig
from data.network import answers

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


@contextmanager
def offline(switched_on: bool) -> Iterator[None]:
    """HF_HUB_OFFLINE=1 inside a `with`; `datasets` reads the variable itself only at import."""
    import datasets
    import huggingface_hub

    switches = (datasets.config, huggingface_hub.constants)
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    try:
        for switch in switches:
            switch.HF_HUB_OFFLINE = switched_on
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value


def load_from_hub(config: DataConfig) -> "Dataset | IterableDataset":
    """One split of a dataset. Raises ValueError if neither the hub nor this machine's cache has it.

    The cache holds earlier downloads.
    """
    import datasets
    import huggingface_hub

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        huggingface_hub.utils.disable_progress_bars()
    is_offline = datasets.config.HF_HUB_OFFLINE
    reason = "HF_HUB_OFFLINE is set"
    if not is_offline and not answers(datasets.config.HF_ENDPOINT):
        is_offline, reason = True, f"{datasets.config.HF_ENDPOINT} does not answer"
    try:
        with offline(is_offline):
            return datasets.load_dataset(
                config.name, config.subset, split=config.split, streaming=config.streaming
            )
    except (OSError, ValueError, RuntimeError) as error:
        chosen = f"data.name={config.name} data.subset={config.subset} data.split={config.split}"
        if is_offline:
            raise ValueError(
                f"{chosen}: {reason} and no such dataset is cached on this machine; "
                "data=stdlib, data=torch_source and data=text data.path=FILE need no network"
            ) from error
        raise ValueError(f"{chosen}: {error}") from error
