"""init_from=: the weights that a run begins with.

    init_from=gpt2                      a name on the Hugging Face hub, or in this machine's cache
    init_from=FOLDER                    model.safetensors, shards with their index, or
                                        pytorch_model.bin; and config.json
    init_from=FILE                      one file; a config.json beside it is read too. Files of a
                                        training tool are .pt or .ckpt, such as nanoGPT's ckpt.pt

First a connection to the hub is tried, because huggingface_hub alone would wait much longer.
"""

import json
import logging
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple

import torch
from torch import Tensor

from data import Tokenizer
from data.network import answers
from data.tokenizer_json import has_vocabulary
from model import GPT, load_hugging_face
from training.files import Row, sha256_of

log = logging.getLogger("tilegpt")

SETTINGS, TOKENIZER = "config.json", "tokenizer.json"
# the first of these that exists holds the weights, or lists the files that do
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
NANOGPT = {"n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout"}
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class Pretrained(NamedTuple):
    """Weights on this machine that no model has loaded yet."""

    name: str
    files: list[Path]
    settings: Row | None  # config.json
    tokenizer: Path | None  # tokenizer.json

    def load_into(self, model: GPT, tokenizer: Tokenizer | None = None) -> Row:
        """Load the weights; returns what a run records of them: their name, and the SHA-256 of each
        file. Raises ValueError if they do not fit the model. A warning says if a tokenizer.json
        beside them gives other tokens than `tokenizer`.
        """
        if self.tokenizer and tokenizer and not same_tokens(self.tokenizer, tokenizer):
            log.warning(
                f"{self.tokenizer} gives other tokens than tokenizer={tokenizer.name}, so this run "
                "begins with the weights of other words"
            )
        tensors, settings = {}, self.settings
        try:
            for file in self.files:
                content = read_weights(file)
                if isinstance(content.get("model_args"), dict):
                    settings = settings_of_nanogpt(content["model_args"], file)
                tensors |= tensors_of(content, file)
            load_hugging_face(model, tensors, settings)
        except ValueError as error:
            raise ValueError(f"init_from={self.name}: {error}") from error
        log.info(f"beginning with the weights of {self.name}")
        return {"name": self.name, "sha256": {path.name: sha256_of(path) for path in self.files}}


def read_weights(file: Path) -> Row:
    """The content of a file of weights. Raises ValueError if it cannot be read."""
    from safetensors.torch import load_file

    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        # PyTorch refuses a file that would run code
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # an unpickler of any bytes fails with nearly any error
        reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        if isinstance(error, UnpicklingError):  # its first line tells how to run the code
            reason = "it is damaged, or of another kind, or would run code"
        raise ValueError(f"{file} holds no weights: {reason}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no weights by name, but a {type(content).__name__}")
    return content


def settings_of_nanogpt(model_args: Row, file: Path) -> Row:
    """What nanoGPT's ckpt.pt says in place of a config.json. Raises ValueError for that of a model
    which goes further than nanoGPT.
    """
    if others := model_args.keys() - NANOGPT:
        raise ValueError(f"{file} is not nanoGPT's: model_args has {min(map(str, others))}")
    log.warning(
        f"{file}: nanoGPT computes GELU by erf and this model by tanh, so the loss differs a little"
    )
    return {"model_type": "nanogpt"} | model_args


def tensors_of(content: Row, file: Path) -> dict[str, Tensor]:
    """The tensors by name, also where a training tool has put them one level down."""
    for key in ("state_dict", "model", "module"):
        if isinstance(content.get(key), dict):
            content = content[key]
    for name, tensor in content.items():
        is_plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        if not isinstance(name, str) or not is_plain or tensor.is_meta or tensor.is_nested:
            raise ValueError(f"{file} holds {name!r:.80}, which is no name of a dense tensor")
    return content


def find_pretrained(name: str) -> Pretrained:
    """The files of init_from=NAME, downloaded if needed. Raises ValueError if there are none."""
    path, candidates = Path(os.path.expanduser(name)), WEIGHTS
    otherwise = f"there is none of {', '.join(WEIGHTS)}"
    if os.path.isfile(path):
        get, candidates = partial(local_file, path.parent), (path.name,)
    elif os.path.isdir(path):
        get = partial(local_file, path)
    elif HUB_NAME.fullmatch(name) and path.suffix not in SUFFIXES:
        get, why_not = hub_files(name)
        otherwise = why_not or otherwise
    else:
        raise ValueError(f"init_from={name}: there is no such folder or file")
    found = next(filter(None, map(get, candidates)), None)
    if found is None:
        raise ValueError(f"init_from={name}: {otherwise}")
    files = [found]
    if found.suffix == ".json":
        shards = shards_of(found)
        files = [get(shard) for shard in shards]
        if missing := [shard for shard, file in zip(shards, files, strict=True) if file is None]:
            raise ValueError(f"init_from={name}: {found.name} names {missing[0]}, which is missing")
    settings = get(SETTINGS)
    return Pretrained(name, files, read_json(settings) if settings else None, get(TOKENIZER))


def shards_of(index: Path) -> list[str]:
    """The files that an index lists. Raises ValueError for none, or one outside the folder."""
    where = read_json(index).get("weight_map")
    shards = where.values() if isinstance(where, dict) else ()
    if not shards or not all(isinstance(shard, str) for shard in shards):
        raise ValueError(
            f"{index} lists no files of weights; name the folder, a file of weights or an index"
        )
    for shard in shards:
        if ".." in Path(shard).parts or Path(shard).is_absolute():
            raise ValueError(f"{index} lists {shard}, which is outside its folder")
    return sorted(set(shards))


def local_file(folder: Path, file: str) -> Path | None:
    path = folder / file
    return path if os.path.isfile(path) else None


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
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, and not settings by name")
    return content


def same_tokens(file: Path, tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer.json is that of `tokenizer`; one that cannot be read is not."""
    try:
        return has_vocabulary(read_json(file), tokenizer)
    except ValueError:
        return False
