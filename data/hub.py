"""Datasets of the Hugging Face hub, with an answer within a second or so where the hub is out of
reach.

Left to itself `datasets` retries for about 25 seconds. So the hub's host is tried first; where it
does not answer, only what this machine has cached is looked at, as HF_HUB_OFFLINE=1 would have it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from config import DataConfig
from data.network import answers

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


@contextmanager
def offline(switched_on: bool) -> Iterator[None]:
    """HF_HUB_OFFLINE=1 for a block of code: the variable itself is read only once, when `datasets`
    is imported.
    """
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
    """One split of a dataset; ValueError where neither the hub nor the cache of earlier downloads
    has it.
    """
    import datasets

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


def read_from_hub(
    table: "Dataset | IterableDataset", config: DataConfig
) -> Iterator[dict[str, Any]]:
    """The rows; with data.streaming=true they arrive over the network, which may fail half-way."""
    try:
        yield from table
    except OSError as error:
        raise ValueError(
            f"data.name={config.name}: the hub stopped answering ({error}); run it again, or use "
            "data.streaming=false"
        ) from error
