"""Predict what a run needs before it starts: memory part by part, the cards that it fits, and the
memory traffic of its attention.

    python -m scripts.plan model=gpt2 tokenizer=gpt2 seq_len=8192 attention=naive,triton gpu=a100-40

It takes train.py's settings (model=, seq_len=, batch_size=, dtype=, tokenizer=, compile=,
experiment=, ...), and these:

    attention   names, separated by commas (naive,tiled,sdpa,triton)
    gpu         the card to plan for: b200, h200, h100, a100-80, a100-40, l40s, l4, rtx4090, rtx3090
                (the one in this machine, else h200); device=cpu plans for a CPU
    measure     true: also build the model, run three steps here, and print the error of the
                prediction
    out         write everything to this JSON file

The bytes are calculated from the code (scripts/memory_model.py says how exactly, and what is not
modelled). A card loses 0.7 GiB to the CUDA context.
"""

from bisect import bisect_left
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple

import torch

from attention import Backend, dtype_name
from config import SYNTHETIC_SOURCES, RunConfig
from model import GPT
from scripts import traffic
from scripts.arguments import Json, command, compose_new, default
from scripts.cards import (
    BLOCK_DEFAULT_KIB,
    CARD_SIZES,
    CONTEXT_GIB,
    GPUS,
    PEAK_BANDWIDTH,
    REGISTER_BYTES,
    SHARED_KIB,
)
from scripts.memory_model import (
    MATERIALISED,
    RECOMPUTED,
    TILE_LOOP,
    StepBytes,
    kind_of,
    layer_sizes,
    parameter_count,
    predict_peak_bytes,
)
from scripts.tables import Row, text_table
from training.launch.command_line import compose
from training.loop.device import DTYPES, autocast_to, pick_device, pick_dtype
from training.loop.schedule import able, check_schedule, needed_features, run_compiles, suit_gpu
from training.loop.trained import data_of
from training.record.environment import measured_on
from training.record.files import write_json
from training.record.memory import GIB, MemoryMeter
from training.record.speed import PEAK_FLOPS, data_sheet

TILES = ((64, 64), (128, 64), (128, 128), (256, 64), (256, 256))


@dataclass
class Options:
    attention: list[str] = default()
    gpu: Literal[tuple(GPUS)] | None = None
    measure: bool = False
    out: Json | None = None
    overrides: list[str] = default()  # settings of train.py


def vocab_size_of(config: RunConfig) -> int:
    """The vocabulary's size, without reading a corpus or downloading GPT-2's vocabulary."""
    from data import build_tokenizer

    if config.data.source in SYNTHETIC_SOURCES:
        return data_of(config).vocab_size
    if config.tokenizer.name == "gpt2":
        return config.tokenizer.vocab_size or 50257
    return build_tokenizer(config.tokenizer).vocab_size


class Planned(NamedTuple):
    config: RunConfig
    backend: Backend
    plan: StepBytes
    device: str
    dtype: torch.dtype


def plan_all(options: Options) -> dict[str, Planned]:
    planned = {}
    needed = needed_features(compose(*options.overrides))
    names = ["naive", "tiled", "sdpa", "triton"]
    names = options.attention or [name for name in names if name in able(needed)]
    # as in a sweep, one of several attentions may lack an option
    kept = ("attention.",) if len(names) > 1 else ()
    asked = [each for each in options.overrides if not each.startswith(kept)]
    for name in names:
        config = compose_new(*options.overrides, f"attention={name}", asked=asked)
        backend = check_schedule(config)[0]
        # a GPU unless a CPU is requested
        device, usual = ("cpu", "fp32") if config.device == "cpu" else ("cuda", "bf16")
        dtype = DTYPES[usual if config.dtype == "auto" else config.dtype]
        if device == "cuda":
            backend = suit_gpu(config, backend, config.attention.backend_options())
        if dtype not in backend.dtypes:
            raise ValueError(
                f"attention={name} does not take {dtype_name(dtype)}; choose another dtype="
            )
        plan = predict_peak_bytes(config, vocab_size_of(config), backend, dtype, device)
        planned[name] = Planned(config, backend, plan, device, dtype)
    return planned


def largest_batch(planned: Planned, vocab_size: int, gib: float) -> int:
    """How many sequences of one pass fit into `gib` GiB; 0 for none."""
    config, backend, _, device, dtype = planned

    def fits(batch_size: int) -> bool:
        # with as many passes a step as planned
        tokens = config.accumulation_steps * batch_size * config.seq_len
        more = replace(config, batch_size=batch_size, tokens_per_step=tokens)
        return predict_peak_bytes(more, vocab_size, backend, dtype, device).peak / GIB <= gib

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    return bisect_left(range(high), True, lo=low + 1, key=lambda size: not fits(size)) - 1


