"""Measure which tiles the Triton kernels are fastest with on this GPU, and write them into the
table that ships with them.

    python -m scripts.tune head_dim=64,128 seconds=300

Arguments are key=value, lists with commas; all have a default:

    kernel    of forward, dkdv, dkdv_general, dq, decoding (all)
    head_dim  of 64, 128, 256 (64,128)
    seconds   time for all of it (300)

A tile is not timed if it spills registers, has serialised matrix products or does not fit into
shared memory. The others are timed in bfloat16 over 16,384 tokens with heads * head_dim = 2048, at
1,024 and 16,384 tokens per sequence, causal and not. dkdv_general is timed with grouped heads and a
window, decoding with one query against 8,192 keys and more. The best geometric mean of the times
wins. Other tables in the file do not change. The clock of a shared GPU varies, so the current tile
is timed again with every candidate.
"""

import itertools
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, Literal, NamedTuple

import torch

from attention.decoding import FIXED_SPLITS
from attention.kernels.tiles import TILES, VARIANTS, Tile, padded_head_dim, table_for, tables
from scripts.arguments import command, default
from scripts.attention_call import seconds

LENGTHS = (1024, 16384)
TOKENS, WIDTH = 16384, 2048
GROUPS, WINDOW = 4, 512
HEAD_DIMS = (64, 128, 256)


@dataclass
class Options:
    kernel: list[Literal[tuple(VARIANTS)]] = default(*VARIANTS)
    head_dim: list[int] = default(64, 128)
    seconds: float = 300

    def __post_init__(self) -> None:
        for head_dim in set(self.head_dim) - set(HEAD_DIMS):
            raise ValueError(f"head_dim={head_dim} is not one of: {HEAD_DIMS}")


def candidates(kernel: str, head_dim: int) -> Iterator[Tile]:
    """Tiles to try, the largest first: sizes for tensor cores, with at least 16 rows for each warp
    (decoding excepted).
    """
    if kernel == "decoding":
        for walk, warps, stages in itertools.product((256, 128, 64, 32), (2, 4, 8), (2, 3, 4)):
            yield Tile(64, walk, warps, stages)
        return
    walks_keys = kernel in ("forward", "dq")
    walked = (128, 64, 32) if walks_keys else (128, 64, 32, 16)
    for own, walk, warps, stages in itertools.product((128, 64), walked, (4, 8), (2, 3)):
        if own >= 16 * warps and own * walk * head_dim <= 128 * 128 * 128:
            block_q, block_kv = (own, walk) if walks_keys else (walk, own)
            yield Tile(block_q, block_kv, warps, stages)


class Compiled(NamedTuple):
    variant: str
    registers: int  # per thread
    spilled: int  # bytes per thread
    shared: int  # bytes per program
    warnings: list[str]  # ptxas' warning numbers for products that it serialises


# arguments of the kernels that are float32 whatever the dtype of q
STATISTICS = {
    *("lse_ptr", "top_ptr", "max_ptr", "row_sum_ptr", "sinks_ptr"),  # of the forward pass
    *("sum_ptr", "delta_ptr"),  # of the backward pass
    "params_ptr",
}
INTERVALS = {"lo_ptr", "hi_ptr", "ranges_ptr"}
INTEGERS = {*INTERVALS, "lengths_ptr", "table_ptr"}


def constants_of(dtype: str, head_dim: int, variant: str, tile: Tile) -> dict[str, Any]:
    """The kernel's arguments that are constants in this variant; None is an absent tensor."""
    from attention.kernels.launch import SOFTMAXES
    from attention.kernels.score_mods import find_score_mod

    softmax = SOFTMAXES.get(variant, SOFTMAXES["online"])
    mod = "attention.kernels.score_mods:softcap_alibi" if variant == "score_mod" else ""
    absent = {"top_ptr", "sinks_ptr"}
    absent |= INTERVALS if variant != "intervals" else set()
    absent |= {"params_ptr"} if variant != "score_mod" else set()
    absent |= {"max_ptr", "row_sum_ptr"} if dtype != "fp32" else set()
    absent |= {"table_ptr"} if variant != "pages" else set()
    return {
        **dict.fromkeys(absent),
        **{name.upper(): step for name, step in softmax._asdict().items()},
        "CAUSAL": variant != "full",
        "INTERVALS": variant == "intervals",
        "SCORE_MOD": find_score_mod(mod),
        "GROUPS": 4 if variant == "grouped" else 1,
        "D": head_dim,
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "BLOCK_D": padded_head_dim(head_dim),
        "PRECISION": "ieee",
        "SPLITS": FIXED_SPLITS,
        "PAGE_SIZE": 64 if variant == "pages" else 0,
    }


