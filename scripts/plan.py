"""What a run will need before it runs: memory part by part, which cards it fits, and the traffic of
its attention.

    python -m scripts.plan model=gpt2 tokenizer=gpt2 seq_len=8192 attention=naive,triton gpu=a100-40

Takes train.py's own settings (model=, seq_len=, batch_size=, dtype=, tokenizer=, compile=,
experiment=, ...), and of its own:

    attention   several names, separated by commas (naive,tiled,sdpa,triton)
    batch_size  auto, with tokens_per_step=N, plans for one sequence; the table of cards says how
                many fit
    gpu         the card to plan for: {gpus} (the one that is here, else h200); device=cpu plans for
                a CPU
    measure     true: also build the model, run three steps here, and print the error of the
                prediction
    out         write everything to this JSON file

Bytes are counted from the code (training/plan.py says how exactly, and what is not modelled). A
card loses {context} GiB to the CUDA context.
"""

import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attention import Backend, get_backend
from config import RunConfig
from model import GPT
from training import traffic
from training.command_line import compose
from training.device import DTYPES, pick_device, pick_dtype
from training.interrupt import one_line
from training.metrics import PEAK_BANDWIDTH, PEAK_FLOPS, check_writable, measured_on, write_json
from training.plan import (
    GIB,
    MATERIALISED,
    RECOMPUTED,
    TILE_LOOP,
    kind_of,
    parameter_count,
    predict_peak_bytes,
    predict_step,
)
from training.schedule import will_compile

ROOT = Path(__file__).resolve().parent.parent
CONTEXT_GIB = (
    0.7  # seen on an H200: what the driver and the libraries take of a card before the first tensor
)


class Card(NamedTuple):
    data_sheet: str  # its key in training.metrics.PEAK_FLOPS and PEAK_BANDWIDTH
    memory_gib: float
    capability: str  # compute capability


GPUS = {
    "b200": Card("B200", 178.0, "10.0"),
    "h200": Card("H200", 139.8, "9.0"),
    "h100": Card("H100", 79.6, "9.0"),
    "a100-80": Card("A100.*80GB", 79.3, "8.0"),
    "a100-40": Card("A100", 39.5, "8.0"),
    "l40s": Card("L40S", 44.5, "8.9"),
    "l4": Card("L4", 22.5, "8.9"),
    "rtx4090": Card("RTX 4090", 23.6, "8.9"),
    "rtx3090": Card("RTX 3090", 23.6, "8.6"),
}
CARD_SIZES = {
    8: 8.0,
    12: 12.0,
    16: 16.0,
    24: 24.0,
    40: 39.5,
    48: 48.0,
    80: 79.3,
    141: 139.8,
}  # as sold: GiB
TILES = ((64, 64), (128, 64), (128, 128), (256, 64), (256, 256))
OWN_KEYS = ("attention", "gpu", "measure", "out")


class Options(NamedTuple):
    attention: list[str]
    gpu: str | None
    measure: bool
    out: Path | None
    overrides: list[str]


def read_options(arguments: list[str]) -> Options:
    """Our own keys, and what is left for Hydra. Raises ValueError for a value that is not one."""
    own, overrides = {}, []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in OWN_KEYS:
            own[key] = value
        else:
            overrides.append(argument)
    if own.get("gpu") and own["gpu"] not in GPUS:
        raise ValueError(f"gpu={own['gpu']} is not one of: {', '.join(GPUS)}")
    if own.get("measure", "false") not in ("true", "false"):
        raise ValueError(f"measure={own['measure']} must be true or false")
    names = [name for name in own.get("attention", "naive,tiled,sdpa,triton").split(",") if name]
    return Options(
        names,
        own.get("gpu"),
        own.get("measure") == "true",
        Path(own["out"]) if own.get("out") else None,
        overrides,
    )


