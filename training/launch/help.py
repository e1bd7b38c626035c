"""Every key of a run for `python train.py --help`, each with its sentence from config.py."""

import inspect
import re
from dataclasses import fields, is_dataclass
from textwrap import fill
from typing import Any

from omegaconf import OmegaConf

from config import RunConfig
from training.record.names import as_typed

# a field of a dataclass, after the comment that explains it
FIELD = re.compile(r"((?: +# .*\n)+) +(\w+): ")


def explained_keys(*, _root_: Any) -> str:
    """The keys with their values in this config and their sentences, group by group."""
    groups = {f"{each.name}.": each.type for each in fields(RunConfig) if is_dataclass(each.type)}
    paragraphs = []
    for prefix, schema in ({"": RunConfig} | groups).items():
        lines = [inspect.getdoc(schema).partition("\n\n")[0]]
        for comment, name in FIELD.findall(inspect.getsource(schema)):
            value = OmegaConf.select(_root_, f"{prefix}{name}")
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value)
            sentence = " ".join(re.findall("# (.*)", comment))
            indent = f"  {f'{prefix}{name}={as_typed(value)}':32} "
            lines.append(fill(sentence, 100, initial_indent=indent, subsequent_indent=" " * 35))
        paragraphs.append("\n".join(lines))
    # Hydra takes a dollar sign for one of its variables
    return "\n\n".join(paragraphs).replace("$", "$$")
