"""Make mutants: load modules of attention/ with one changed line (a few need two), beside the real
modules.
"""

import linecache
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import torch

import attention
from attention import Backend

FOLDER = Path(attention.__file__).parent
# in the order in which they import one another
MODULES = ("mask", "online_softmax", "sinks", "naive", "decoding", "ring", "tiled", "played_ring")
KERNELS = (
    *("kernels", "kernels.launch", "kernels.softmax", "kernels.defects", "kernels.score_mods"),
    *("kernels.forward", "kernels.backward", "kernels.intervals", "kernels.portable"),
    *("kernels.op", "kernels.decoding"),
)


def path_of(name: str) -> Path:
    path = FOLDER / name.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def code(name: str, edits: tuple[tuple[str, str], ...] = (), author: str = "nobody") -> CodeType:
    """A module of attention/ with edits. Raises AssertionError if its source does not contain the
    text of an edit exactly once.
    """
    source = path_of(name).read_text()
    for before, after in edits:
        times = source.count(before)
        assert times == 1, f"{author}: attention/{name}.py holds {times} times: {before}"
        source = source.replace(before, after)
    file = f"attention/{name}.py with {author}"
    # Triton reads a kernel's source from its file
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    return compile(source, file, "exec")


def same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@contextmanager
def loaded_beside(
    names: tuple[str, ...], edits: tuple[tuple[str, str, str], ...], author: str
) -> Iterator[dict[str, Any]]:
    """Modules of attention/ with edits, in place of the real ones. Their operators are plain
    functions, because PyTorch has already registered the real ones under these names.
    """
    real = {f"attention.{name}": import_module(f"attention.{name}") for name in names}
    loaded: dict[str, Any] = {}
    library = {"register_fake": lambda *_: same, "register_autograd": lambda *_, **__: None}
    try:
        with (
            mock.patch.multiple(torch.library, **library),
            mock.patch("attention.interface.operator", lambda *_: same),
        ):
            for name in names:
                module: Any = types.ModuleType(f"attention.{name}")
                module.__file__ = str(path_of(name))
                if name == "kernels":
                    module.__path__ = [str(FOLDER / name)]
                own = tuple(edit[1:] for edit in edits if edit[0] == name)
                exec(code(name, own, author) if own else code(name), module.__dict__)
                sys.modules[module.__name__] = loaded[name] = module
        yield loaded
    finally:  # and no others, as Triton imports some in its first launch
        sys.modules.update(real)
        for module in loaded.values():  # which would live on, with what a mistake keeps in it
            vars(module).clear()


@dataclass(frozen=True)
class Mutant:
    name: str
    says: str  # what is wrong, and for a mistake that somebody shipped, where
    edits: tuple[tuple[str, str, str], ...]  # module, what stands there, what stands there instead
    survives: str | None = None
    dtype: torch.dtype = torch.float32  # in which it shows
    backend: str = "tiled"  # or ring, of ranks, or naive

    @contextmanager
    def installed(self) -> Iterator[Backend]:
        """Yield the backend with the mistake; attention() uses the mutant's with_sinks()."""
        names = MODULES + KERNELS * (self.backend == "triton")
        with loaded_beside(names, self.edits, self.name) as loaded:
            found = {
                "tiled": loaded["tiled"].TILED,
                "ring": loaded["played_ring"].RING,
                "naive": loaded["naive"].NAIVE,
            }
            if "kernels" in loaded:
                found["triton"] = loaded["kernels"].TRITON
            with mock.patch.object(attention, "with_sinks", loaded["sinks"].with_sinks):
                yield replace(found[self.backend], name=self.name)


def smallest_cover(rows: list[dict[str, Any]]) -> list[str]:
    """Properties that together catch as much as all properties. The greedy choice takes the one
    that catches most of the rest.
    """
    left, cover = {row["name"] for row in rows if row["killed_by"]}, []
    while left:
        names = dict.fromkeys(name for row in rows for name in row["killed_by"])
        best = max(
            names,
            key=lambda name: sum(row["name"] in left and name in row["killed_by"] for row in rows),
        )
        left -= {row["name"] for row in rows if best in row["killed_by"]}
        cover.append(best)
    return cover


def softmax(*edits: tuple[str, str]) -> tuple[tuple[str, str, str], ...]:
    return tuple(("online_softmax", *edit) for edit in edits)


def mask(*edits: tuple[str, str]) -> tuple[tuple[str, str, str], ...]:
    return tuple(("mask", *edit) for edit in edits)


def loop(*edits: tuple[str, str]) -> tuple[tuple[str, str, str], ...]:
    return tuple(("tiled", *edit) for edit in edits)


def naive(*edits: tuple[str, str]) -> tuple[tuple[str, str, str], ...]:
    return tuple(("naive", *edit) for edit in edits)


def sink(*edits: tuple[str, str]) -> tuple[tuple[str, str, str], ...]:
    return tuple(("sinks", *edit) for edit in edits)


def ring(*edits: tuple[str, str]) -> tuple[tuple[str, str, str], ...]:
    return tuple(("ring", *edit) for edit in edits)


def kept(key: str, value: str) -> str:
    """`value`, computed once for every `key`."""
    return f"globals().setdefault('KEPT', {{}}).setdefault({key}, {value})"