def vocab_size_of(config: RunConfig) -> int:
    """Without reading a corpus, and without downloading GPT-2's vocabulary to count it."""
    from data import build_data, build_tokenizer

    if config.data.source == "last_write":
        return build_data(
            config.data, config.tokenizer, seq_len=config.seq_len, seed=config.seed
        ).vocab_size
    if config.tokenizer.name == "gpt2":
        return config.tokenizer.vocab_size or 50257
    return build_tokenizer(config.tokenizer).vocab_size


def device_and_dtype(config: RunConfig) -> tuple[str, torch.dtype]:
    """What is planned for: a GPU, unless a CPU is asked for. Raises ValueError for a dtype that
    this GPU lacks.
    """
    device = "cpu" if config.device == "cpu" else "cuda"
    if config.dtype == "auto":
        return device, torch.float32 if device == "cpu" else torch.bfloat16
    return device, DTYPES[config.dtype]


class Planned(NamedTuple):
    config: RunConfig
    backend: Backend
    plan: Any  # StepBytes


def plan_all(options: Options) -> dict[str, Planned]:
    found = {}
    for name in options.attention:
        config = compose(*options.overrides, f"attention={name}")
        if config.batch_size == "auto":
            config = replace(config, batch_size=1)
        backend = get_backend(config.attention.backend_name, **config.attention.backend_options())
        device, dtype = device_and_dtype(config)
        if dtype not in backend.dtypes:
            raise ValueError(
                f"attention={name} does not take {str(dtype).removeprefix('torch.')}; choose "
                "another dtype="
            )
        found[name] = Planned(
            config,
            backend,
            predict_peak_bytes(config, vocab_size_of(config), backend, dtype, device),
        )
    if not found:
        raise ValueError("attention= names no backend")
    return found


def predict_run(run: dict[str, Any]) -> float:
    """GiB that are predicted for a run as summary.json records it, by its overrides; for comparison
    with its memory/peak_gib.
    """
    config = compose(*run["overrides"])
    backend = get_backend(config.attention.backend_name, **config.attention.backend_options())
    dtype = getattr(torch, run["dtype"])
    return (
        predict_peak_bytes(config, vocab_size_of(config), backend, dtype, run["device"]).peak / GIB
    )


def largest_batch(planned: Planned, vocab_size: int, gib: float) -> int:
    """Sequences of one pass that fit into that much memory; 0 for none."""
    config = planned.config
    device, dtype = device_and_dtype(config)
    compiled = will_compile(config.model, planned.backend, device, compile_mode=config.compile)

    def fits(batch_size: int) -> bool:
        sizes = {
            "vocab_size": vocab_size,
            "batch_size": batch_size,
            "seq_len": config.seq_len,
            "device": device,
            "compiled": compiled,
        }
        plan = predict_step(
            config.model,
            **sizes,
            backend=planned.backend,
            dtype=dtype,
            accumulates=config.accumulation_steps > 1,
        )
        return plan.peak / GIB <= gib

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def traffic_of(planned: Planned, *, printed: bool = False) -> traffic.Traffic:
    """Of one attention call of the run, forward; printed: by the accounting that the documents
    print.
    """
    config, backend = planned.config, planned.backend
    device, dtype = device_and_dtype(config)
    kind, shape = kind_of(backend, device), config.model
    sizes = (config.batch_size, shape.num_heads, config.seq_len, shape.head_dim, dtype.itemsize)
    if printed:
        return (traffic.printed_naive if kind == MATERIALISED else traffic.printed_fused)(*sizes)
    if kind == MATERIALISED:
        return traffic.naive(*sizes)
    tiles = {
        name: backend.options[name] for name in ("block_q", "block_kv") if backend.options.get(name)
    }
    return (traffic.tile_loop if kind in (TILE_LOOP, RECOMPUTED) else traffic.fused)(
        *sizes, **tiles
    )


