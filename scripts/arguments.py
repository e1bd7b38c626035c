"""How scripts read what is typed: settings as key=value, and backends with their options."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, get_args

import yaml

from attention import BACKENDS, Backend, get_backend
from config import check_int64


def read_settings(options: type, arguments: Iterable[str]) -> dict[str, Any]:
    """The fields of the dataclass `options` that are given as key=value. Raises ValueError for an
    unknown key or a wrong type.
    """
    types = {field.name: next(iter(get_args(field.type)), field.type) for field in fields(options)}
    values = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or key not in types:
            raise ValueError(f"{argument!r} is not key=value with a key of: {', '.join(types)}")
        try:
            values[key] = (
                {"true": True, "false": False}[text.lower()]
                if types[key] is bool
                else types[key](text)
            )
        except (KeyError, ValueError):
            raise ValueError(f"{key}={text} is no {types[key].__name__}") from None
        check_int64(key, values[key])
    return values


def parse_backend(text: str) -> Backend:
    """NAME, NAME:option=value,option=value or pkg.module:BACKEND, with options likewise. Raises
    ValueError for what is none of them.
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
        options[key] = yaml.safe_load(value)
    return get_backend(name, **options)
