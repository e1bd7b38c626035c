"""Hold anybody's attention to the properties of attention.

    attn-conform probe my_package:attend
    attn-conform run my_package:attend dialect=fa out=found.json minimise=true
    attn-conform fuzz my_package:attend dialect=fa calls=10000

probe calls the attention on small inputs, says how it is called and what it returns, and prints the
words for run. run, which is meant where no word is given, holds it to each property and prints the
table of scripts.verify. Green: every check stays in its budget, which is relative to naive
attention's own error against float64. Red: one does not. The exit code is 1 where a property is
red, unless a Backend names it in `breaks`. fuzz makes random calls: shapes, layouts in memory,
masks, features and logits in any combination.

my_package:attend is a function, an autograd.Function, or an attention.Backend, which needs no
dialect. Arguments are key=value, and all have a default:

    dialect    {dialects}
    FIELD      any field of conformance.outside.dialect.Dialect instead of the dialect's own, such
               as layout=BNHD corner=top_left lse_base=2
    device     cpu or cuda (cuda where there is one)
    dtype      of {dtypes}, several with commas between (fp32 on a CPU, else fp32,bf16,fp16)
    cases      random shapes (20)
    seed       of the random shapes, and of fuzz's calls (0)
    calls      of fuzz, in each dtype (1000)
    quick      true leaves out memory, repeats and torch.compile (false)
    out        write every cell to this JSON file
    minimise   true writes the smallest failing call of each red property as a script that needs
               torch and the attention alone, beside `out` or in this folder (false)

probe takes device and dtype; fuzz also calls, seed and the dialect.
"""

import json
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from conformance.backend_under_test import Subject
from conformance.cases import SHORT
from conformance.outside.adapter import dialect_of
from conformance.outside.dialect import Dialect
from conformance.outside.dialects import DIALECTS, Target, target
from conformance.outside.fuzz import Trial, fuzz, summary
from conformance.outside.minimise import Minimiser
from conformance.outside.probe import probe
from conformance.outside.properties import properties_of
from conformance.properties import PROPERTIES, SLOW, Cell
from conformance.verification import LARGEST_SEED, Row, failure, report, set_up, verify

DTYPES = {name: dtype for dtype, name in SHORT.items()}


@dataclass
class Options:
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: str = "fp32,bf16,fp16" if torch.cuda.is_available() else "fp32"
    dialect: str | None = None
    cases: int = 20
    seed: int = 0
    calls: int = 1000
    quick: bool = False
    out: str | None = None
    minimise: bool = False

    def __post_init__(self) -> None:
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        if self.device not in devices:
            raise ValueError(f"device={self.device}: PyTorch finds only {', '.join(devices)} here")
        for name in self.dtype.split(","):
            if name not in DTYPES:
                raise ValueError(f"dtype={name} is not one of: {', '.join(DTYPES)}")
        for key, least in (("cases", 0), ("calls", 1), ("seed", 0)):
            value = getattr(self, key)
            if not least <= value <= LARGEST_SEED:
                raise ValueError(f"{key}={value} must be from {least} to {LARGEST_SEED}")
        file = self.file.absolute()
        # a file of another kind is probably not to be replaced
        fits = file.suffix == ".json" and not file.is_dir() and os.access(file.parent, os.W_OK)
        if (self.out is not None or self.minimise) and not fits:
            raise ValueError(
                f"out={self.file} must be a .json file in a folder that can be written"
            )

    @property
    def file(self) -> Path:
        """Where `out` goes, and scripts beside it."""
        return Path("attn_conform.json" if self.out is None else self.out)

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [DTYPES[name] for name in dict.fromkeys(self.dtype.split(","))]


FIELDS = Dialect.__annotations__
KEYS = {
    "run": ["device", "dtype", "dialect", "cases", "seed", "quick", "out", "minimise", *FIELDS],
    "probe": ["device", "dtype"],
    "fuzz": ["device", "dtype", "dialect", "calls", "seed", *FIELDS],
}


def main() -> None:
    words = sys.argv[1:]
    try:
        if not words or {"-h", "--help"} & set(words):
            about = (__doc__ or "").strip()
            print(about.format(dialects=", ".join(DIALECTS), dtypes=", ".join(DTYPES)), flush=True)
            return
        verb = words.pop(0) if words[0] in KEYS else "run"
        wrong = {"run": run, "probe": run_probe, "fuzz": run_fuzz}[verb](words)
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


def prepare(verb: str, words: list[str]) -> tuple[Options, Target, list[Subject]]:
    """The options, the attention, and its tests in each dtype."""
    text, options, changes = read(verb, words)
    set_up(torch.device(options.device))
    found = target(text, options.dialect, changes)
    subjects = [
        Subject(found.backend, options.device, dtype, options.cases, options.seed)
        for dtype in options.dtypes
    ]
    check_call(text, subjects[0])
    return options, found, subjects


