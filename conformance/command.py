"""Hold anybody's attention to the properties of attention.

    attn-conform probe my_package:attend
    attn-conform run my_package:attend dialect=fa card=card.json minimise=true
    attn-conform fuzz my_package:attend dialect=fa calls=10000

probe calls the attention on small inputs, says how it is called and what it returns, and prints the
words for run. run holds it to each property. Green: every check stays in its budget, which is
relative to naive attention's own error against float64. Red: one does not. N/a: the attention takes
no such input. The exit code is 1 where a property is red, unless a Backend names it in `breaks`.
fuzz makes random calls: shapes, layouts in memory, masks, features and logits in any combination.

my_package:attend is a function, an autograd.Function, or an attention.Backend, which needs no
dialect. Arguments are key=value, and all have a default:

    dialect    {dialects}
    FIELD      any field of conformance.dialects.Dialect instead of the dialect's own, such as
               layout=BNHD corner=top_left lse_base=2
    device     cpu or cuda (cuda where there is one)
    dtype      of {dtypes}, several with commas between (fp32 on a CPU, else fp32,bf16,fp16)
    cases      random shapes (20)
    seed       of the random shapes, and of fuzz's calls (0)
    calls      of fuzz, in each dtype (1000)
    quick      true leaves out memory, repeats and torch.compile (false)
    card       write a scorecard to this JSON file; with fuzz its figures
    minimise   true writes the smallest failing call of each red property as a script that needs
               torch and the attention alone, beside the card or in this folder (false)

probe takes device and dtype; fuzz also calls, seed, card and the dialect.
"""

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy
import torch

from conformance.backend_under_test import Check, Subject
from conformance.cases import SHORT
from conformance.dialects import DIALECTS, Dialect, Misfit, Target, dialect_of, target
from conformance.files import check_writable, write_file
from conformance.fuzz import Tally, finite, fuzz
from conformance.minimise import Minimiser
from conformance.probe import probe
from conformance.properties import PROPERTIES, SLOW, Cell, Property, examine

DTYPES = {name: dtype for dtype, name in SHORT.items()}
LARGEST_SEED = 10**12  # each call has a seed of its own, of 64 bits
DIALECT_KEYS = {each.name: each.type for each in fields(Dialect)}


