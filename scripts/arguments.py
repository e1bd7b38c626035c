"""How every command of scripts/ and lab/ reads what is typed: key=value, as train.py does.

A dataclass names the keys, their types and their defaults. Values of a list are separated by
commas. Paths that a command reads may be given bare where the dataclass has a field `paths`; where
it has a field `overrides`, settings of train.py are passed on in it.
"""

import difflib
import functools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml

from attention import BACKENDS, Backend, get_backend
from config import check_int64
from training.command_line import check_keys
from training.interrupt import one_line

Options = TypeVar("Options")
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "fp32", "bf16", "fp16"]


def command(name: str, options: type[Options]) -> Callable[[Callable[[Options], None]], Callable]:
    """Makes `main(options)` a command: --help prints the docstring of its module, and what cannot
    be done ends in one line.
    """

    def decorate(main: Callable[[Options], None]) -> Callable[[Sequence[str] | None], None]:
        @functools.wraps(main)
        @one_line(name)
        def run(arguments: Sequence[str] | None = None) -> None:
            arguments = sys.argv[1:] if arguments is None else arguments
            if {"-h", "--help"} & set(arguments):
                print(main.__globals__["__doc__"].strip())
                return
            try:
                main(read_settings(options, arguments))
            except (ValueError, FloatingPointError) as error:
                sys.exit(f"{name}: {' '.join(str(error).split())}")

        return run

    return decorate


def default(*values: Any) -> Any:
    """The values of a key that takes a list, where none is given."""
    return field(default_factory=lambda: list(values))


def read_settings(options: type[Options], arguments: Iterable[str]) -> Options:
    """The dataclass `options`, filled from key=value arguments. Raises ValueError for an unknown or
    missing key and for a value of the wrong type.
    """
    known = {each.name: each for each in fields(options)}
    bare_allowed, passes_on = "paths" in known, "overrides" in known
    keys = [key for key in known if key not in ("paths", "overrides")]
    values: dict[str, Any] = {}
    bare, overrides = [], []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        # a folder of runs may have "=" in its name
        if bare_allowed and not key.startswith("-") and (not equals or "/" in key):
            bare.append(Path(argument))
        elif equals and key in keys:
            values[key] = convert(known[key], text)
        elif passes_on:
            overrides.append(argument)
        else:
            raise ValueError(unknown_key(argument, keys))
    if passes_on:
        check_keys(overrides)
        values["overrides"] = overrides
    if bare:
        values["paths"] = bare
    for key, each in known.items():
        if key not in values and each.default is each.default_factory is MISSING:
            where = "name a file or a folder" if key == "paths" else f"{key}= is missing"
            raise ValueError(f"{where}; --help says what it is for")
    return options(**values)


def unknown_key(argument: str, keys: Sequence[str]) -> str:
    """What to write instead of an argument that no key fits."""
    written, equals, value = argument.partition("=")
    key = written.lstrip("-").replace("-", "_")
    all_keys = f"the keys are: {', '.join(keys) or 'none'}"
    if written.startswith("-") and key in keys:
        return f"{argument}: write {key}={value or 'VALUE'}, without dashes"
    if not equals:
        return f"{argument!r} is not key=value; {all_keys}"
    close = difflib.get_close_matches(key, keys, n=1)
    hint = f"did you mean {close[0]}?" if close else all_keys
    return f"{argument}: there is no key {key!r}; {hint}"


def convert(declared: Field, text: str) -> Any:
    """The value of one key. Raises ValueError for a text that is not of the field's type."""
    kind = declared.type
    if get_origin(kind) in (UnionType, Union):  # such as int | None
        kind = next(part for part in get_args(kind) if part is not NoneType)
    if not text and declared.default != "":
        raise ValueError(f"{declared.name}= has no value")
    if get_origin(kind) is list:
        return [convert_one(declared.name, *get_args(kind), part) for part in split(text)]
    return convert_one(declared.name, kind, text)


def convert_one(key: str, kind: Any, text: str) -> Any:
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise ValueError(f"{key}={text} is not one of: {', '.join(get_args(kind))}")
        return text
    try:
        value = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        names = {bool: "true or false", int: "a whole number", float: "a number"}
        raise ValueError(f"{key}={text} must be {names[kind]}") from None
    check_int64(key, value)
    return value


def split(text: str) -> list[str]:
    """At the commas between values, not between the options of one: naive,tiled:block_q=8,impl=x
    are two.
    """
    return re.split(r",(?![^,:=]*=)", text)


def check_at_least(options: Any, minimum: float, *keys: str) -> None:
    """Raise ValueError for a value, or one of a list, below the minimum. None passes."""
    for key in keys:
        given = getattr(options, key)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not value >= minimum:
                raise ValueError(f"{key}={value} must be at least {minimum}")


def parse_backend(text: str) -> Backend:
    """NAME, NAME:option=value,option=value or pkg.module:BACKEND, with options likewise. Raises
    ValueError for any other text.
    """
    name, _, rest = text.partition(":")
    attribute, _, after = rest.partition(":")
    if name not in BACKENDS and attribute and "=" not in attribute:
        name, rest = f"{name}:{attribute}", after
    options = {}
    for option in rest.split(",") if rest else ():
        key, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"{option!r} is not option=value")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"{option!r} has no value that can be read; write {key}=16") from None
    return get_backend(name, **options)
