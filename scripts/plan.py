"""Predict what a run needs before it starts: the memory of a step, the largest batch that fits, and
the memory traffic of its attention.

    python -m scripts.plan model=gpt2 tokenizer=gpt2 seq_len=8192 attention=naive,triton gpu=a100-40

It takes train.py's settings (model=, seq_len=, batch_size=, dtype=, tokenizer=, experiment=, ...),
and these:

    attention  names, separated by commas, or your own as pkg.module:BACKEND (naive,sdpa,triton);
               a tile loop of PyTorch's operators takes minutes if there are many tiles
    gpu        the card to plan for: b200, h200, h100, a100-80, a100-40, l40s, l4, rtx4090, rtx3090
               (the one in this machine, else h200); device=cpu plans for a CPU

PyTorch's MemTracker counts one eager step on tensors without values, so no GPU is needed and no
memory is taken. The pool of a CUDA graph, gaps in the allocator's blocks and the scratch of some
kernels are not counted. results/training_peaks_h200.json has compiled runs that were measured; the
count is within 10% of each. Under model.checkpoint=attention a compiled run keeps less than the
count, so no largest batch is printed. A card loses 0.7 GiB to the CUDA context.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from attention import Backend, dtype_name, is_shipped
from config import SYNTHETIC_SOURCES, RunConfig
from model import GPT
from model.fast import FastGPT
from scripts import traffic
from scripts.arguments import command, compose_new, default
from scripts.tables import text_table
from training.launch.command_line import compose
from training.loop.device import DTYPES, autocast_to
from training.loop.flops import count_parameters
from training.loop.optimizer import build_optimizer
from training.loop.schedule import able, chosen_attention, needed_features, run_compiles, suit_gpu
from training.loop.trained import data_of
from training.record.memory import GIB
from training.record.speed import PEAK_FLOPS

# where the tensors without values are: autograd takes a GPU's only where there is one
CPU = torch.device("cpu")


class Card(NamedTuple):
    name: str  # in PEAK_FLOPS
    bytes_per_second: float  # of its memory, from the data sheet
    gib: float  # as PyTorch's out-of-memory errors give it
    # the most that one block can request, from the CUDA C++ programming guide
    shared_kib: int


GPUS = {
    "b200": Card("B200", 8.0e12, 178.3, 227),
    "h200": Card("H200", 4.8e12, 139.8, 227),
    "h100": Card("H100", 3.35e12, 79.1, 227),
    "a100-80": Card("A100", 2.039e12, 79.1, 163),
    "a100-40": Card("A100", 1.555e12, 39.4, 163),
    "l40s": Card("L40S", 0.864e12, 44.4, 99),
    "l4": Card("L4", 0.300e12, 22.0, 99),
    "rtx4090": Card("RTX 4090", 1.008e12, 23.5, 99),
    "rtx3090": Card("RTX 3090", 0.936e12, 23.5, 99),
}
REGISTERS_KIB = 256  # per multiprocessor, of every card above
# GPU memory that the driver and the libraries take before the first tensor, measured on an H200
CONTEXT_GIB = 0.7
# one for cuBLAS and one for cuBLASLt, with the CUBLAS_WORKSPACE_CONFIG=:4096:8 that training sets
CUDA_WORKSPACES = 2 * 8 * 4096 * 1024
TILES = ((64, 64), (128, 64), (128, 128), (256, 64), (256, 256))
# kernels of a GPU alone; the others of the same attention keep as much
ONLY_ON_A_GPU = {"backend": ("efficient", "cudnn"), "kernel": ("hopper",)}


@dataclass
class Options:
    attention: list[str] = default()
    gpu: Literal[tuple(GPUS)] | None = None
    overrides: list[str] = default()  # settings of train.py


class Planned(NamedTuple):
    config: RunConfig
    backend: Backend
    device: str
    dtype: torch.dtype
    vocab_size: int


def vocab_size_of(config: RunConfig) -> int:
    """The vocabulary's size, without reading a corpus or downloading GPT-2's vocabulary."""
    from data import build_tokenizer

    if config.data.source in SYNTHETIC_SOURCES:
        return data_of(config).vocab_size
    if config.tokenizer.name == "gpt2":
        return config.tokenizer.vocab_size or 50257
    return build_tokenizer(config.tokenizer).vocab_size


def plan_all(options: Options) -> dict[str, Planned]:
    planned = {}
    fit = able(needed_features(compose(*options.overrides)))
    names = options.attention or [name for name in ("naive", "sdpa", "triton") if name in fit]
    # as in a sweep, one of several attentions may lack an option
    kept = ("attention.",) if len(names) > 1 else ()
    asked = [each for each in options.overrides if not each.startswith(kept)]
    for name in names:
        config = compose_new(*options.overrides, f"attention={name}", asked=asked)
        backend = chosen_attention(config)[0]
        # a GPU unless a CPU is requested
        device, usual = ("cpu", "fp32") if config.device == "cpu" else ("cuda", "bf16")
        dtype = DTYPES[usual if config.dtype == "auto" else config.dtype]
        if device == "cuda":
            backend = on_a_gpu(config, backend, dtype)
        planned[name] = Planned(config, backend, device, dtype, vocab_size_of(config))
    return planned


def on_a_gpu(config: RunConfig, backend: Backend, dtype: torch.dtype) -> Backend:
    """The attention as a GPU runs it, with kernels that fake tensors of a CPU take too."""
    for option, kernels in ONLY_ON_A_GPU.items():
        if backend.options.get(option) in kernels:
            backend = backend.configured(**{option: "auto"})
    suited = suit_gpu(config, backend, config.attention.backend_options())
    try:
        with FakeTensorMode():
            suited.check_model(**config.model.attention_sizes, dtype=dtype, device=CPU)
    except ValueError:  # as in a run: tiles that are too small for a kernel, say
        return backend
    return suited


def model_without_values(planned: Planned) -> GPT:
    gpt = GPT(
        planned.config.model,
        vocab_size=planned.vocab_size,
        backend=planned.backend,
        attention=planned.config.attention,
    )
    return FastGPT(gpt)


def step_bytes(planned: Planned, batch_size: int) -> dict[str, int]:
    """Bytes at the peak of one eager step, by MemTracker's kinds of tensors. "peak" is the sum."""
    config = planned.config
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model_without_values(planned)
        optimizer = build_optimizer(model, config.optimizer())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # makes the moments
        if config.sequences_per_step == config.batch_size:
            optimizer.zero_grad()
        tokens = torch.zeros(batch_size, config.seq_len, dtype=torch.int64)
        documents = tokens if config.data.documents else None
        tracker = MemTracker()
        by_muon = config.optim.name == "muon"
        held = (optimizer.muon, optimizer.adamw) if by_muon else (optimizer,)
        tracker.track_external(model, *held, tokens)
        with model.using(look=False), tracker:
            with autocast_to(planned.dtype, CPU):
                loss = model(tokens, tokens, documents).loss
            loss.backward()
            optimizer.step()
        (found,) = tracker.get_tracker_snapshot("peak").values()
    kinds = {getattr(kind, "value", kind).lower(): count for kind, count in found.items()}
    if planned.device == "cuda":
        kinds["workspaces"] = CUDA_WORKSPACES
    kinds["peak"] = kinds.pop("total") + kinds.get("workspaces", 0)
    return kinds