def type_of(name: str, kernel: str, dtype: str, constants: dict[str, Any]) -> str:
    """The type of a kernel's argument, as Triton writes it."""
    if name in constants:
        return "constexpr"
    if name.endswith("_desc"):
        rows = constants["BLOCK_Q" if name in ("q_desc", "do_desc") else "BLOCK_KV"]
        return f"tensordesc<{dtype}[1, 1, {rows}, {constants['BLOCK_D']}]>"
    if name in INTEGERS:
        return "*i32"
    if name in STATISTICS or (kernel == "decoding" and name == "out_ptr"):
        return "*fp32"
    if name.endswith("_ptr"):
        return f"*{dtype}"
    return "fp32" if "scale" in name else "i32"


class Assembled(NamedTuple):
    """The output of ptxas for a kernel, and its report."""

    cubin: bytes
    registers: int  # per thread
    spilled: int  # bytes per thread
    stack: int  # bytes per thread
    warnings: list[str]  # warning numbers for products that ptxas serialises


def assemble(ptx: str, capability: int) -> Assembled:
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        architecture = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
        out = file.with_suffix(".cubin")
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={architecture}", file, "-o", out]
        done = subprocess.run(command, capture_output=True, text=True)
        said = done.stderr
        if done.returncode:
            raise RuntimeError(f"ptxas refuses it ({done.returncode}): {said or done.stdout}")
        cubin = out.read_bytes()
    patterns = r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes stack frame"
    figures = (int(re.search(pattern, said)[1]) for pattern in patterns)
    return Assembled(cubin, *figures, sorted(set(re.findall(r"C75\d\d", said))))


def compile_tile(
    kernel: str, dtype: str, head_dim: int, variant: str, tile: Tile, *, capability: int = 90
) -> Compiled:
    """Compile one variant with Triton's own compiler and ptxas; no GPU is needed. dtype as Triton
    writes it: bf16, fp16 or fp32. Raises Triton's error if the tile cannot be compiled.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from attention.kernels import backward, decoding, forward

    functions = {
        "forward": forward.forward_kernel,
        "dkdv": backward.dkdv_kernel,
        "dkdv_general": backward.dkdv_kernel,
        "dq": backward.dq_kernel,
        "decoding": decoding.split_kernel,
    }
    function = functions[kernel]
    constants = constants_of(dtype, head_dim, variant, tile)
    names = function.arg_names
    types = {name: type_of(name, kernel, dtype, constants) for name in names}
    values = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    # as a launch finds them: pointers and strides are multiples of 16 bytes
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name not in constants and (name.endswith("_ptr") or name.startswith("stride"))
    }
    source = ASTSource(function, types, constexprs=values, attrs=aligned)
    stages = decoding.stages_of(tile, paged=variant == "pages")
    options = {"num_warps": tile.num_warps, "num_stages": stages}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    made = assemble(binary.asm["ptx"], capability)
    return Compiled(variant, made.registers, made.spilled, binary.metadata.shared, made.warnings)


def why_not(
    kernel: str, head_dim: int, tile: Tile, capability: int, shared_memory: int
) -> str | None:
    """Why the tile is not timed, or None."""
    for variant in VARIANTS[kernel]:
        if variant == "no_rescale":  # the user chooses its tiles
            continue
        try:
            compiled = compile_tile(kernel, "bf16", head_dim, variant, tile, capability=capability)
        except Exception as error:  # whatever the compiler raises
            return f"{variant}: {type(error).__name__}"
        if compiled.spilled:
            return f"{variant}: spills {compiled.spilled} bytes"
        if compiled.warnings:
            return f"{variant}: products serialised"
        if compiled.shared > shared_memory:
            return f"{variant}: takes {compiled.shared} bytes of shared memory"
    return None


def time_of(function: Callable[[], Any]) -> float:
    """Median seconds, after a warm-up. triton.testing.do_bench would also count the waits of a
    short kernel for the host.
    """
    device = torch.device("cuda")
    seconds(function, repeats=3, device=device)
    return median(seconds(function, repeats=12, device=device)[0])


def decoding_workloads(head_dim: int) -> list[Callable[[], Any]]:
    """Steps of decoding in bfloat16: batches with separate keys per head and with grouped heads,
    2 GiB of keys and values each, and one sequence."""
    from attention.kernels.decoding import split_attention

    calls, heads = [], WIDTH // head_dim
    for batch, groups, length in ((32, 1, 8192), (64, 8, 32768), (1, 1, 8192)):
        q, k, v = (
            torch.randn(batch, number, tokens, head_dim, device="cuda", dtype=torch.bfloat16)
            for number, tokens in ((heads, 1), *[(max(heads // groups, 1), length)] * 2)
        )
        lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        settings = (length, 0, head_dim**-0.5, "", "auto")
        calls.append(partial(split_attention, q, k, v, lengths, None, None, *settings))
    return calls


def workloads(kernel: str, head_dim: int) -> list[Callable[[], Any]]:
    """Calls whose time depends on the kernel's tile."""
    if kernel == "decoding":
        return decoding_workloads(head_dim)
    from attention.kernels.launch import Settings, backward, forward
    from attention.mask import visible_keys

    calls, general = [], kernel == "dkdv_general"
    for length, causal in itertools.product(LENGTHS, (True,) if general else (True, False)):
        heads = WIDTH // head_dim
        shape = (TOKENS // length, length, heads, head_dim)
        q, k, v, d_out = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for _ in range(4)
        )
        lo = hi = None
        if general:
            k, v = (x[:, :: min(GROUPS, heads)] for x in (k, v))
            visible = visible_keys(q, k, causal=True, window=WINDOW)
            lo, hi = visible.lo, visible.hi
        settings = Settings(causal, head_dim**-0.5)
        others = lo, hi, None, None, False, settings
        if kernel == "forward":
            calls.append(partial(forward, q, k, v, *others))
        else:
            results = forward(q, k, v, *others)[:3]
            calls.append(partial(backward, d_out, None, q, k, v, *results, *others))
    return calls


