"""init_from=: the weights that a run begins with.

init_from=gpt2                      a name on the Hugging Face hub, or in this machine's cache
init_from=FOLDER                    model.safetensors or pytorch_model.bin, or the shards of
                                    one; and config.json
init_from=FILE                      one file; a config.json beside it is read too. Files of a
                                    training tool are .pt or .ckpt, such as nanoGPT's ckpt.pt
"""

import logging
import os
import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from data import Tokenizer
from data.token_file import sha256_of
from data.tokenizer_json import has_vocabulary
from model import GPT, load_hugging_face
from training.record.files import Row, read_mapping

log = logging.getLogger("tilegpt")

SETTINGS, TOKENIZER = "config.json", "tokenizer.json"
# the files of the first of these that has any hold the weights
WEIGHTS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "pytorch_model.bin",
    "pytorch_model-*-of-*.bin",
)
NANOGPT = {"n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout"}
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class Pretrained(NamedTuple):
    """Weights on this machine that no model has loaded yet."""

    name: str
    files: list[Path]

    def load_into(self, model: GPT, tokenizer: Tokenizer | None = None) -> Row:
        """Load the weights; returns what a run records of them: their name, and the SHA-256 of each
        file. Raises ValueError if they do not fit the model. A warning says if a tokenizer.json
        beside them gives other tokens than `tokenizer`.
        """
        words, config = (self.files[0].with_name(name) for name in (TOKENIZER, SETTINGS))
        if words.is_file() and tokenizer and not has_vocabulary(read_mapping(words), tokenizer):
            log.warning(
                f"{words} gives other tokens than tokenizer={tokenizer.name}, so this run begins "
                "with the weights of other words"
            )
        tensors, settings = {}, read_mapping(config)
        try:
            if config.is_file() and not settings:
                raise ValueError(f"{config} is damaged, or holds no settings by name")
            for file in self.files:
                content = read_weights(file)
                if isinstance(content.get("model_args"), dict):
                    settings = settings_of_nanogpt(content["model_args"], file)
                found = tensors_of(content, file)
                if twice := tensors.keys() & found.keys():
                    raise ValueError(f"{min(twice)} is in {file} and in another file beside it")
                tensors |= found
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
        # PyTorch refuses a file that would run code, and its message tells how to run it
        return dict(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:  # an unpickler of any bytes fails with nearly any error
        raise ValueError(
            f"{file} is damaged, of another kind, or would run code: {type(error).__name__}"
        ) from error


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
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            raise ValueError(f"{file} holds {name!r:.80}, which is no name of a tensor")
    return content


def find_pretrained(name: str) -> Pretrained:
    """The files of init_from=NAME, downloaded if needed. Raises ValueError if there are none."""
    path = Path(os.path.expanduser(name))
    if not os.path.exists(path) and HUB_NAME.fullmatch(name):
        path = hub_folder(name)
    if os.path.isfile(path):
        return Pretrained(name, [path])
    for files in WEIGHTS:
        if os.path.isdir(path) and (found := sorted(path.glob(files))):
            return Pretrained(name, found)
    raise ValueError(
        f"init_from={name}: there is no such file, and no folder with {' or '.join(WEIGHTS)}"
    )


def hub_folder(name: str) -> Path:
    """The files of a model on the hub; those of this machine's cache if the hub is silent."""
    from huggingface_hub import snapshot_download

    try:
        for weights in ("model*.safetensors*", "pytorch_model*.bin*"):
            folder = Path(snapshot_download(name, allow_patterns=[weights, SETTINGS, TOKENIZER]))
            if any(folder.glob(weights)):
                break
    except (OSError, ValueError) as error:
        raise ValueError(
            f"init_from={name}: it is no folder here; {' '.join(str(error).split())} Without a "
            f"network, download it elsewhere (hf download {name} --local-dir FOLDER) and add "
            "init_from=FOLDER"
        ) from error
    return folder
