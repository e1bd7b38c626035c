"""Let a trained run write: it continues a prompt.

    python -m scripts.sample run=outputs/2026-01-31/12-00-00 prompt="def main("

Arguments are key=value; every key but `run` has a default:

    run          the run's directory, or one of its checkpoints, such as RUN/checkpoint.best
    prompt       text to continue; empty (the default) starts a document
    tokens       how many to write (200)
    temperature  0 always takes the likeliest token (0.8)
    top_k        draw only among the k likeliest tokens; 0 for all (50)
    seed         of the draws (0)
    attention    another attention than the run's, with its own default options
    device       auto, cpu or cuda (auto)
    cache        keep keys and values between tokens (true, if the attention allows it)

Control characters are written out, an escape as \\x1b, so that no text drives the terminal.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from attention import get_backend
from config import SYNTHETIC_SOURCES
from model import sample_text
from scripts.arguments import Count, Device, Natural, command
from training.loop.trained import load_trained, read_run_config, trained_tokenizer
from training.record.text_table import printable


@dataclass
class Options:
    run: Path
    prompt: str = ""
    tokens: Count = 200
    temperature: float = 0.8
    top_k: Natural = 50
    seed: int = 0
    attention: str | None = None
    device: Device = "auto"
    cache: bool | None = None


@command
def main(options: Options) -> None:
    config = replace(read_run_config(options.run), device=options.device)
    if config.data.source in SYNTHETIC_SOURCES:
        raise ValueError(
            f"{options.run} was trained on {config.data.source}, whose tokens are not text: there "
            "is nothing to write"
        )
    own, wanted, backend = config.attention.name, options.attention, None
    if wanted not in (None, own):
        backend = get_backend(wanted)
        print(f"attention={wanted}; the run was trained with attention={own}", file=sys.stderr)
    tokenizer = trained_tokenizer(options.run, config)
    trained = load_trained(options.run, config, backend)

    with trained.autocast:
        text = sample_text(
            trained.model,
            tokenizer,
            options.prompt,
            max_new_tokens=options.tokens,
            temperature=options.temperature,
            top_k=options.top_k or None,
            seed=options.seed,
            use_cache=options.cache,
        )
    print(printable(text))


if __name__ == "__main__":
    main()
