"""Claims about memory in use: bytes alive while code runs here, and what an H200 recorded.

Dimensions: B batch, H heads, N queries and keys, D head dim.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attention import attention, get_backend
from attention.mask import QueryTile, visible_keys
from attention.online_softmax import OnlineSoftmax
from attention.tiled import TileLoop
from conformance.memory_growth import LiveTensors
from lab.claims.claim import FAILS, HOLDS, Figures, claim, growth, only_if, recorded, verdict
from lab.claims.inputs import inputs, textbook
from lab.claims.sizes import GIB, MIB, nbytes


def weigh(function: Callable[..., object], *given: Tensor) -> Figures:
    """Bytes that function(*given) takes above what it is given: the largest tensor, and the most
    alive together.
    """
    with LiveTensors(count_inputs=True) as scale:
        for x in given:
            x.detach()  # weighed from the start, so that it can be subtracted
        kept = function(*given)
    del kept
    return {
        "largest": scale.largest,
        "peak": scale.peak - sum(x.untyped_storage().nbytes() for x in given),
    }


def kept_for_backward(function: Callable[..., Tensor], *given: Tensor) -> int:
    """Bytes that autograd keeps between forward and backward, the inputs themselves left out."""
    ours = {x.untyped_storage().data_ptr() for x in given}
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in ours:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = function(*given)
    del out
    return sum(x.untyped_storage().nbytes() for x in kept.values())


def panels(q: Tensor, k: Tensor, v: Tensor, block: int = 256) -> Tensor:
    """The guide's form: all queries against one block of keys at a time, statistics in the inputs'
    dtype.
    """
    state = OnlineSoftmax.empty(q, dtype=q.dtype)
    for start in range(0, k.shape[2], block):
        state = state.update(
            q @ k[:, :, start : start + block].mT * q.shape[-1] ** -0.5,
            v[:, :, start : start + block],
        )
    return state.finalize()[0]


def through_the_loop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The tile loop under plain autograd, without the backward pass the project gives it."""
    visible = visible_keys(q, k, causal=False)
    loop = TileLoop(visible, scale=q.shape[-1] ** -0.5, dtype=q.dtype, block_q=64, block_kv=64)
    return loop.forward(*(x.unsqueeze(2) for x in (q, k, v)))[0].squeeze(2)


@claim(
    "chapter",
    says="On a card of 8 GB the naive forward pass (2 sequences, 8 heads of 64, float16) runs out "
    "of memory at 4,096 or 8,192 tokens; its "
    "curve leaves the chart between 2K and 4K.",
    criterion="the bytes alive above the inputs, measured on a short sequence and scaled by N^2, "
    "pass 8 GiB there",
    measured="GiB alive at 4,096 / 8,192 / 16,384 tokens: forward {forward}; with "
    "backward {training}",
    because="The chapter's 1 GB a tensor is twice what it is. A kernel that keeps its scores in "
    "float32 doubles these figures.",
    verdict=lambda f: (
        HOLDS
        if f["forward"]["8192"] > 8
        else only_if("the backward pass counts")
        if f["training"]["8192"] > 8
        else FAILS
    ),
    tiny={"length": 256},
)
def wall_of_8_gigabytes(length: int = 512) -> Figures:
    q, k, v = (x.requires_grad_() for x in inputs(0, 2, 8, length, 64, dtype=torch.float16))
    with torch.no_grad():
        forward = weigh(textbook, q, k, v)["peak"]
    training = weigh(lambda *qkv: textbook(*qkv).sum().backward(), q, k, v)["peak"]
    found: Figures = {}
    for name, peak in (("forward", forward), ("training", training)):
        found[name] = {str(n): peak * (n / length) ** 2 / GIB for n in (4096, 8192, 16384)}
        found[f"{name}_fails"] = min(int(n) for n, gib in found[name].items() if gib > 8)
    return found


