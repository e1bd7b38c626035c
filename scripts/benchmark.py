"""Peak memory and time of one attention call, forward and backward apart, over backends, lengths,
head dims and dtypes.

    python -m scripts.benchmark --attention naive tiled sdpa --seq-len 256 512 --out benchmark.json
    python -m scripts.benchmark --attention naive triton --max-length --memory-gib 8 24 40 --out
    longest.json

A backend whose results are wrong is not timed; --allow-broken times it and marks its rows. A
verdict is kept for the same commit, options and machine. Memory is the peak above what was
allocated before the call (q, k, v and the incoming gradient are inputs, not the attention's):
PyTorch's allocator's on a GPU, with what it reserved; on a CPU the tensors that operators make.

Time is the median with the 20th and 80th percentile, after a warm-up; the backward's is its own,
over a graph that is kept. The backends take turns, a quarter of the timed calls each, so that a
drifting clock hits all alike. On a GPU it is the device's time alone, by events: each call is
queued behind a short wait, so that the GPU never waits for the host, and finds nothing in the L2
cache (which takes 256 MiB). A card at its power limit lowers its clock: on an H200 after some 30 ms
of calls of the fastest kernels. Then a kernel's time depends on what ran before it; with --pause
every call finds a card that has rested. The host's time of a call stands beside it as
forward_host_seconds and backward_host_seconds: where it is the longer one, calls in a row take as
long as that, unless a CUDA graph replays them. TFLOP/s count the scores that the mask leaves, be it
causal, a --window or that of --documents; in a backward pass five products for the forward's two.
Running out of memory is a result: the row says what was asked for.

--max-length searches the longest sequence, of forward alone and of forward and backward, by
doubling and then halving the gap to 12%; --memory-gib does so as if the card were smaller. Options
follow a backend's name: tiled:block_q=512, and your own is pkg.module:BACKEND.
"""

import argparse
import contextlib
import hashlib
import json
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config

from attention import BACKENDS, Backend
from config import DataConfig
from data.token_store import cache_folder
from scripts.arguments import parse_backend
from scripts.attention_call import ROUNDS, Call, Measurement, longest, memory_cap, try_length
from training.device import DTYPES, pick_device, pick_dtype
from training.interrupt import one_line
from training.memory import (
    cpu_memory_limit,
    describe_out_of_memory,
    is_out_of_memory,
    release_memory,
)
from training.metrics import check_writable, measured_on, write_json


def wrong_results(
    backend: Backend,
    *,
    device: torch.device,
    dtype: torch.dtype,
    verified: dict[str, Any] | None = None,
) -> list[str]:
    """The properties in which a backend's results are red: by a scripts.verify of these very
    options, else by a quick check now.
    """
    from conformance.cases import SHORT
    from conformance.properties import SLOW, red_properties

    column = (verified or {}).get("backends", {}).get(backend.name, {})
    cells = [
        cell
        for cell in column.get("cells", ())
        if cell["dtype"] == SHORT[dtype] and cell["property"] not in SLOW
    ]
    if cells and column["options"] == dict(backend.options):
        # a layout that PyTorch's kernel refuses is no wrong result
        return [
            cell["property"]
            for cell in cells
            if cell["status"] == "red" and " cannot take " not in cell["note"]
        ]
    file = verdict_file(backend, device=device, dtype=dtype)
    if file and file.is_file():
        return json.loads(file.read_text())["red"]
    red = red_properties(backend, device=device, dtype=dtype)
    if file:
        with contextlib.suppress(OSError):  # it is checked again next time
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(
                file, {"attention": backend.name, "options": dict(backend.options), "red": red}
            )
    return red


def verdict_file(backend: Backend, *, device: torch.device, dtype: torch.dtype) -> Path | None:
    """Where the quick check's verdict is kept, for the same code on the same machine; None where
    the code is not known, or your own.
    """
    where = measured_on(device)
    if (
        where["commit"] is None
        or where["dirty"]
        or BACKENDS.get(backend.name) is None
        or BACKENDS[backend.name].fn is not backend.fn
    ):
        return None
    names = (
        where["commit"],
        where["versions"],
        where["hardware"],
        backend.name,
        dict(backend.options),
        short(dtype),
    )
    return (
        cache_folder(DataConfig())
        / "verdicts"
        / f"{hashlib.sha256(json.dumps(names, default=str).encode()).hexdigest()[:32]}.json"
    )