def use_tile(tile: Tile, kernel: str, head_dim: int, table: dict[str, Any]) -> None:
    """Put a tile into the table, and let the next launches read it there."""
    from attention.kernels import launch

    table["16-bit"][kernel][str(head_dim)] = list(tile)
    launch.constants.cache_clear()


def tune(kernel: str, head_dim: int, table: dict[str, Any], capability: int, until: float) -> None:
    """Put the fastest tile into the table, in place."""
    where = f"{kernel} D={head_dim}"
    before = Tile(*table["16-bit"][kernel][str(head_dim)])
    calls, best = workloads(kernel, head_dim), (1.0, before)
    for tile in candidates(kernel, head_dim):
        if time.monotonic() > until:
            print(f"{where}: out of time, {tuple(best[1])} stays", flush=True)
            break
        if tile == before:
            continue
        why = why_not(kernel, head_dim, tile, capability, table["shared_memory"])
        if why is None:
            ratios = []
            for call in calls:
                times = []
                for each in (before, tile):
                    use_tile(each, kernel, head_dim, table)
                    times.append(time_of(call))
                ratios.append(times[1] / times[0])
            best = min(best, (geometric_mean(ratios), tile))
            each_call = " ".join(f"{ratio:.3f}" for ratio in ratios)
            why = f"{geometric_mean(ratios):.3f} of the time of {tuple(before)}: {each_call}"
        print(f"{where} {tuple(tile)}: {why}", flush=True)
    ratio, fastest = best
    use_tile(fastest, kernel, head_dim, table)
    print(f"{where}: {tuple(fastest)}, {ratio:.3f} of the time of {tuple(before)}", flush=True)


def write_tables(path: Path) -> None:
    """Write the tables with one line per kernel."""
    text = json.dumps(tables(), indent=1)
    by_kernel = re.sub(r"\{[^{}]*\}", lambda found: json.dumps(json.loads(found[0])), text)
    path.write_text(by_kernel + "\n")


@command
def main(options: Options) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("TRITON_INTERPRET=1 is set, so nothing is compiled; unset it")
    shapes = list(itertools.product(options.kernel, options.head_dim))
    if not torch.cuda.is_available():
        raise ValueError("tiles are timed on a GPU, and there is none")
    properties = torch.cuda.get_device_properties(0)
    major, minor = capability = properties.major, properties.minor
    name = f"sm_{10 * major + minor}"
    if name not in tables():
        like = table_for(capability, properties.shared_memory_per_block_optin)
        tables()[name] = json.loads(json.dumps(like))
        table_for.cache_clear()
    table = tables()[name]
    start = time.monotonic()
    for i, (kernel, head_dim) in enumerate(shapes, 1):
        until = start + options.seconds * i / len(shapes)
        tune(kernel, head_dim, table, 10 * major + minor, until)
    import triton

    table["how"] = (
        f"measured on an {properties.name}, torch {torch.__version__}, triton "
        f"{triton.__version__}, head_dim {options.head_dim}"
    )
    write_tables(TILES)
    print(
        f"{TILES} is written; run the tests of attention/kernels on this GPU before you commit it"
    )


if __name__ == "__main__":
    main()