def call_traffic(backend: Backend, device: str, call: traffic.Call) -> traffic.Traffic:
    kind = kind_of(backend, device)
    if kind == MATERIALISED:
        return traffic.naive(call)
    given = {name: backend.options.get(name) for name in ("block_q", "block_kv")}
    tiles = {name: size for name, size in given.items() if size}
    count = traffic.tile_loop if kind in (TILE_LOOP, RECOMPUTED) else traffic.fused
    return count(call, **tiles)


def attention_call(planned: Planned, window: int | None = None) -> traffic.Call:
    """One attention call of the run."""
    config, model, element = planned.config, planned.config.model, planned.dtype.itemsize
    shape = config.batch_size, model.num_heads, config.seq_len, model.head_dim
    return traffic.Call(*shape, element, window=window)


def traffic_of(planned: Planned) -> tuple[traffic.Traffic, traffic.Traffic]:
    """The traffic of one attention call of the run, under its widest window: by the formula that is
    often printed, and counted.
    """
    where = planned.backend, planned.device
    printed = traffic.printed_naive if kind_of(*where) == MATERIALISED else traffic.printed_fused
    call = attention_call(planned, layer_sizes(planned.config)["window"])
    return printed(call), call_traffic(*where, call)


def measure_peak(planned: Planned, vocab_size: int) -> int:
    """Peak bytes of a training step on this machine, counted as in a run."""
    config = planned.config
    device = pick_device(config.device)
    if device.type != planned.device:
        raise ValueError(
            f"measure=true measures on the {device.type} that is here, and the plan is for a GPU; "
            f"add device={device.type}"
        )
    dtype = pick_dtype(config.dtype, device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    made = {"vocab_size": vocab_size, "backend": planned.backend}
    model = GPT(config.model, **made, attention=config.attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    compiled = run_compiles(config, planned.backend, device.type)
    run = torch.compile(model) if compiled else model
    tokens = torch.randint(vocab_size, (config.batch_size, config.seq_len), device=device)

    def step() -> None:
        with autocast_to(dtype, device):
            loss = run(tokens, tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    # the first step allocates AdamW's moments and libraries' workspaces
    for _ in range(2):
        step()
    meter = MemoryMeter(device)
    with meter.measured(list(model.parameters()), optimizer.state_dict()["state"], tokens):
        step()
    return round(meter.peaks()["memory/peak_gib"] * GIB) - before


PARTS = {
    "parameters": "parameters, float32",
    "optimizer": "AdamW's moments",
    "weight_copies": "16-bit copies of the matrices",
    "blocks": "activations: norms, residual stream, MLP",
    "scores": "attention: N x N probabilities",
    "attention": "attention: q, k, v, out, lse",
    "loss": "gradients that the loss has ready",
    "working": "gradients of activations, temporaries",
    "peak": "peak of a step",
}


def memory_table(plans: dict[str, StepBytes]) -> list[list[str]]:
    in_gib = any(plan.peak >= GIB for plan in plans.values())
    unit, size = ("GiB", GIB) if in_gib else ("MiB", GIB // 1024)
    rows = [[unit, *plans]]
    for part, words in PARTS.items():
        values = [getattr(plan, part) for plan in plans.values()]
        if part == "attention":
            values = [plan.attention - plan.scores for plan in plans.values()]
        rows.append([words, *(f"{value / size:,.2f}" for value in values)])
    return rows


def fits_table(planned: dict[str, Planned], vocab_size: int) -> list[list[str]]:
    rows = [["card", *planned]]
    for size, gib in CARD_SIZES.items():
        cells = []
        for each in planned.values():
            most = largest_batch(each, vocab_size, gib - CONTEXT_GIB)
            fits = "yes" if each.config.batch_size <= most else "no"
            cells.append(f"{fits} (batch_size {most})")
        rows.append([f"{size} GB", *cells])
    return rows


def traffic_table(planned: dict[str, Planned]) -> list[list[str]]:
    columns = [traffic_of(each) for each in planned.values()]
    printed, counted = zip(*columns, strict=True)
    return [
        ["one attention call, forward", *planned],
        ["GB, as usually printed", *(f"{x.bytes / 1e9:,.3f}" for x in printed)],
        ["GB, K and V read per query tile", *(f"{x.bytes / 1e9:,.3f}" for x in counted)],
        ["FLOP/byte, as usually printed", *(f"{x.intensity:,.1f}" for x in printed)],
        ["FLOP/byte", *(f"{x.intensity:,.1f}" for x in counted)],
    ]


def chip_table(head_dim: int, element: int) -> list[list[str]]:
    blocks = {f"{BLOCK_DEFAULT_KIB} KiB default": BLOCK_DEFAULT_KIB}
    blocks |= SHARED_KIB
    rows = [["tile (queries x keys)", "shared", "registers", *blocks]]
    for block_q, block_kv in TILES:
        shared, registers = traffic.tile_bytes(block_q, block_kv, head_dim, element)
        in_registers = registers <= REGISTER_BYTES
        fits = [in_registers and shared <= kib * 1024 for kib in blocks.values()]
        sizes = [f"{shared / 1024:.0f} KiB", f"{registers / 1024:.0f} KiB"]
        rows.append([f"{block_q} x {block_kv}", *sizes, *("yes" if fit else "no" for fit in fits)])
    return rows


def gpu_here() -> str | None:
    if not torch.cuda.is_available():
        return None
    names = {card.data_sheet: gpu for gpu, card in GPUS.items()}
    return data_sheet(names, torch.cuda.get_device_name())


def print_for_gpu(planned: dict[str, Planned], vocab_size: int, gpu: str) -> None:
    call, card = attention_call(next(iter(planned.values()))), GPUS[gpu]
    print(
        f"\nfits, with the largest batch_size that does ({CONTEXT_GIB} GiB of each card are the "
        "CUDA context's):\n"
    )
    print(text_table(fits_table(planned, vocab_size)))
    print(f"\n{text_table(traffic_table(planned))}\n")
    ridge = PEAK_FLOPS[card.data_sheet] / PEAK_BANDWIDTH[card.data_sheet]
    print(
        f"{gpu}'s data sheet: from {ridge:,.0f} FLOP/byte on its tensor cores are the limit, "
        "below that its memory."
    )
    shared = SHARED_KIB[card.capability]
    bound = traffic.lower_bound_bytes(call, sram_bytes=shared * 1024)
    print(
        f"N^2 D^2 / M, with the {shared} KiB a block of {gpu} may have for M: "
        f"{bound / 1e9:,.3f} GB."
    )
    print(
        f"\nfits on the chip, by compute capability ({gpu} is {card.capability}), head_dim "
        f"{call.head_dim}, two stages of K and V:\n"
    )
    print(text_table(chip_table(call.head_dim, call.element)))


@command
def main(options: Options) -> None:
    planned = plan_all(options)
    config, _, _, device, dtype = next(iter(planned.values()))
    vocab_size = vocab_size_of(config)
    measured = {}
    if options.measure:
        measured = {name: measure_peak(each, vocab_size) for name, each in planned.items()}
    count = parameter_count(config.model, vocab_size)
    gpu = options.gpu or gpu_here() or "h200"
    if device == "cuda" and not options.gpu:
        why = "the GPU that is here" if gpu_here() else "an assumption: no GPU is known here"
        print(
            f"planned for gpu={gpu}, {why}; gpu=NAME plans for another card, device=cpu for a CPU\n"
        )
    print(f"model={config.model.name}: {count:,} parameters, vocabulary {vocab_size:,}")
    pass_of = f"{config.batch_size} x {config.seq_len} tokens a pass"
    print(f"{pass_of}, {device} {dtype_name(dtype)}\n")
    print(text_table(memory_table({name: each.plan for name, each in planned.items()})))
    for name, peak in measured.items():
        print(
            f"measured here, attention={name}: {peak / GIB:,.3f} GiB; the prediction is "
            f"{planned[name].plan.peak / peak - 1:+.1%} off"
        )
    if device == "cuda":
        print_for_gpu(planned, vocab_size, gpu)
    if options.out:
        where = measured_on(pick_device("auto"))
        rows = [
            as_json(name, each, vocab_size, measured.get(name)) for name, each in planned.items()
        ]
        write_json(options.out, {"environment": where, "rows": rows})


def as_json(name: str, planned: Planned, vocab_size: int, measured_bytes: int | None) -> Row:
    config = planned.config
    printed, counted = traffic_of(planned)
    return {
        "attention": name,
        "model": asdict(config.model),
        "vocab_size": vocab_size,
        **{key: getattr(config, key) for key in ("seq_len", "batch_size", "compile")},
        "device": planned.device,
        "dtype": dtype_name(planned.dtype),
        "plan": asdict(planned.plan),
        "measured_peak_bytes": measured_bytes,
        "traffic_bytes": counted.bytes,
        "printed_traffic_bytes": printed.bytes,
    }


if __name__ == "__main__":
    main()
