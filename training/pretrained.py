"""init_from=: the weights that a run begins with.

    init_from=gpt2                      a name on the Hugging Face hub, or in this machine's cache
    init_from=FOLDER                    model.safetensors, shards with their index, or
                                        pytorch_model.bin; and config.json
    init_from=FILE.safetensors          one file; a config.json beside it is read too

First a connection to the hub is tried, because huggingface_hub alone would wait much longer.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple

import torch
from torch import Tensor

from data.network import answers
from model import GPT, load_hugging_face
from training.files import Row, sha256_of

log = logging.getLogger("tilegpt")

SETTINGS = "config.json"
# the first of these that exists holds the weights, or lists the files that do
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class Pretrained(NamedTuple):
    """Weights on this machine that no model has loaded yet."""

    name: str
    files: list[Path]
    settings: Row | None  # config.json

    def load_into(self, model: GPT) -> Row:
        """Load the weights; returns what a run records of them: their name, and the SHA-256 of each
        file. Raises ValueError if they do not fit the model.
        """
        try:
            load_hugging_face(model, dict(self._tensors()), self.settings)
        except ValueError as error:
            raise ValueError(f"init_from={self.name}: {error}") from error
        log.info(f"beginning with the weights of {self.name}")
        return {"name": self.name, "sha256": {path.name: sha256_of(path) for path in self.files}}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        for file in self.files:
            try:
                if file.suffix == ".safetensors":
                    tensors = load_file(file)
                else:  # PyTorch refuses a file that would run code
                    tensors = torch.load(file, map_location="cpu", weights_only=True)
            except (SafetensorError, UnpicklingError, RuntimeError, EOFError) as error:
                reason = str(error).splitlines()[0]
                raise ValueError(f"{file} holds no weights: {reason}") from error
            yield from tensors.items()


def find_pretrained(name: str) -> Pretrained:
    """The files of init_from=NAME, downloaded if needed. Raises ValueError if there are none."""
    path, candidates = Path(name).expanduser(), WEIGHTS
    otherwise = f"there is none of {', '.join(WEIGHTS)}"
    if path.is_file():
        get, candidates = partial(local_file, path.parent), (path.name,)
    elif path.is_dir():
        get = partial(local_file, path)
    elif HUB_NAME.fullmatch(name) and path.suffix not in (".safetensors", ".bin"):
        get, why_not = hub_files(name)
        otherwise = why_not or otherwise
    else:
        raise ValueError(f"init_from={name}: there is no such folder or file")
    found = next(filter(None, map(get, candidates)), None)
    if found is None:
        raise ValueError(f"init_from={name}: {otherwise}")
    files = [found]
    if found.suffix == ".json":
        shards = sorted(set(read_json(found).get("weight_map", {}).values()))
        if not shards:
            raise ValueError(
                f"init_from={name}: {found.name} lists no files of weights; name the folder, a "
                ".safetensors file or an index"
            )
        files = [get(shard) for shard in shards]
        if missing := [shard for shard, file in zip(shards, files, strict=True) if file is None]:
            raise ValueError(f"init_from={name}: {found.name} names {missing[0]}, which is missing")
    settings = get(SETTINGS)
    return Pretrained(name, files, read_json(settings) if settings else None)


def local_file(folder: Path, file: str) -> Path | None:
    path = folder / file
    return path if path.is_file() else None


def hub_files(name: str) -> tuple[Callable[[str], Path | None], str | None]:
    """A function that finds a file of a model on the hub. If only the cache can be read, also the
    error message for a model that is not in it.
    """
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    offline = bool(constants.HF_HUB_OFFLINE) or not answers(constants.ENDPOINT)
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} is silent"
    otherwise = (
        f"it is no folder here, {why}, and this machine's cache has no such model; download it "
        f"elsewhere (hf download {name} --local-dir FOLDER) and add init_from=FOLDER"
    )

    def get(file: str) -> Path | None:
        try:
            return Path(huggingface_hub.hf_hub_download(name, file, local_files_only=offline))
        except (EntryNotFoundError, OSError, ValueError) as error:
            in_cache = isinstance(error, LocalEntryNotFoundError)
            if isinstance(error, EntryNotFoundError) and in_cache == offline:
                return None
            reason = " ".join(str(error).split())
            raise ValueError(f"init_from={name}: {reason}") from error

    return get, otherwise if offline else None


def read_json(path: Path) -> Row:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, and not settings by name")
    return content