def largest_batch(planned: Planned, peak: int, available: float) -> int:
    """How many sequences of one pass fit into `available` bytes; 0 for none. `peak`: the bytes of
    batch_size sequences.
    """
    size = planned.config.batch_size
    while peak > available:
        if size == 1:
            return 0
        size //= 2
        peak = step_bytes(planned, size)["peak"]
    while (peak_of_two := step_bytes(planned, 2 * size)["peak"]) <= available:
        size, peak = 2 * size, peak_of_two
    # between two sizes the peak grows evenly or ever faster, so this many fit
    return int(size + size * (available - peak) / (peak_of_two - peak))


def attention_call(planned: Planned) -> traffic.Call:
    """One attention call of the run, under its widest window."""
    config, model = planned.config, planned.config.model
    windows = config.attention.layer_windows(model.num_layers)
    return traffic.Call(
        batch=config.batch_size,
        heads=model.num_heads,
        seq_len=config.seq_len,
        head_dim=model.head_dim,
        element=planned.dtype.itemsize,
        window=None if None in windows else max(windows),
    )


def traffic_of(planned: Planned) -> int | None:
    """Bytes that one attention call moves; None for a tile loop of PyTorch's operators, and for an
    attention of the user's own.
    """
    backend, call = planned.backend, attention_call(planned)
    if backend.name == "naive" or backend.options.get("backend") == "math":
        return traffic.naive(call)
    if backend.observable or not is_shipped(backend):
        return None
    given = {name: backend.options.get(name) for name in ("block_q", "block_kv")}
    return traffic.fused(call, **{name: size for name, size in given.items() if size})


