"""Watch one attention call tile by tile: what each tile adds, how it corrects the sums, and where a
broken attention breaks.

    python -m scripts.trace attention=no_max dtype=fp16 inputs=large

It prints the steps of one query and writes a page that replays them, exact beside broken. Arguments
are key=value, and every key has a default. The default inputs are an example of eight keys that can
be followed by hand:

    attention      a tile loop: its name, or pkg.module:NAME for your own (no_rescale; with run=,
                   the run's)
    dtype          fp32, bf16 or fp16, of q, k and v (fp32; with run=, the run's)
    softmax_dtype  float32, or input to keep scores and sums in dtype too (float32)
    inputs         worked, or random ones: normal, large, growing, spike, huge, negative, up, down,
                   ties, ones (worked)
    seq_len        queries and keys of random inputs (128)
    head_dim       of random inputs (16)
    seed           of random inputs (0)
    causal         whether a query sees only the keys up to its own (true; false for the worked
                   example)
    block_q        queries of a tile (16; 4)
    block_kv       keys of a tile (16; 4; with run=, the run's)
    row            the query to follow (the first to break in the last tile of queries that breaks)
    run            a run's directory: take the q, k and v of its trained weights on held-out data
    layer          of the run (0)
    head           of the run (0)
    device         auto, cpu or cuda (auto)
    out            the page (trace.html)
"""

import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from attention import BACKENDS, LIMITS, Backend, attention, dtype_name, get_backend
from attention.interface import Output
from attention.look.trace import Trace, trace
from conformance.adversarial import ADVERSARIAL
from conformance.cases import Case
from scripts.arguments import Count, Device, Natural, check_out, command
from scripts.trace_page import render_page
from training.loop.device import DTYPES, pick_device
from training.loop.trained import Trained, load_trained, read_run_config, trained_data
from training.record.files import write_file
from training.record.names import as_typed

WORKED_Q = [
    [1.0, 0.0, 0.5, -0.3],
    [0.2, 1.0, -0.1, 0.8],
    [-0.5, 0.3, 1.0, 0.1],
    [0.7, -0.4, 0.2, 0.6],
    [0.3, 0.8, -0.2, 0.4],
    [-0.1, 0.5, 0.7, -0.6],
    [0.9, -0.3, 0.4, 0.2],
    [0.1, 0.6, -0.8, 0.5],
]
WORKED_SCORES = [0.8, 0.3, -0.1, 0.5, 1.2, -0.4, 0.6, 0.1]  # of the first query
WORKED_COLUMNS = ("weight of\nkeys 0–3", "weight of\nkeys 4–7", "mean\nposition", "sum of\nweights")
# the broken tensor, in words
CAUSES = {
    "scores": "a score is not finite",
    "p": "p = exp(score - what is subtracted) passes the largest {dtype}",
    "row_sum": "the sum of p passes the largest number of its dtype",
    "acc": "p @ v passes the largest number of its dtype",
    "row_sum = 0": "every p rounds to 0, and 0/0 is left to divide",
}

INPUTS = ("worked", *ADVERSARIAL)
MOST_TOKENS = 2**14  # a replay of as many takes minutes
# the keys that are read, by where q, k and v come from
READ = {
    "inputs=worked": ("inputs", "causal"),
    "random inputs=": ("inputs", "causal", "seq_len", "head_dim", "seed"),
    "run=DIR": ("layer", "head"),
}


@dataclass
class Options:
    attention: str | None = None
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    softmax_dtype: Literal["float32", "input"] = "float32"
    inputs: Literal[INPUTS] | None = None
    seq_len: Count | None = None
    head_dim: Count | None = None
    seed: int | None = None
    causal: bool | None = None
    block_q: Count | None = None
    block_kv: Count | None = None
    row: int | None = None
    run: Path | None = None
    layer: Natural | None = None
    head: Natural | None = None
    device: Device = "auto"
    out: Path = Path("trace.html")

    def __post_init__(self) -> None:
        worked = self.inputs in (None, "worked")
        source = "run=DIR" if self.run else "inputs=worked" if worked else "random inputs="
        for owner, keys in READ.items():
            for key in keys:
                value = getattr(self, key)
                if value is not None and key not in READ[source]:
                    raise ValueError(f"{key}={as_typed(value)} is for {owner}, not for {source}")


class Call(NamedTuple):
    """One attention call to look at."""

    q: Tensor  # (1, 1, N, D)
    k: Tensor  # (1, 1, M, D)
    v: Tensor
    source: str  # the origin of q, k and v, in words
    arguments: dict[str, Any]  # of attention(): causal, and the function of a run's layer
    # the defaults of the keys with these names
    attention: str = "no_rescale"
    block_q: int = 16
    block_kv: int = 16
    row: int | None = None
    columns: tuple[str, ...] | None = None  # meaning of the entries of an output row