def read_verification(
    path: Path | None, device: torch.device, commit: str | None
) -> dict[str, Any] | None:
    """What scripts.verify wrote. Raises ValueError for a file of other code or of another
    device.
    """
    if path is None:
        return None
    try:
        data = json.loads(path.read_text())
        found, on = data["environment"]["commit"], data["device"]
        data["backends"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--verified {path} is not what python -m scripts.verify out=FILE writes"
        ) from error
    if (found, on) != (commit, device.type):
        raise ValueError(
            f"--verified {path} is of commit {found} on {on}, this is {commit} on {device.type}; "
            "verify again"
        )
    return data


class WrongResults(ValueError):
    """A backend of several is wrong, which says nothing about the others."""


def check_results(
    text: str, backend: Backend, dtypes: list[torch.dtype], *, allow: bool, **where: Any
) -> dict[torch.dtype, list[str]]:
    """The red properties of a backend by dtype. Raises WrongResults for one that has any, unless
    they are allowed.
    """
    found = {
        dtype: wrong_results(backend, dtype=dtype, **where)
        for dtype in dtypes
        if dtype in backend.dtypes
    }
    for dtype, red in found.items():
        if red and not allow:
            raise WrongResults(
                f"{text} is wrong in {short(dtype)}, so its speed means nothing: red in "
                f"{', '.join(red)}; see python -m scripts.verify "
                f"attention={text}, or add --allow-broken to time it and have its rows marked"
            )
    return found


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--attention",
        nargs="+",
        default=["naive", "tiled", "sdpa"],
        metavar="NAME[:OPTION=VALUE,...]",
    )
    parser.add_argument(
        "--seq-len",
        nargs="+",
        type=int,
        default=[256, 512, 1024, 2048],
        help="with --max-length, the first one is tried first",
    )
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--tokens",
        type=int,
        help="keep batch * seq_len at this, and heads * head_dim at 2048, instead of --batch and "
        "--heads",
    )
    parser.add_argument(
        "--groups",
        type=int,
        default=1,
        help="query heads that share a key/value head (grouped-query attention)",
    )
    parser.add_argument("--window", type=int, help="keys that a query sees, itself included")
    parser.add_argument(
        "--documents",
        type=int,
        metavar="TOKENS",
        help="sequences are packed from documents of so many tokens",
    )
    parser.add_argument("--full", action="store_true", help="no causal mask (default: causal)")
    parser.add_argument("--dtype", nargs="+", default=["auto"], choices=["auto", *DTYPES])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument(
        "--repeats", type=int, default=20, help="timed calls of each; fewer where one takes long"
    )
    parser.add_argument(
        "--pause",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="rest of the card before each timed call (default: none)",
    )
    parser.add_argument(
        "--allow-broken",
        action="store_true",
        help="time backends whose results are wrong, and mark their rows",
    )
    parser.add_argument(
        "--verified",
        type=Path,
        metavar="FILE",
        help="a scripts.verify of this commit on this device, instead of checking now",
    )
    parser.add_argument(
        "--max-length", action="store_true", help="search the longest sequence instead of timing"
    )
    parser.add_argument(
        "--memory-gib",
        nargs="+",
        type=float,
        default=[None],
        metavar="GIB",
        help="with this much memory (default: all)",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=20.0,
        help="--max-length: no single trial longer than this (default: 20)",
    )
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    parser.add_argument(
        "--append",
        action="store_true",
        help="keep the rows that the file has, if the same code on the same machine made them",
    )
    options = parser.parse_args()
    for name in (
        "seq_len",
        "head_dim",
        "heads",
        "groups",
        "batch",
        "tokens",
        "window",
        "documents",
        "repeats",
        "memory_gib",
        "limit_s",
    ):
        values = getattr(options, name)
        for value in values if isinstance(values, list) else [values]:
            if value is not None and not value > 0:
                sys.exit(f"benchmark: --{name.replace('_', '-')} {value} must be positive")
    if not 0 <= options.pause <= 60:
        sys.exit(f"benchmark: --pause {options.pause:g} must be between 0 and 60 seconds")
    if options.window and options.full:
        sys.exit(
            "benchmark: --window is of the most recent keys, so it is causal; leave out --full"
        )
    if options.memory_gib != [None] and not options.max_length:
        sys.exit("benchmark: --memory-gib belongs to --max-length; add it")
    return options