PARTS = {
    "parameter": "parameters, float32",
    "optstate": "the optimizer's moments",
    "gradient": "gradients of parameters",
    "activation": "activations, and what the loss keeps",
    "temp": "temporaries of the backward pass",
    "workspaces": "workspaces of cuBLAS",
    "peak": "peak of a step",
}


def traffic_table(planned: dict[str, Planned], card: Card) -> list[list[str]]:
    """The traffic of one call of each attention, beside what the card can do."""
    moved, intensity = ["GB moved"], ["FLOP/byte"]
    for each in planned.values():
        count = traffic_of(each)
        moved.append(f"{count / 1e9:,.3f}" if count else "-")
        intensity.append(f"{attention_call(each).flops / count:,.1f}" if count else "-")
    ridge = f"{PEAK_FLOPS[card.name] / card.bytes_per_second:,.0f}"
    limit = ["FLOP/byte from which the tensor cores are the limit"] + [ridge] * len(planned)
    return [["one attention call, forward", *planned], moved, intensity, limit]


def tile_table(call: traffic.Call, shared_kib: int) -> list[list[str]]:
    """Tiles of a flash kernel beside what a block may have."""
    heads = ["tile (queries x keys)", f"KiB shared of {shared_kib}"]
    rows = [[*heads, f"KiB in registers of {REGISTERS_KIB}", "fits"]]
    for block_q, block_kv in TILES:
        sizes = traffic.tile_bytes(block_q, block_kv, call.head_dim, call.element)
        shared, registers = (size / 1024 for size in sizes)
        fits = "yes" if shared <= shared_kib and registers <= REGISTERS_KIB else "no"
        rows.append([f"{block_q} x {block_kv}", f"{shared:.0f}", f"{registers:.0f}", fits])
    return rows


def gpu_here() -> str | None:
    """The card in this machine, if it is one of GPUS."""
    if not torch.cuda.is_available():
        return None
    here = torch.cuda.get_device_properties(0)
    size = here.total_memory / GIB
    fits = (name for name, x in GPUS.items() if x.name in here.name and abs(x.gib - size) < 1)
    return next(fits, None)


def batch_words(planned: Planned, peak: int, card: Card) -> str:
    """Whether a batch fits, and the largest that does where the count is that of a run."""
    config, available = planned.config, (card.gib - CONTEXT_GIB) * GIB
    fits = "fits" if peak <= available else "does not fit"
    compiled = run_compiles(config, planned.backend, planned.device)
    if compiled and config.model.checkpoint == "attention":
        return f"{fits} by this count; a compiled run keeps less"
    return f"{fits}; the largest batch_size is about {largest_batch(planned, peak, available):,}"


@command
def main(options: Options) -> None:
    planned = plan_all(options)
    first = next(iter(planned.values()))
    gpu = options.gpu or gpu_here() or "h200"
    config, card = first.config, GPUS[gpu]
    if first.device == "cuda" and not options.gpu:
        why = "the GPU that is here" if gpu_here() else "an assumption: no GPU is known here"
        print(f"gpu={gpu}, {why}; gpu=NAME plans for another card, device=cpu for a CPU\n")
    with FakeTensorMode(allow_non_fake_inputs=True):
        count = count_parameters(model_without_values(first))
    print(f"model={config.model.name}: {count:,} parameters, vocabulary {first.vocab_size:,}")
    print(
        f"{config.batch_size} x {config.seq_len} tokens a pass, {first.device} "
        f"{dtype_name(first.dtype)}; one step, eager, without the CUDA graph's pool\n"
    )
    plans = {name: step_bytes(each, config.batch_size) for name, each in planned.items()}
    memory = [["GiB", *plans]]
    for part, words in PARTS.items():
        memory.append([words, *(f"{plan.get(part, 0) / GIB:,.3f}" for plan in plans.values())])
    print(text_table(memory))
    if first.device == "cuda":
        print(f"\nin the {card.gib:g} GiB of {gpu}, less {CONTEXT_GIB} for the CUDA context:")
        for name, each in planned.items():
            print(f"{name}: {batch_words(each, plans[name]['peak'], card)}", flush=True)
        print("\n" + text_table(traffic_table(planned, card)))
        print("\n" + text_table(tile_table(attention_call(first), card.shared_kib)))


if __name__ == "__main__":
    main()