def read(verb: str, words: list[str]) -> tuple[str, Options, Row]:
    """The name of the attention, the options, and the changed fields of a dialect."""
    names: list[str] = []
    options: Row = {}
    changes: Row = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            names.append(word)
        elif key not in KEYS[verb]:
            raise ValueError(
                f"{word}: there is no key {key!r}; the keys are: {', '.join(KEYS[verb])}"
            )
        else:
            into = changes if key in FIELDS else options
            into[key] = convert(key, (Options.__annotations__ | FIELDS)[key], text)
    if len(names) != 1:
        raise ValueError(
            f"got {' '.join(names) or 'nothing'} where one pkg.module:NAME is expected, after "
            f"{', '.join(KEYS)}"
        )
    return names[0], Options(**options), changes


def convert(key: str, kind: Any, text: str) -> Any:
    if kind not in (int, bool):
        return text
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else int(text)
    except (KeyError, ValueError):
        wanted = "true or false" if kind is bool else "a whole number"
        raise ValueError(f"{key}={text} must be {wanted}") from None


def run(words: list[str]) -> str | None:
    options, found, subjects = prepare("run", words)
    properties = properties_of(found.backend)
    if options.quick:
        properties = {name: each for name, each in properties.items() if name not in SLOW}

    def seen(subject: Subject, cell: Cell) -> Row | None:
        if sys.stderr.isatty():
            print(f"{SHORT[subject.dtype]} {cell.property}: {cell.status}", file=sys.stderr)
        if options.minimise and cell.status == "red":
            script = Minimiser(found, subject).script(cell)
            return {"script": script and str(written(options, subject, cell, script))}
        return None

    text, dialect = found.backend.name, dialect_of(found.backend)
    columns = {text: verify(subjects, properties, seen=seen)}
    if options.out is not None:
        gpu = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor()
        found_here = {
            "attention": text,
            "environment": {
                "torch": torch.__version__,
                "python": platform.python_version(),
                "device": f"{options.device} {gpu}",
            },
            "dialect": dialect and asdict(dialect),
            "random_cases": {"number": options.cases, "seed": options.seed},
            "properties": {name: check.__doc__ for name, check in PROPERTIES.items()},
            "backends": columns,
        }
        write(options.file, json.dumps(found_here, indent=1) + "\n")
    print(report(columns))
    return failure(columns)


def check_call(text: str, subject: Subject) -> None:
    """Raise ValueError if every property would only report how it is called: a plain call fails,
    returns something else than the dialect says, or changes its inputs.
    """
    case = subject.case(causal="non_causal" not in subject.backend.features)
    given, *_ = case.make(subject.dtype, subject.device)
    try:
        subject.run(case, given, backward=False)
        unchanged = all(map(torch.equal, given, subject.expected(case).tensors))
    except TypeError as error:
        if dialect_of(subject.backend) is None:
            return
        raise ValueError(
            f"{text} does not fit the dialect: {error}; `attn-conform probe {text}` finds out how "
            "it is called"
        ) from error
    except (Exception, SystemExit):  # the properties report other errors
        return
    if not unchanged:
        raise ValueError(f"{text} changes its inputs; it must leave q, k and v as they are")


def written(options: Options, subject: Subject, cell: Cell, script: str) -> Path:
    """The file of a script."""
    words = [options.file.stem, SHORT[subject.dtype], *re.findall(r"\w+", cell.property)]
    file = options.file.with_name("_".join(words) + ".py")
    write(file, script)
    return file


def write(path: Path, text: str) -> None:
    """Write a whole file: a reader finds the old one or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def run_probe(words: list[str]) -> None:
    text, options, _ = read("probe", words)
    set_up(torch.device(options.device))
    print(*probe(text, options.device, options.dtypes), sep="\n", flush=True)


def run_fuzz(words: list[str]) -> str | None:
    options, _, subjects = prepare("fuzz", words)
    every: list[Trial] = []
    for subject in subjects:
        name, tried = SHORT[subject.dtype], []
        try:
            for trial in fuzz(subject, calls=options.calls, seed=options.seed):
                tried.append(trial)
                for where in trial.failures:
                    print(f"{name}  red: {where}", flush=True)
        finally:  # also if Ctrl-C ends it
            print(f"{name}  {summary(tried)}", flush=True)
        every += tried
    if all(trial.refused for trial in every):
        return "every call was refused"
    wrong = sum(len(trial.failures) for trial in every)
    return f"{wrong} failures" if wrong else None


if __name__ == "__main__":
    main()
