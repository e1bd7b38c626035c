"""Make mutants: load modules of attention/ with an edit beside the real modules."""

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
from tests.conformance.edits import Edit, Package

FOLDER = Path(attention.__file__).parent
# in the order in which they import one another
MODULES = ("mask", "online_softmax", "sinks", "naive", "decoding", "tiled", "exact_variants")
KERNELS = (
    *("kernels", "kernels.tiles", "kernels.softmax", "kernels.defects", "kernels.score_mods"),
    *("kernels.forward", "kernels.backward", "kernels.intervals", "kernels.launch"),
    *("kernels.op", "kernels.decoding"),
)


@cache
def package() -> Package:
    return Package(FOLDER)


def path_of(name: str) -> Path:
    path = FOLDER / name.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def code(name: str, edited: str | None = None, author: str = "nobody") -> CodeType:
    """A module of attention/, from its file or from an edited source."""
    source = path_of(name).read_text() if edited is None else edited
    file = f"attention/{name}.py with {author}"
    # Triton reads a kernel's source from its file
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    return compile(source, file, "exec")


def same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@contextmanager
def loaded_beside(
    names: tuple[str, ...], edited: dict[str, str], author: str
) -> Iterator[dict[str, Any]]:
    """Modules of attention/, some with an edited source, in place of the real ones. Their operators
    are plain functions, because PyTorch has already registered the real ones under these names.
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
                module.remember_ = {}.setdefault
                exec(
                    code(name, edited[name], author) if name in edited else code(name),
                    module.__dict__,
                )
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
    edits: tuple[Edit, ...]
    red: tuple[str, ...] = ()  # properties that must be red
    survives: str | None = None  # why no property is
    dtype: torch.dtype = torch.float32  # in which it shows
    backend: str = "tiled"  # or alpha_beta, whose tiles are merged, or naive, or triton
    section: str = ""  # of the gallery
    quick: bool = False  # whether `make test` judges it

    @contextmanager
    def installed(self) -> Iterator[Backend]:
        """Yield the backend with the mistake; attention() uses the mutant's with_sinks()."""
        names = MODULES + KERNELS * (self.backend == "triton")
        edited = package().edited(self.edits, self.name)
        outside = edited.keys() - set(names)
        assert not outside, f"{self.name} edits modules that are not loaded: {outside}"
        with loaded_beside(names, edited, self.name) as loaded:
            shipped = [loaded["tiled"].TILED, loaded["naive"].NAIVE]
            shipped += loaded["exact_variants"].EXACT_VARIANTS
            if "kernels" in loaded:
                shipped.append(loaded["kernels"].TRITON)
            found = {backend.name: backend for backend in shipped}
            with mock.patch.object(attention, "with_sinks", loaded["sinks"].with_sinks):
                yield replace(found[self.backend], name=self.name)