@claim(
    "chapter, guide, deep dive",
    says="A tiled forward pass in plain PyTorch makes memory linear in the length.",
    criterion="bytes alive in the forward pass, and bytes kept for the backward pass, grow like "
    "N^1.15 or less",
    measured="the forward pass grows like N^{forward:.2f}. What is kept for the "
    "backward pass: under "
    "plain autograd N^{autograd:.2f}, with "
    "the project's recomputing backward N^{recomputing:.2f}, naive N^{naive:.2f}. At {longest:,} "
    "tokens plain autograd through the loop "
    "(tiles of 64) keeps {kept:.1f} times what naive keeps",
    because="Autograd keeps every tile. It takes a backward pass that computes them again from "
    "the log-sum-exp.",
    verdict=lambda f: (
        HOLDS
        if max(f["forward"], f["autograd"]) <= 1.15
        else only_if("gradients are off, or the backward pass recomputes the tiles")
        if max(f["forward"], f["recomputing"]) <= 1.15
        else FAILS
    ),
    tiny={"lengths": (256, 512)},
)
def linear_memory(lengths: tuple[int, ...] = (256, 512, 1024)) -> Figures:
    backend = get_backend("tiled", block_q=64, block_kv=64)
    functions = {
        "autograd": through_the_loop,
        "recomputing": lambda q, k, v: attention(q, k, v, backend=backend, causal=False).out,
        "naive": textbook,
    }
    forward, kept = {}, {name: {} for name in functions}
    for length in lengths:
        q, k, v = (x.requires_grad_() for x in inputs(0, 1, 2, length, 32))
        with torch.no_grad():
            forward[length] = weigh(through_the_loop, q, k, v)["peak"]
        for name, function in functions.items():
            kept[name][length] = kept_for_backward(function, q, k, v)
    longest = max(lengths)
    ratio = kept["autograd"][longest] / kept["naive"][longest]
    return {"forward": growth(forward), "kept": ratio, "longest": longest} | {
        name: growth(sizes) for name, sizes in kept.items()
    }


@claim(
    "chapter",
    says="Tiled attention in plain PyTorch takes less memory than naive attention at every length.",
    criterion="the bytes alive above the inputs are fewer at every length tried, tiles of 64",
    measured="tiled over naive, by length: {ratio:.2f}",
    because="Up to the length of a tile there is nothing to save, and the state comes on top.",
    verdict=lambda f: (
        HOLDS
        if max(f["ratio"].values()) < 1
        else only_if("the sequence is longer than a tile")
        if max(ratio for length, ratio in f["ratio"].items() if int(length) > 64) < 1
        else FAILS
    ),
    tiny={},
    also="python -m scripts.benchmark attention=naive,tiled,sdpa seq_len=256,512,1024",
)
def less_memory_at_every_length() -> Figures:
    ratio = {}
    for length in (32, 64, 128, 256, 512, 1024):
        q, k, v = inputs(0, 1, 2, length, 64)
        ratio[str(length)] = (
            weigh(through_the_loop, q, k, v)["peak"] / weigh(textbook, q, k, v)["peak"]
        )
    return {"ratio": ratio}


class Sizes:
    """An observer of the tile loop that keeps the size of the largest tile of scores."""

    largest = 0

    def observe(self, tile: QueryTile, keys: slice, scores: Tensor, state: OnlineSoftmax) -> None:
        self.largest = max(self.largest, scores.numel())


@claim(
    "chapter, deep dive",
    says="The largest intermediate has the size of a tile, whatever the length.",
    criterion="the largest tile of scores has the same number of elements at all lengths",
    measured="{elements}, by length, with blocks of 32; naive: {naive}",
    verdict=lambda f: verdict(len(set(f["elements"].values())) == 1),
    tiny={"lengths": (128, 256)},
)
def largest_intermediate(lengths: tuple[int, ...] = (128, 256, 512, 1024)) -> Figures:
    found = {}
    backend = get_backend("tiled", block_q=32, block_kv=32)
    for length in lengths:
        q, k, v = inputs(0, 1, 1, length, 32)
        sizes = Sizes()
        backend.fn(q, k, v, causal=False, scale=1.0, **backend.options, observer=sizes.observe)
        found[str(length)] = sizes.largest
    return {"elements": found, "naive": {str(length): length**2 for length in lengths}}