@dataclass
class Options:
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: str = "fp32,bf16,fp16" if torch.cuda.is_available() else "fp32"
    dialect: str | None = None
    cases: int = 20
    seed: int = 0
    calls: int = 1000
    quick: bool = False
    card: str | None = None
    minimise: bool = False

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device} is not one of: cpu, cuda")
        for name in self.dtype.split(","):
            if name not in DTYPES:
                raise ValueError(f"dtype={name} is not one of: {', '.join(DTYPES)}")
        for key, least in (("cases", 0), ("calls", 1), ("seed", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"{key}={getattr(self, key)} must be at least {least}")
        if self.seed > LARGEST_SEED:
            raise ValueError(f"seed={self.seed} must be at most {LARGEST_SEED}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device=cuda: PyTorch finds no GPU here; use device=cpu")
        if self.card is not None:
            check_writable(f"card={self.card}", Path(self.card), ".json")

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [DTYPES[name] for name in self.dtype.split(",")]


def main() -> None:
    words = sys.argv[1:]
    commands = {"run": run, "probe": run_probe, "fuzz": run_fuzz}
    try:
        if not words or {"-h", "--help"} & set(words):
            names = {"dialects": ", ".join(DIALECTS), "dtypes": ", ".join(DTYPES)}
            print((__doc__ or "").strip().format(**names), flush=True)
            return
        if words[0] not in commands:
            raise ValueError(f"{words[0]} is not one of: {', '.join(commands)}")
        wrong = commands[words[0]](words[1:])
        if sys.stdout is not None:  # None if closed, as by >&-
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("attn-conform: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # stdout
        sys.exit(141)
    except (ValueError, OSError) as error:
        sys.exit(f"attn-conform: {error}")
    sys.exit(f"attn-conform: {wrong}" if wrong else 0)


def read(words: list[str], bare: tuple[str, ...], *keys: str) -> tuple[list[str], Options, dict]:
    """The bare words, the options, and the changed fields of a dialect. Only `keys` are allowed as
    keys.
    """
    known = {each.name: each.type for each in fields(Options)} | DIALECT_KEYS
    found, options, changes = [], {}, {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            found.append(word)
        elif key not in keys:
            raise ValueError(f"{word}: there is no key {key!r}; the keys are: {', '.join(keys)}")
        else:
            into = changes if key in DIALECT_KEYS else options
            into[key] = convert(key, known[key], text)
    if len(found) != len(bare):
        raise ValueError(f"got {found or 'nothing'} where {' '.join(bare)} is expected")
    return found, Options(**options), changes


def convert(key: str, kind: Any, text: str) -> Any:
    if kind not in (int, bool):
        return text
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else int(text)
    except (KeyError, ValueError):
        wanted = "true or false" if kind is bool else "a whole number"
        raise ValueError(f"{key}={text} must be {wanted}") from None


def parse_dialect(words: list[str]) -> tuple[str | None, dict[str, Any]]:
    """The name and the changed fields of a dialect; the name may come without `dialect=`."""
    words = [word if "=" in word else f"dialect={word}" for word in words]
    _, options, changes = read(words, (), "dialect", *DIALECT_KEYS)
    return options.dialect, changes


def run(words: list[str]) -> str | None:
    keys = ("device", "dtype", "dialect", "cases", "seed", "quick", "card", "minimise")
    (text,), options, changes = read(words, ("pkg.module:NAME",), *keys, *DIALECT_KEYS)
    set_up(torch.device(options.device))
    found = target(text, options.dialect, changes)
    rows = []
    for dtype in options.dtypes:
        subject = Subject(found.backend, options.device, dtype, options.cases, options.seed)
        check_call(text, subject)
        minimiser = Minimiser(found, subject) if options.minimise else None
        for cell in cells_of(subject, quick=options.quick):
            name = SHORT[dtype]
            print(f"{name}  {described(cell)}", flush=True)
            script = minimiser and cell.status == "red" and minimiser.script(cell)
            file = write_script(options, name, cell, script) if script else None
            if options.minimise and cell.status == "red":
                print(f"      {f'a call that shows it: {file}' if file else NO_CALL}", flush=True)
            rows.append((name, cell, file))
    if options.card is not None:
        card = json.dumps(scorecard(found, options, rows), indent=1)
        write_file(Path(options.card), card + "\n")
    return verdict([cell for _, cell, _ in rows])


def check_call(text: str, subject: Subject) -> None:
    """Raise ValueError if the dialect does not fit the function: a plain call fails, or returns
    something else. Otherwise every property would report this.
    """
    if dialect_of(subject.backend) is None:
        return
    try:
        subject.run(subject.case(causal="non_causal" not in subject.backend.features))
    except (Misfit, TypeError) as error:
        reason = f"{type(error).__name__}: " if isinstance(error, TypeError) else ""
        raise ValueError(
            f"{text} does not fit the dialect: {reason}{error}; `attn-conform probe {text}` finds "
            "out how it is called"
        ) from error
    except (Exception, SystemExit):  # the properties report other errors
        return


NO_CALL = "no single call with random inputs shows it"


def cells_of(subject: Subject, *, quick: bool) -> Iterator[Cell]:
    """A cell for every property."""
    for name, check in properties_of(subject).items():
        if not (quick and name in SLOW):
            yield examine(subject, name, check)


def properties_of(subject: Subject) -> dict[str, Property]:
    """The properties; "ragged tails" is n/a if lengths must be multiples."""
    dialect = dialect_of(subject.backend)
    if dialect is None or dialect.multiple == 1:
        return PROPERTIES

    def whole(subject: Subject) -> Iterator[Check]:
        subject.refusals.append(f"it takes lengths that are multiples of {dialect.multiple}")
        yield from ()

    return PROPERTIES | {"ragged tails": whole}


def described(cell: Cell) -> str:
    status = f"{cell.status}, as documented" if cell.documented and cell.ok else cell.status
    return f"{cell.property:<20}  {status}{cell.note and f': {cell.note}'}"


def verdict(cells: list[Cell]) -> str | None:
    """The error message for all cells together; None if nothing is wrong."""
    if all(cell.status == "n/a" for cell in cells):
        return "nothing was verified"
    wrong = sum(not cell.ok for cell in cells)
    return f"{wrong} of {len(cells)} are not as documented" if wrong else None


def write_script(options: Options, dtype: str, cell: Cell, script: str) -> Path:
    name = "".join(x if x.isalnum() else " " for x in cell.property).split()
    beside = Path(options.card or "attn_conform.json")
    file = beside.with_name("_".join([beside.stem, dtype, *name]) + ".py")
    write_file(file, script)
    return file


def scorecard(
    found: Target, options: Options, rows: list[tuple[str, Cell, Path | None]]
) -> dict[str, Any]:
    """Environment, dialect, and every cell with its worst numbers (null if not finite)."""
    dialect = dialect_of(found.backend)
    return {
        "attention": found.backend.name,
        "dialect": None if dialect is None else asdict(dialect),
        "environment": environment(options.device),
        "random_cases": {"number": options.cases, "seed": options.seed},
        "cells": [
            {"dtype": dtype, "asks": " ".join((PROPERTIES[cell.property].__doc__ or "").split())}
            | asdict(cell)
            | {"worst_share": finite(cell.worst_share), "ok": cell.ok}
            | {"worst_multiple": finite(cell.worst_multiple)}
            | {"script": None if file is None else file.name}
            for dtype, cell, file in rows
        ],
    }


def environment(device: str) -> Mapping[str, str]:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    return {
        "torch": torch.__version__,  # with its build, which package metadata may omit
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": f"{device} {name}".strip(),
    }


def run_probe(words: list[str]) -> None:
    (text,), options, _ = read(words, ("pkg.module:NAME",), "device", "dtype")
    set_up(torch.device(options.device))
    for line in probe(text, options.device, options.dtypes):
        print(line, flush=True)


def run_fuzz(words: list[str]) -> str | None:
    keys = ("device", "dtype", "calls", "seed", "card", *DIALECT_KEYS, "dialect")
    (text,), options, changes = read(words, ("pkg.module:NAME",), *keys)
    set_up(torch.device(options.device))
    backend = target(text, options.dialect, changes).backend
    tallies: dict[str, Tally] = {}
    interrupted = False
    try:
        for dtype in options.dtypes:
            subject = Subject(backend, options.device, dtype, random_cases=0, seed=0)
            check_call(text, subject)
            name = SHORT[dtype]
            tally = tallies[name] = Tally()
            for trial in fuzz(subject, calls=options.calls, seed=options.seed):
                tally.add(trial)
                for failure in trial.failures:
                    print(f"{name}  red: {failure}", flush=True)
    except KeyboardInterrupt:  # still report the results so far
        interrupted = True
    for name, tally in tallies.items():
        print(f"{name}  {tally}", flush=True)
    if options.card is not None:
        head = {"attention": backend.name, "environment": environment(options.device)}
        head |= {"calls": options.calls, "seed": options.seed}
        figures = {name: tally.figures() for name, tally in tallies.items()}
        card = json.dumps(head | {"dtypes": figures}, indent=1)
        write_file(Path(options.card), card + "\n")
    if interrupted:
        sys.exit(130)
    if not any(tally.calls for tally in tallies.values()):
        return "every call was refused"
    wrong = sum(len(tally.failures) for tally in tallies.values())
    return f"{wrong} failures" if wrong else None


def set_up(device: torch.device) -> None:
    """Prepare the process: repeatable matrix products on a GPU, one thread on a CPU."""
    # cuBLAS needs this to be deterministic, and reads it at its first call
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device.type == "cpu":
        torch.set_num_threads(1)  # the tensors are small: threads would only wait for one another
    else:
        from torch import _dynamo

        # flex is compiled for every kind of case; past the limit it runs uncompiled
        _dynamo.config.recompile_limit = 1000


if __name__ == "__main__":
    main()
