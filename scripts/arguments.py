"""How every command of scripts/ and lab/ reads its arguments: key=value, like train.py.

A dataclass names the keys, their types and their defaults, and pydantic reads the values. Commas
separate those of a list. If the dataclass has a field `paths`, arguments without a key go there. If
it has a field `overrides`, settings of train.py go there. Nothing here imports torch before a
command asks for it.
"""

import functools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_origin

from pydantic import AfterValidator, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from config import RunConfig, parse_attention
from training.launch.command_line import check_overrides, compose, key_of
from training.launch.interrupt import reader_may_leave
from training.record.files import META, check_writable
from training.record.runs import RUN_FILES
from training.record.text_table import first_line

if TYPE_CHECKING:
    from attention import Backend

Options = TypeVar("Options")
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "fp32", "bf16", "fp16"]
Count, Natural = PositiveInt, NonNegativeInt

# the files of a run or a checkpoint with the endings that results have
OF_A_RUN = {"summary.json", "env.json", META, "loss_curve.png"}


def check_out(path: Path, ending: str = ".json") -> Path:
    """check_writable(), and a line on stderr for a file that a result will replace. Raises
    ValueError for a file of a run or a checkpoint.
    """
    if path.name in OF_A_RUN and any((path.parent / name).exists() for name in RUN_FILES):
        raise ValueError(f"{path} is a file of the run; give another name")
    check_writable(path, ending)
    if path.exists():
        print(f"{path} exists; the result replaces it", file=sys.stderr)
    return path


Json = Annotated[Path, AfterValidator(check_out)]


@dataclass
class NoOptions:
    """A command without keys: a mistyped argument must not rewrite tracked files."""


def command(main: Callable[[Any], None]) -> Callable[..., None]:
    """Turn `main(options: Options)` into the command of its module.

    --help prints the module's docstring. What ends the command early is one line on stderr, with
    exit code 130 after Ctrl-C, 141 if the reader of its output left, and 1 otherwise. Files that
    were already written stay.
    """
    file = Path(main.__code__.co_filename)
    name = file.parent.name if file.stem == "__main__" else file.stem

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> None:
        arguments = sys.argv[1:] if arguments is None else arguments
        try:
            with reader_may_leave():
                if {"-h", "--help"} & set(arguments):
                    print(main.__globals__["__doc__"].strip())
                else:
                    main(read_settings(main.__annotations__["options"], arguments))
        except KeyboardInterrupt:
            print(f"{name}: stopped by Ctrl-C", file=sys.stderr)
            sys.exit(130)
        except (ValueError, FloatingPointError, OSError) as error:
            sys.exit(f"{name}: {' '.join(str(error).split())}")
        except (RuntimeError, MemoryError) as error:
            from training.record.memory import is_out_of_memory

            if not is_out_of_memory(error):
                raise
            sys.exit(f"{name}: out of memory: {first_line(error)}; ask for smaller sizes")

    return run


def default(*values: Any) -> Any:
    """The default values of a key that takes a list."""
    return field(default_factory=lambda: list(values))


def read_settings(options: type[Options], arguments: Iterable[str]) -> Options:
    """Fill the dataclass `options` from key=value arguments. Raises ValueError for an unknown or
    missing key and for a value of the wrong type, OSError for a file that cannot be written.
    """
    known = {each.name: each for each in fields(options)}
    keys = [key for key in known if key not in ("paths", "overrides")]
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        # a folder of runs may have "=" in its name
        if "paths" in known and not key.startswith("-") and (not equals or "/" in key):
            values.setdefault("paths", []).append(Path(argument))
        elif equals and key in keys:
            if key in values:
                raise ValueError(f"{argument}: {key}= is given twice")
            values[key] = convert(key, known[key].type, text)
        elif "overrides" in known:
            values.setdefault("overrides", []).append(argument)
        else:
            names = ", ".join(keys) or "none"
            raise ValueError(f"{argument}: write KEY=VALUE; the keys are {names}")
    if "overrides" in values:
        check_overrides(values["overrides"], others=keys)
    for key, each in known.items():
        if key not in values and each.default is each.default_factory is MISSING:
            missing = "a file or a folder" if key == "paths" else f"{key}="
            raise ValueError(f"{missing} is missing; --help says what it is for")
    return options(**values)


def convert(key: str, kind: Any, text: str) -> Any:
    """The text of a key as a value of its type. Raises ValueError if it does not fit."""
    if not text and kind is not str:
        raise ValueError(f"{key}= has no value")
    # naive,tiled:block_q=8,block_kv=4 has two values: some commas are between options of one
    value = re.split(r",(?![^,:=]*=)", text) if get_origin(kind) is list else text
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        # pydantic puts these words before what our own checks say
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ValueError(f"{key}={text}: {why}") from None


def compose_new(*overrides: str, asked: Iterable[str]) -> RunConfig:
    """The settings of a run that begins anew. Prints those that it does not read and leaves them
    out. Raises ValueError for one that is set by `asked`, of the overrides, and for weights.
    """
    from training.launch.settings import settle

    config = compose(*overrides)
    for key in ("resume", "init_from"):
        if value := getattr(config, key):
            raise ValueError(f"{key}={value}: a step of a new model is the same; leave it out")
    for key, why in settle(config, asked=map(key_of, asked)).items():
        print(f"without {key}: {why}", file=sys.stderr)
    return config


def parse_backend(text: str) -> "Backend":
    """NAME, NAME:option=value,option=value or pkg.module:BACKEND, with options likewise. Raises
    ValueError for any other text.
    """
    from attention import get_backend

    name, options = parse_attention(text)
    return get_backend(name, **options)