@claim(
    "guide",
    says="Its loop over key blocks needs O(B^2) for the scores of a tile.",
    criterion="the largest intermediate of that loop does not grow with the length",
    measured="it grows like N^{exponent:.2f}: at 2,048 tokens one block of scores is "
    "{share:.0%} of "
    "the full table",
    because="The queries are not tiled there: each step holds a panel of N x B. Still linear in "
    "N, but not B^2.",
    verdict=lambda f: verdict(f["exponent"] < 0.15),
    tiny={"lengths": (512, 1024)},
)
def panel_of_scores(lengths: tuple[int, ...] = (512, 1024, 2048)) -> Figures:
    sizes = {length: weigh(panels, *inputs(0, 1, 1, length, 16))["largest"] for length in lengths}
    longest = max(lengths)
    return {
        "exponent": growth(sizes),
        "share": sizes[longest] / nbytes(longest, longest, dtype=torch.float32),
    }


GUIDE_TABLE = {
    "2048": (3.1, 0.5),
    "4096": (12.4, 1.0),
    "8192": (math.inf, 2.0),
    "65536": (math.inf, 16.8),
}


def near(found: float, said: float) -> bool:
    """Within a factor of 1.5; where more than 40 GB were said, more than 40."""
    return found > 40 if said == math.inf else 1 / 1.5 <= found / said <= 1.5


@claim(
    "guide",
    says="With 32 heads of 64 in float16, standard attention takes 3.1 GB at 2,048 tokens, 12.4 GB "
    "at 4,096 and more than 40 GB at 8,192; "
    "its tiled form 0.5, 1.0 and 2.0 GB, 16.8 GB at 65,536.",
    criterion="every figure is right within a factor of 1.5, from the bytes alive in its own "
    "two functions",
    measured="standard GB by length: {standard}; tiled: {tiled}. The longest standard "
    "run that 40 GB "
    "hold: {longest:,} tokens",
    because="Measured on two heads and short sequences and scaled; inputs included.",
    verdict=lambda f: verdict(
        all(
            near(f["standard"][n], standard) and near(f["tiled"][n], tiled)
            for n, (standard, tiled) in GUIDE_TABLE.items()
        )
    ),
    tiny={"length": 512},
)
def memory_table_of_the_guide(length: int = 1024) -> Figures:
    q, k, v = inputs(0, 1, 2, length, 64, dtype=torch.float16)
    inputs_of = 3 * q.nbytes / length
    standard = weigh(textbook, q, k, v)["peak"] / length**2
    tiled = weigh(panels, q, k, v)["peak"] / length
    heads = 32 / 2
    lengths = (2048, 4096, 8192, 16384, 32768, 65536)
    found = {str(n): heads * (standard * n * n + inputs_of * n) / 1e9 for n in lengths}
    return {
        "standard": found,
        "tiled": {str(n): heads * (tiled + inputs_of) * n / 1e9 for n in lengths},
        "longest": max((n for n in lengths if found[str(n)] <= 40), default=0),
    }


@claim(
    "guide",
    says="Multi-query attention cuts the memory of k and v by the number of heads.",
    criterion="the bytes of k and v, and the result of 8 query heads over one shared head, "
    "are those of "
    "8 copies of that head",
    measured="{factor:.0f} times less for 8 heads; the results differ by {difference:.0e}",
    verdict=lambda f: verdict(f["factor"] == 8 and f["difference"] < 1e-6),
    tiny={},
)
def multi_query() -> Figures:
    q, k, v = inputs(0, 1, 8, 128, 32)
    shared = [x[:, :1].contiguous() for x in (k, v)]
    copies = [x.expand_as(q).contiguous() for x in shared]
    backend = get_backend("tiled", block_q=32, block_kv=32)
    few, many = (attention(q, *kv, backend=backend).out for kv in (shared, copies))
    return {
        "factor": sum(x.nbytes for x in copies) / sum(x.nbytes for x in shared),
        "difference": (few - many).abs().max().item(),
    }


