"""Let a trained run write: a prompt, and what the model makes of it.

    python -m scripts.sample run=$(dirname $(ls -dt outputs/*/*/checkpoint | head -1)) \
        prompt="def main("

Arguments are key=value; every key but `run` has a default:

    run          the run's directory, or one of its checkpoints, such as RUN/checkpoint.best
    prompt       text to go on from; empty (the default) starts a document
    tokens       how many to write (200)
    temperature  0 always takes the likeliest token (0.8)
    top_k        draw among the k likeliest tokens only; 0 for all (50)
    seed         of the draws (0)
    attention    another attention than the run's, with its own default options
    device       auto, cpu or cuda (auto)
    cache        keep keys and values between tokens (true, where the attention allows it)
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from attention import get_backend
from config import RunConfig
from data import build_tokenizer
from model import GPT, sample_text
from scripts.arguments import Device, check_at_least, command
from training.checkpoint import load_model_state, read_meta
from training.device import pick_device, pick_dtype
from training.retention import run_of
from training.schedule import backend_after, chosen_attention
from training.sweep import load_json


@dataclass
class Options:
    run: Path
    prompt: str = ""
    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0
    attention: str | None = None
    device: Device = "auto"
    cache: bool | None = None

    def __post_init__(self) -> None:
        check_at_least(self, 1, "tokens")


def read_config(run: Path) -> RunConfig:
    run = run_of(run)
    path = run / "config.yaml"
    if not path.is_file():
        runs = sorted(run.glob("[!.]*/config.yaml"))
        hint = f"; it holds runs, such as {runs[0].parent}" if runs else ""
        # a run that was refused has no more than that
        if reason := load_json(run / "summary.json").get("error"):
            hint = f"; the run ended before it began: {str(reason).splitlines()[0]}"
        raise ValueError(f"{run} is no run directory: it has no config.yaml{hint}")
    try:
        return OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.load(path))
        )
    except (OmegaConfBaseException, YAMLError) as error:
        raise ValueError(
            f"{path} is not the configuration of a run: {str(error).splitlines()[0]}"
        ) from error


def sample(options: Options) -> str:
    config = replace(read_config(options.run), device=options.device)
    if config.data.source == "last_write":
        raise ValueError(
            f"{options.run} was trained on last_write, whose tokens are not text: there is nothing "
            "to write"
        )
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    trained_with, wanted = config.attention, options.attention
    if wanted not in (None, trained_with.name):
        backend = get_backend(wanted)
        print(
            f"attention={wanted}; the run was trained with attention={trained_with.name}",
            file=sys.stderr,
        )
    else:
        # the one the run had come to, where it changed its attention
        backend = backend_after(chosen_attention(trained_with), read_meta(options.run)["step"])
    tokenizer = build_tokenizer(config.tokenizer)
    model = GPT(config.model, vocab_size=tokenizer.vocab_size, backend=backend).to(device)
    load_model_state(options.run, model)

    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        return sample_text(
            model,
            tokenizer,
            options.prompt,
            max_new_tokens=options.tokens,
            temperature=options.temperature,
            top_k=options.top_k or None,
            seed=options.seed,
            use_cache=options.cache,
        )


@command("sample", Options)
def main(options: Options) -> None:
    print(sample(options))


if __name__ == "__main__":
    main()
