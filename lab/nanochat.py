"""Compare our training step with nanochat's and nanoGPT's: tokens per second and peak memory.

    python -m lab.nanochat folder=../nanochat nanogpt=../nanoGPT attention=triton out=nanochat.json

nanochat (github.com/karpathy/nanochat) is not part of this project: folder= is your clone, from
which we import the model and its optimizer. Its step is the one of its base_train.py: torch.compile
without autocast, Muon and AdamW without clipping, and a wait for the loss. The model is nanochat's
own, as deep and as wide as ours and with heads of 128. It needs about as many multiplications per
token as GPT-2, see flops_per_token. Both train on the same batches, each in its own process.

nanochat runs with its own attention, full in every layer. That is FlashAttention-3 where its loader
finds it, else PyTorch's. Then our attentions replace its flash_attn_func, with full attention and
with nanochat's windows (SSSL).

    attention    ours, several, separated by commas
    seq_len      several lengths; tokens=32768 is the size of every pass
    passes       several numbers of passes in an optimizer step. By default nanochat has 16
    steps        steps of each run. The first ten are not timed. The rest are timed ten by ten
    rounds       runs of each program (2), in turns
    nanogpt      your clone of nanoGPT, whose step is then measured too, with one pass
    model, vocab_size, device    as in lab.nanogpt

Other arguments are settings of our train.py.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from attention import attention
from lab.nanogpt import (
    WARMUP,
    WINDOW,
    Comparison,
    check_clone,
    describe,
    in_own_process,
    timed,
    train_ours,
    train_theirs,
)
from model import GPT
from scripts.arguments import Count, command, default, parse_backend
from scripts.tables import Row
from training.device import pick_device
from training.trained import data_of, read_run_config

HEAD_DIM = 128  # as in nanochat's base_train.py
FULL, WINDOWS = "L", "SSSL"  # patterns of layers with full attention, and with a window


@dataclass
class Options(Comparison):
    nanogpt: Path | None = None
    seq_len: list[Count] = default(1024, 8192)
    passes: list[Count] = default(1)
    steps: Annotated[int, WARMUP + WINDOW] = 60
    rounds: Count = 2

    repository: ClassVar[str] = "karpathy/nanochat"
    files: ClassVar[tuple[str, ...]] = ("nanochat/gpt.py", "nanochat/flash_attention.py")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nanogpt:
            check_clone("nanogpt", self.nanogpt, Comparison.files, Comparison.repository)


def train_nanochat(
    folder: Path, run_dir: Path, steps: int, *, pattern: str = FULL, name: str | None = None
) -> Row:
    """nanochat's step on the batches of one of our runs, with our attention `name`, if given."""
    config = read_run_config(run_dir)
    device = pick_device(config.device)
    torch.set_float32_matmul_precision("high")
    sys.path.insert(0, str(folder.resolve()))
    nanochat = import_module("nanochat.gpt")
    if name:
        replacement = partial(as_flash_attn_func, backend=parse_backend(name))
        import_module("nanochat.flash_attention").flash_attn.flash_attn_func = replacement
    data, shape = data_of(config), config.model
    heads = max(shape.hidden_size // HEAD_DIM, 1)
    settings = nanochat.GPTConfig(
        sequence_len=config.seq_len,
        vocab_size=data.vocab_size,
        n_layer=shape.num_layers,
        n_head=heads,
        n_kv_head=heads,
        n_embd=shape.hidden_size,
        window_pattern=pattern,
    )
    with redirect_stdout(StringIO()):  # it prints how it pads and scales
        with torch.device("meta"):  # init_weights() makes the values
            model = nanochat.GPT(settings)
        model.to_empty(device=device)
        model.init_weights()
        optimizer = model.setup_optimizer()
    run = torch.compile(model, dynamic=False) if device.type == "cuda" else model

    def take(_: int, batch: list[Tensor]) -> None:
        passes = list(zip(*(x.split(int(config.batch_size)) for x in batch), strict=True))
        for each in passes:
            loss = run(*(x.to(device, non_blocking=True) for x in each))
            (loss / len(passes)).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        loss.item()

    return timed(take, config, data, steps) | {"flops_per_token": model.estimate_flops()}


def as_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window_size: tuple[int, int],
    **how: Any,
) -> Tensor:
    """attention() in the layout of flash_attn_func: q, k, v and the result are (B, N, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    window = window_size if 0 <= window_size[0] < k.shape[2] else None
    return attention(q, k, v, causal=causal, window=window, **how).out.transpose(1, 2)


def flops_of_ours(run_dir: Path) -> int:
    """As nanochat counts its own: every score, also those that the causal mask leaves out."""
    config = read_run_config(run_dir)
    with torch.device("meta"):
        made = {"vocab_size": data_of(config).vocab_size, "backend": parse_backend("sdpa")}
        return GPT(config.model, **made).flops_per_token(config.seq_len, causal=False)


def compare(options: Options, scratch: Path, seq_len: int, passes: int) -> Iterator[Row]:
    """The rows of every program at one length, with so many passes per step."""
    how = {"seq_len": seq_len, "steps": options.steps, "log_every": WINDOW}
    how["tokens_per_step"] = passes * options.tokens

    def ours(name: str, run_dir: Path) -> Row:
        found = train_ours(options, run_dir, attention=name, **how)
        return found | {"flops_per_token": flops_of_ours(run_dir)}

    def theirs(train: Callable[..., Row], folder: Path, run_dir: Path, **variation: Any) -> Row:
        return in_own_process(train, folder, run_dir, options.steps, **variation)

    chat = partial(theirs, train_nanochat, options.folder)
    programs: dict[str, Callable[[Path], Row]] = {
        name: partial(ours, name) for name in options.attention
    }
    if options.nanogpt and passes == 1:
        programs["nanogpt"] = partial(theirs, train_theirs, options.nanogpt)
    programs["nanochat"] = chat
    for name in options.attention:
        for pattern in (FULL, WINDOWS):
            programs[f"nanochat, {name}, {pattern}"] = partial(chat, pattern=pattern, name=name)
    for number in range(options.rounds):
        run_dir = scratch / f"{seq_len}-{passes}-{number}"  # the others read our run's settings
        for who, run in programs.items():
            found = {"passes": passes, "round": number} | run(run_dir)
            yield describe(who, seq_len, options, found)


@command
def main(options: Options) -> None:
    result = options.head() | {"speed": []}
    with tempfile.TemporaryDirectory() as scratch:
        for seq_len in options.seq_len:
            for passes in options.passes:
                for row in compare(options, Path(scratch), seq_len, passes):
                    result["speed"].append(row)
                    options.save(result)


if __name__ == "__main__":
    main()