@claim(
    "deep dive",
    says="In decoding the scores take O(L) anyway, so flash attention saves little memory there.",
    criterion="naive's scores of one query over L keys grow like L, and are smaller than the cache",
    measured="they grow like L^{exponent:.2f}; at 4,096 keys they take {share:.1%} of the "
    "bytes of k and v",
    verdict=lambda f: verdict(f["exponent"] < 1.15 and f["share"] < 1),
    tiny={"lengths": (512, 1024)},
)
def decoding_memory(lengths: tuple[int, ...] = (1024, 2048, 4096)) -> Figures:
    scores, cache = {}, 0
    for length in lengths:
        q, k, v = inputs(0, 1, 4, length, 64)
        scores[length] = (q[:, :, -1:] @ k.mT).nbytes
        cache = k.nbytes + v.nbytes
    return {"exponent": growth(scores), "share": scores[max(lengths)] / cache}


@claim(
    "notebook",
    says="Its benchmark compares the memory of the two forms.",
    criterion="both are given the same inputs and only their own memory counts",
    measured="naive is called on float32 copies of float16 inputs, which makes its peak "
    "{inflated:.1f} "
    "times what it takes in float16; the "
    "causal streaming form computes {tiles} tiles where {needed} hold a visible score",
    because="The peak counter also includes whatever is alive at the start. Subtract "
    "that, and give "
    "both the same dtype.",
    verdict=lambda f: verdict(f["inflated"] < 1.1 and f["tiles"] == f["needed"]),
    tiny={"length": 512},
)
def benchmark_of_the_notebook(length: int = 1024) -> Figures:
    q, k, v = inputs(0, 1, 2, length, 64, dtype=torch.float16)
    copies = weigh(lambda *qkv: textbook(*(x.float() for x in qkv)), q, k, v)["peak"]
    plain = weigh(textbook, q, k, v)["peak"]
    tiles = visible_keys(q, k, causal=True).query_tiles(128)
    return {
        "inflated": copies / plain,
        "tiles": len(tiles) ** 2,
        "needed": sum(len(list(tile.key_tiles(128))) for tile in tiles),
    }


def memory_rows() -> dict[str, dict[int, Figures]]:
    """Rows of results/memory_h200.json by backend (of its variants the first) and length; those out
    of memory have the key oom.
    """
    rows: dict[str, dict[int, Figures]] = {}
    for row in recorded("memory_h200")["rows"]:
        rows.setdefault(row["attention"].split(":")[0], {}).setdefault(row["seq_len"], row)
    return rows


@claim(
    "guide",
    says="At 4,096 tokens flash attention takes less than half the memory of standard attention.",
    criterion="its peak above the inputs is below half of naive's, forward and with backward",
    measured="on an H200, 16 heads of 64, bfloat16: naive {naive:,.0f} MiB forward and "
    "{naive_training:,.0f} with backward, the Triton "
    "kernels {triton:,.0f} and {triton_training:,.0f}",
    verdict=lambda f: verdict(
        f["triton"] < f["naive"] / 2 and f["triton_training"] < f["naive_training"] / 2
    ),
    reads="memory_h200",
)
def half_the_memory() -> Figures:
    rows = memory_rows()
    return {
        name + kind: rows[name][4096][f"{column}_bytes"] / MIB
        for name in ("naive", "triton")
        for kind, column in (("", "forward"), ("_training", "training"))
    }