def measure_peak(planned: Planned, vocab_size: int) -> int:
    """Bytes at the worst moment of a training step on this machine: the allocator's on a GPU, live
    tensors on a CPU.
    """
    from scripts.attention_call import MemoryProbe

    config = planned.config
    device = pick_device(config.device)
    if device.type != device_and_dtype(config)[0]:
        raise ValueError(
            f"measure=true measures on the {device.type} that is here, and the plan is for a GPU; "
            f"add device={device.type}"
        )
    dtype = pick_dtype(config.dtype, device)
    compiled = will_compile(config.model, planned.backend, device.type, compile_mode=config.compile)
    if compiled and device.type == "cpu":
        raise ValueError("measure=true sees into a compiled step on a GPU only; add compile=false")
    with MemoryProbe(device) as probe:
        model = GPT(config.model, vocab_size=vocab_size, backend=planned.backend).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        run = torch.compile(model) if compiled else model
        tokens = torch.randint(vocab_size, (config.batch_size, config.seq_len), device=device)
        for _ in range(
            3
        ):  # AdamW's moments come with the first, and libraries take their workspaces
            probe.take_peak()
            with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
                loss = run(tokens, tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return probe.take_peak()[0]


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
    "host": "block inputs, in the host's memory",
}


def memory_table(found: dict[str, Planned]) -> list[list[str]]:
    unit, size = (
        ("GiB", GIB) if max(x.plan.peak for x in found.values()) >= GIB else ("MiB", GIB // 1024)
    )
    rows = [[unit, *found]]
    for part, words in PARTS.items():
        if part == "host" and not any(x.plan.host for x in found.values()):
            continue
        values = [
            getattr(x.plan, part) - (x.plan.scores if part == "attention" else 0)
            for x in found.values()
        ]
        rows.append([words, *(f"{value / size:,.2f}" for value in values)])
    return rows


def fits_table(found: dict[str, Planned], vocab_size: int) -> list[list[str]]:
    rows = [["card", *found]]
    for size, gib in CARD_SIZES.items():
        cells = []
        for planned in found.values():
            most = largest_batch(planned, vocab_size, gib - CONTEXT_GIB)
            cells.append(
                ("yes" if planned.config.batch_size <= most else "no") + f" (batch_size {most})"
            )
        rows.append([f"{size} GB", *cells])
    return rows


def traffic_table(found: dict[str, Planned]) -> list[list[str]]:
    columns = {
        name: (traffic_of(planned, printed=True), traffic_of(planned))
        for name, planned in found.items()
    }
    return [
        ["one attention call, forward", *columns],
        [
            "GB, as usually printed",
            *(f"{printed.bytes / 1e9:,.3f}" for printed, _ in columns.values()),
        ],
        [
            "GB, K and V read per query tile",
            *(f"{real.bytes / 1e9:,.3f}" for _, real in columns.values()),
        ],
        [
            "FLOP/byte, as usually printed",
            *(f"{printed.intensity:,.1f}" for printed, _ in columns.values()),
        ],
        ["FLOP/byte", *(f"{real.intensity:,.1f}" for _, real in columns.values())],
    ]


def chip_table(head_dim: int, element: int) -> list[list[str]]:
    default = f"{traffic.BLOCK_DEFAULT_KIB} KiB default"
    rows = [["tile (queries x keys)", "shared", "registers", default, *traffic.SHARED_KIB]]
    for block_q, block_kv in TILES:
        shared, registers = traffic.tile_bytes(block_q, block_kv, head_dim, element)
        fits = [
            traffic.fits_on_chip(block_q, block_kv, head_dim, element, capability)
            for capability in traffic.SHARED_KIB
        ]
        fits = [
            shared <= traffic.BLOCK_DEFAULT_KIB * 1024 and registers <= traffic.REGISTER_BYTES,
            *fits,
        ]
        sizes = [f"{shared / 1024:.0f} KiB", f"{registers / 1024:.0f} KiB"]
        rows.append([f"{block_q} x {block_kv}", *sizes, *("yes" if fit else "no" for fit in fits)])
    return rows


def text_table(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def gpu_here() -> str | None:
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next(
        (gpu for gpu, card in GPUS.items() if re.search(rf"\b{card.data_sheet}\b", name)), None
    )


def print_for_gpu(found: dict[str, Planned], vocab_size: int, gpu: str) -> None:
    config, card = next(iter(found.values())).config, GPUS[gpu]
    element, head_dim = device_and_dtype(config)[1].itemsize, config.model.head_dim
    print(
        f"\nfits, with the largest batch_size that does ({CONTEXT_GIB} GiB of each card are the "
        "CUDA context's):\n"
    )
    print(text_table(fits_table(found, vocab_size)))
    print(f"\n{text_table(traffic_table(found))}\n")
    ridge = PEAK_FLOPS[card.data_sheet] / PEAK_BANDWIDTH[card.data_sheet]
    print(
        f"{gpu}'s data sheet: from {ridge:,.0f} FLOP/byte on its tensor cores are the limit, "
        "below that its memory."
    )
    shared = traffic.SHARED_KIB[card.capability][1]
    shape = (config.batch_size, config.model.num_heads, config.seq_len, head_dim, element)
    bound = traffic.lower_bound_bytes(*shape, sram_bytes=shared * 1024)
    print(
        f"N^2 D^2 / M, with the {shared} KiB a block of {gpu} may have for M: "
        f"{bound / 1e9:,.3f} GB."
    )
    print(
        f"\nfits on the chip, by compute capability ({gpu} is {card.capability}), head_dim "
        f"{head_dim}, two stages of K and V:\n"
    )
    print(text_table(chip_table(head_dim, element)))


@one_line("plan")
def main() -> None:
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(__doc__.format(gpus=", ".join(GPUS), context=CONTEXT_GIB))
        return
    try:
        options = read_options(sys.argv[1:])
        if options.out:
            check_writable(options.out)
        found = plan_all(options)
        first = next(iter(found.values()))
        config, vocab_size = first.config, vocab_size_of(first.config)
        measured = (
            {name: measure_peak(planned, vocab_size) for name, planned in found.items()}
            if options.measure
            else {}
        )
    except ValueError as error:
        sys.exit(f"plan: {error}")
    device, dtype = device_and_dtype(config)
    count = parameter_count(config.model, vocab_size)
    dtype_name = str(dtype).removeprefix("torch.")
    gpu = options.gpu or gpu_here() or "h200"
    if device == "cuda" and not options.gpu:
        why = "the GPU that is here" if gpu_here() else "an assumption: no GPU is known here"
        print(
            f"planned for gpu={gpu}, {why}; gpu=NAME plans for another card, device=cpu for a CPU\n"
        )
    print(f"model={config.model.name}: {count:,} parameters, vocabulary {vocab_size:,}")
    print(
        f"{config.batch_size} x {config.seq_len} tokens a pass, {device} "
        f"{dtype_name}\n\n{text_table(memory_table(found))}"
    )
    for name, peak in measured.items():
        print(
            f"measured here, attention={name}: {peak / GIB:,.3f} GiB; the prediction is "
            f"{found[name].plan.peak / peak - 1:+.1%} off"
        )
    if device == "cuda":
        print_for_gpu(found, vocab_size, gpu)
    if options.out:
        rows = [
            {
                "attention": name,
                "model": asdict(planned.config.model),
                "vocab_size": vocab_size,
                **{
                    key: getattr(planned.config, key)
                    for key in ("seq_len", "batch_size", "compile")
                },
                "device": device,
                "dtype": dtype_name,
                "plan": asdict(planned.plan),
                "measured_peak_bytes": measured.get(name),
                "traffic_bytes": traffic_of(planned).bytes,
                "printed_traffic_bytes": traffic_of(planned, printed=True).bytes,
            }
            for name, planned in found.items()
        ]
        where = measured_on(pick_device("auto"))
        write_json(options.out, {"environment": where, "rows": rows})


if __name__ == "__main__":
    main()