def worked_example() -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (1, 1, 8, 4): two tiles of four keys, for which the first query has the scores
    WORKED_SCORES.

    The columns of v give the output a meaning: see WORKED_COLUMNS.
    """
    q = torch.tensor(WORKED_Q, dtype=torch.float64)
    k = q.flip(0)
    # the first query is (1, 0, 0.5, -0.3) and scores are divided by sqrt(4): solve for the first
    # column
    k[:, 0] = 2 * torch.tensor(WORKED_SCORES, dtype=torch.float64) - k[:, 1:] @ q[0, 1:]
    position = torch.arange(8, dtype=torch.float64)
    v = torch.stack((position < 4, position >= 4, position / 7, torch.ones(8)), 1).to(torch.float64)
    return q[None, None], k[None, None], v[None, None]


def made_call(options: Options) -> Call:
    device, dtype = pick_device(options.device), DTYPES[options.dtype or "fp32"]
    if options.inputs in (None, "worked"):
        q, k, v = (x.to(device, dtype) for x in worked_example())
        source, how = "the worked example", {"causal": bool(options.causal)}
        return Call(q, k, v, source, how, block_q=4, block_kv=4, row=0, columns=WORKED_COLUMNS)
    length, head_dim = options.seq_len or 128, options.head_dim or 16
    case = Case(1, 1, 1, length, length, head_dim, inputs=options.inputs, seed=options.seed or 0)
    (q, k, v), *_ = case.make(dtype, str(device))
    source = f"inputs={options.inputs} seed={case.seed}"
    return Call(q, k, v, source, {"causal": options.causal is not False})


def captured_call(options: Options, run: Path) -> Call:
    """q, k and v of one head of a trained run on held-out data."""
    layer, head = options.layer or 0, options.head or 0
    config = replace(read_run_config(run), device=options.device)
    chosen, model = config.attention, config.model
    if config.data.documents or chosen.score_mod:
        raise ValueError(
            f"run={run} was trained with data.documents=true or attention.score_mod, and a replay "
            "shows neither"
        )
    for key, asked, size in (("layer", layer, model.num_layers), ("head", head, model.num_heads)):
        if asked >= size:
            raise ValueError(f"{key}={asked} is not in {run}, which has {key}s 0 to {size - 1}")
    data, trained = trained_data(run, config), load_trained(run, config)
    held_out = data.val_batch(config.eval_sequences).inputs
    q, k, v = inputs_of_layers(trained, held_out[:1])[layer]
    kv_head = head * k.shape[1] // q.shape[1]
    dtype = q.dtype if options.dtype is None else DTYPES[options.dtype]
    q, k, v = (x[:, i : i + 1].to(dtype) for x, i in ((q, head), (k, kv_head), (v, kv_head)))
    function = trained.model.blocks[layer].attention.function
    if "alibi_slopes" in function:
        function["alibi_slopes"] = function["alibi_slopes"][head : head + 1]
    source = f"layer {layer}, head {head} of {run} after {trained.step} steps"
    source += ", the first held-out sequence"
    usual = BACKENDS["tiled"].options["block_kv"]
    tile = trained.model.backend.options.get("block_kv") or usual
    how = {"causal": True} | function
    return Call(q, k, v, source, how, attention=chosen.name, block_kv=tile)


@torch.no_grad()
def inputs_of_layers(trained: Trained, tokens: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q (1, H, N, D), k and v (1, H_kv, N, D) of each layer, for tokens (1, N)."""
    model, seen = trained.model.eval(), []

    def capture(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Output:
        seen.append((q, k, v))
        return attention(q, k, v, **arguments)

    with model.using(call=capture), trained.autocast:
        model(tokens.to(next(model.parameters()).device))
    return seen


def pick_backend(name: str) -> Backend:
    """The backend. Raises ValueError, which lists the backends that can be traced."""
    backend = get_backend(name)
    if not backend.observable:
        traceable = ", ".join(name for name, each in BACKENDS.items() if each.observable)
        raise ValueError(
            f"attention={name} shows nothing of its tiles; these can be traced: {traceable}, and "
            "your own with observable=True, which calls observer= after each tile"
        )
    return backend


def look(options: Options) -> tuple[Call, Backend, Trace]:
    """Make or capture the inputs, and trace the backend beside `tiled` with the same tiles."""
    call = captured_call(options, options.run) if options.run else made_call(options)
    shared = {
        "block_q": options.block_q or call.block_q,
        "block_kv": options.block_kv or call.block_kv,
        "softmax_dtype": options.softmax_dtype,
    }
    backend = pick_backend(options.attention or call.attention).configured(**shared)
    row, queries = call.row if options.row is None else options.row, call.q.shape[2]
    if queries > MOST_TOKENS:
        raise ValueError(f"seq_len={queries}: a replay takes at most {MOST_TOKENS} tokens")
    if row is not None and not 0 <= row < queries:
        raise ValueError(f"row={row} is not one of the {queries} queries")
    backend.check_supported(*call[:3], **call.arguments)
    exact, scale = get_backend("tiled", **shared), call.q.shape[3] ** -0.5
    found = trace(*call[:3], backend=backend, exact=exact, row=row, scale=scale, **call.arguments)
    return call, backend, found


def headline(call: Call, backend: Backend) -> str:
    options, arguments = backend.options, dict(call.arguments)
    causal = ", causal" if arguments.pop("causal") else ""
    changes = "".join(
        f", {name.removesuffix('_slopes')}={float(x):g}" for name, x in arguments.items()
    )
    (*_, num_queries, head_dim), dtype = call.q.shape, dtype_name(call.q.dtype)
    throughout = " throughout" if options.get("softmax_dtype") == "input" else ""
    return (
        f"attention={backend.name} in {dtype}{throughout}, {call.source}: {num_queries} queries "
        f"and keys of head_dim {head_dim}{causal}{changes}, tiles of {options['block_q']} queries "
        f"by {options['block_kv']} keys"
    )


def verdict(found: Trace, dtype: torch.dtype) -> str:
    """One sentence on the result, and one on where it first went wrong."""
    counts = Counter(fate for fate in found.fates if fate != "right")
    if not counts:
        return "Every row is as close to exact attention as rounding allows."
    words = {"wrong": "finite but wrong", "zero": "exact zeros"}
    named = [f"{count} {words.get(fate, fate)}" for fate, count in counts.most_common()]
    fates = ", ".join(named) if len(named) > 1 else named[0].partition(" ")[2]
    text = f"{counts.total()} of {len(found.fates)} rows come out wrong: {fates}."
    if found.first is None:
        return text + " Nothing leaves the finite range."
    queries, keys, cause, score = found.first
    why = CAUSES[cause].format(dtype=dtype_name(dtype))
    return (
        f"{text} The first tile to leave the finite range is that of queries "
        f"{queries.start}:{queries.stop} and keys {keys[0]}:{keys[1]}, "
        f"whose largest score is {score:.2f}: {why}."
    )


def table(found: Trace) -> str:
    """The followed row, tile by tile."""
    i = found.row - found.rows.start
    heads = ("max score", "largest p", "row_max", "row_sum", "correction", "|acc|", "|output|")
    heads += ("error", "of tiled")
    lines = [
        f"query {found.row}, of the tile of queries {found.rows.start}:{found.rows.stop}",
        f"{'keys':>11} " + " ".join(f"{x:>10}" for x in heads),
    ]
    for n, (keys, step) in enumerate(zip(found.tiles, found.found, strict=True)):
        figures = (
            step.scores[i].amax(),
            step.p[i].amax(),
            step.row_max[i],
            step.row_sum[i],
            step.alpha[i],
            step.acc[i].abs().amax(),
            step.out[i].abs().amax(),
            found.error[n][i],
            found.exact_error[n][i],
        )
        mark = "  <- breaks" if n == found.breaks[i] else ""
        lines.append(
            f"{keys[0]:>5}:{keys[1]:<5} " + " ".join(f"{x.item():>10.4g}" for x in figures) + mark
        )
    return "\n".join(lines)


@command
def main(options: Options) -> None:
    check_out(options.out, ".html")
    call, backend, replay = look(options)
    text = {
        "headline": headline(call, backend),
        "verdict": verdict(replay, call.q.dtype),
        "defect": backend.defect,
    }
    typed = [x for x in sys.argv[1:] if not x.startswith("out=")]
    about = text | {
        "name": backend.name,
        "dtype": dtype_name(call.q.dtype),
        "largest": torch.finfo(call.q.dtype).max,
        "limit": LIMITS.get(call.q.dtype),
        "columns": call.columns,
        "command": " ".join(["python -m scripts.trace", *typed]),
    }
    page = render_page(replay, about)
    print(*filter(None, text.values()), "", table(replay), "", sep="\n")
    write_file(options.out, page)
    print(f"{options.out}: {len(page) / 1e6:.2f} MB, open it in a browser")


if __name__ == "__main__":
    main()