@claim(
    "chapter, guide",
    says="Tiled attention moves the wall out by a factor of ten or more.",
    criterion="the length at which it takes what naive takes at its last length is at least ten "
    "times that length",
    measured="on an H200 naive runs at {fits:,} tokens ({gib:.1f} GiB with backward) and fails at "
    "{fails:,}; the Triton kernels take "
    "{triton_gib:.2f} GiB at {longest:,} and, growing like N^{exponent:.2f}, would take naive's "
    "{gib:.1f} GiB at a length {factor:.0f} "
    "times naive's last",
    verdict=lambda f: verdict(f["factor"] >= 10),
    reads="memory_h200",
)
def wall_moves_out() -> Figures:
    rows = memory_rows()
    fits = max(n for n, row in rows["naive"].items() if "oom" not in row)
    fails = min(n for n, row in rows["naive"].items() if "oom" in row)
    triton = {n: row["training_bytes"] for n, row in rows["triton"].items() if "oom" not in row}
    longest, exponent = max(triton), growth(triton)
    naive = rows["naive"][fits]["training_bytes"]
    reach = longest * (naive / triton[longest]) ** (1 / exponent)

    def tenth(name: str) -> int:
        """The first length tried at which a backend takes less than a tenth of what naive takes
        there.
        """
        own = {n: row["training_bytes"] for n, row in rows[name].items() if n <= fits}
        return min(n for n, size in own.items() if size < rows["naive"][n]["training_bytes"] / 10)

    return {
        "fits": fits,
        "fails": fails,
        "gib": naive / GIB,
        "asked": rows["naive"][fails]["oom"]["asked_gib"],
        "triton_there": triton[fails] / GIB,
        "tiled_there": rows["tiled"][fails]["training_bytes"] / GIB,
        "longest": longest,
        "triton_gib": triton[longest] / GIB,
        "exponent": exponent,
        "factor": reach / fits,
        "tenth_triton": tenth("triton"),
        "tenth_tiled": tenth("tiled"),
    }


def longest_rows(memory_gib: float) -> dict[str, Figures]:
    """Rows of results/longest_h200.json for a card held to that much memory, by backend and pass,
    as "naive forward".

    Raises FileNotFoundError, as for a file that is not there, where one of the two backends has not
    been measured.
    """
    rows = [row for row in recorded("longest_h200")["rows"] if row["memory_gib"] == memory_gib]
    found = {f"{row['attention'].split(':')[0]} {row['pass']}": row for row in rows}
    if not {"naive forward", "triton forward"} <= found.keys():
        raise FileNotFoundError(
            f"results/longest_h200.json holds no naive and triton with {memory_gib} GiB"
        )
    return found


@claim(
    "chapter",
    says="The same on a GPU: with 8 GB, naive attention (2 sequences, 8 heads of 64, float16) is "
    "at its end by 8,192 tokens.",
    criterion="on an H200 held to 8 GiB the longest naive forward pass is shorter "
    "than 8,192 tokens",
    measured="longest forward pass: naive {naive:,} tokens, the Triton kernels "
    "{triton:,}; forward and "
    "backward {naive_training:,} and "
    "{triton_training:,}",
    because="The project's naive keeps scores in float32, twice the bytes of the "
    "chapter's float16; "
    "the bytes alone, above, say 16,384.",
    verdict=lambda f: verdict(f["naive"] < 8192),
    reads="longest_h200",
)
def wall_of_8_gigabytes_on_a_gpu() -> Figures:
    rows = longest_rows(8)
    names = {
        "naive": "naive forward",
        "triton": "triton forward",
        "naive_training": "naive training",
        "triton_training": "triton training",
    }
    return {name: rows[key]["max_seq_len"] for name, key in names.items()}


@claim(
    "guide",
    says="On a card of 40 GB with 32 heads of 64 in float16, standard attention reaches 4,096 "
    "tokens and flash attention 65,536.",
    criterion="the longest forward passes on an H200 held to 40 GiB are those within a "
    "factor of 1.5",
    measured="naive {naive:,} tokens, the Triton kernels {triton:,} (ended by {limit})",
    verdict=lambda f: verdict(
        1 / 1.5 <= f["naive"] / 4096 <= 1.5 and 1 / 1.5 <= f["triton"] / 65536 <= 1.5
    ),
    reads="longest_h200",
)
def longest_on_40_gigabytes() -> Figures:
    rows = longest_rows(40)
    naive, triton = rows["naive forward"], rows["triton forward"]
    return {
        "naive": naive["max_seq_len"],
        "triton": triton["max_seq_len"],
        "limit": triton["limited_by"],
    }