def kept_rows(path: Path | None, where: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier run. Raises ValueError for one by another commit or version, or on
    another machine.
    """
    if path is None:
        raise ValueError("--append needs --out FILE")
    if not path.exists():
        return []
    try:
        data = json.loads(path.read_text())
        other = [
            key
            for key in ("commit", "versions", "hardware")
            if data["environment"][key] != where[key]
        ]
        rows = data["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--append: {path} is no benchmark's file") from error
    if other:
        raise ValueError(
            f"--append: {path} was measured with another {' and '.join(other)}; write to a new file"
        )
    return rows


def shape_of(options: argparse.Namespace, head_dim: int, length: int) -> dict[str, Any]:
    batch, heads = options.batch, options.heads
    if options.tokens:
        batch, heads = max(1, options.tokens // length), max(1, 2048 // head_dim)
    shape = {
        "seq_len": length,
        "head_dim": head_dim,
        "batch": batch,
        "heads": heads,
        "causal": not options.full,
    }
    if heads % options.groups:
        raise ValueError(f"--groups {options.groups} does not divide {heads} heads")
    special = {
        "groups": options.groups if options.groups > 1 else None,
        "window": options.window,
        "documents": options.documents,
    }
    return shape | {name: value for name, value in special.items() if value}


@one_line("benchmark")
def main() -> None:
    options = read_options()
    # a graph that is kept for timing must not give its buffers away
    torch._functorch.config.donated_buffer = False
    try:
        device = pick_device(options.device)
        dtypes = list(dict.fromkeys(pick_dtype(name, device) for name in options.dtype))
        backends = {text: parse_backend(text) for text in options.attention}
        where = measured_on(device)
        if options.out:
            check_writable(options.out)
        rows = kept_rows(options.out, where) if options.append else []
        for head_dim in options.head_dim:
            shape_of(options, head_dim, options.seq_len[0])
        checks = {
            "allow": options.allow_broken,
            "device": device,
            "verified": read_verification(options.verified, device, where["commit"]),
        }
        red, wrong = {}, []
        for text, backend in list(backends.items()):
            try:
                red[text] = check_results(text, backend, dtypes, **checks)
            except WrongResults as error:  # the others are measured none the less
                wrong.append(str(error))
                del backends[text]
        if not backends:
            raise ValueError("\n".join(wrong))
        if options.max_length:
            for gib in options.memory_gib:
                with memory_cap(gib, device):
                    pass
    except ValueError as error:
        sys.exit(f"benchmark: {error}")
    lengths = options.seq_len[:1] if options.max_length else options.seq_len
    for dtype, head_dim, length in product(dtypes, options.head_dim, lengths):
        asked = {
            text: {"attention": text, **shape_of(options, head_dim, length), "dtype": short(dtype)}
            for text in backends
        }
        for text, row in asked.items():
            if red[text].get(dtype):
                row["broken"] = red[text][dtype]
        if options.max_length:
            for text, backend in backends.items():
                rows += search(backend, asked[text], options, device, dtype)
        else:
            rows += measured(backends, asked, options, device, dtype)
        if options.out:
            write_json(options.out, {"environment": where, "rows": rows})
    if all("refused" in row for row in rows):
        sys.exit(f"benchmark: nothing was measured: {rows[0]['refused']}")
    if wrong:
        sys.exit("benchmark: " + "\n".join(wrong))


def measured(
    backends: dict[str, Backend],
    asked: dict[str, dict],
    options: argparse.Namespace,
    device: torch.device,
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """The rows of one shape with their measurements, or with how a backend ran out of memory, or
    why it does not take it.
    """
    under_way = {
        text: Measurement(
            partial(Call, backend, asked[text], device=device, dtype=dtype),
            repeats=options.repeats,
            pause_s=options.pause,
        )
        for text, backend in backends.items()
    }
    failed = {}
    for _, (text, measurement) in product(range(ROUNDS), under_way.items()):
        if text in failed:
            continue
        try:
            with cpu_memory_limit():
                measurement.turn()
        except ValueError as error:
            failed[text] = {"refused": str(error)}
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed[text] = {"oom": describe_out_of_memory(error, device)}
        if text in failed:
            release_memory(device)
    release_memory(device)
    rows = [
        asked[text] | (failed.get(text) or measurement.row)
        for text, measurement in under_way.items()
    ]
    for row in rows:
        print(describe(row), flush=True)
    return rows


def search(
    backend: Backend,
    row: dict[str, Any],
    options: argparse.Namespace,
    device: torch.device,
    dtype: torch.dtype,
) -> list[dict]:
    """One row for each memory size and pass: the longest sequence that ran."""
    first, rows = row["seq_len"], []
    for gib, train in product(options.memory_gib, (False, True)):
        found = {key: value for key, value in row.items() if key != "seq_len"}
        found |= {"pass": "training" if train else "forward", "memory_gib": gib}

        def fits(length: int, train: bool = train) -> float | dict:
            shape = shape_of(options, row["head_dim"], length)
            return try_length(backend, shape, device=device, dtype=dtype, train=train)

        try:
            if train:
                brief = torch.zeros(
                    1,
                    row["heads"],
                    128,
                    row["head_dim"],
                    device=device,
                    dtype=dtype,
                    requires_grad=True,
                )
                backend.check_supported(brief, brief, brief, causal=row["causal"])
            with memory_cap(gib, device):
                found |= longest(fits, start=first, limit_s=options.limit_s)
        except ValueError as error:
            found["refused"] = str(error)
        print(describe_longest(found), flush=True)
        rows.append(found)
    return rows


def describe(row: dict[str, Any]) -> str:
    head = (
        f"{row['attention']:<28} {row['dtype']:<8} N={row['seq_len']:<7} D={row['head_dim']:<4}"
        + ("BROKEN " if "broken" in row else "")
    )
    if "oom" in row:
        return f"{head} out of memory: {row['oom']['message'][:90]}"
    if "refused" in row:
        return f"{head} refused: {row['refused']}"
    parts = []
    for name in ("forward", "backward"):
        if f"{name}_seconds" in row:
            memory = (
                f"{row[f'{name}_bytes'] / 2**20:>10,.1f} MiB"
                if row.get(f"{name}_bytes") is not None
                else " " * 14
            )
            seconds, host = row[f"{name}_seconds"], row.get(f"{name}_host_seconds", 0)
            slower_host = f" (host {host * 1e3:.3f} ms)" if host > seconds else ""
            parts.append(
                f"{name} {memory} {seconds * 1e3:>9.3f} ms {row[f'{name}_tflops']:>6.3g} "
                f"TFLOP/s{slower_host}"
            )
    return f"{head} " + "   ".join(parts)


def describe_longest(row: dict[str, Any]) -> str:
    memory = "all memory" if row["memory_gib"] is None else f"{row['memory_gib']:g} GiB"
    head = (
        f"{row['attention']:<28} {row['dtype']:<8} D={row['head_dim']:<4} {memory:<10} "
        f"{row['pass']:<8}"
    )
    if "refused" in row:
        return f"{head} refused: {row['refused']}"
    sign = ">=" if row["limited_by"] == "time" else "  "
    end = f"{row['oom_seq_len']:,} ran out of memory" if row["oom_seq_len"] else "no limit met"
    return (
        f"{head} {sign} {row['max_seq_len']:>10,} tokens ({end}; the last took "
        f"{row['seconds']:.2f} s)"
    )


if __name__ == "__main__":
    main()
