"""The table of backends, and the lookup by name."""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from attention.defects import DEFECTS
from attention.exact_variants import EXACT_VARIANTS
from attention.flex import FLEX
from attention.interface import Backend, ScoreMod
from attention.kernels import TRITON
from attention.look.blame import without_gpu
from attention.naive import NAIVE
from attention.sdpa import SDPA
from attention.tiled import TILED, TiledAttention

Loaded = TypeVar("Loaded", Backend, ScoreMod)

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        NAIVE,
        TILED,
        TRITON,
        SDPA,
        FLEX,
        *EXACT_VARIANTS,
        *DEFECTS,
    )
}


def register(backend: Backend) -> None:
    """Add a backend of your own to the table. Raises ValueError if the name is taken."""
    if backend.name in BACKENDS:
        raise ValueError(
            f"a backend named {backend.name!r} exists already; names in use: {', '.join(BACKENDS)}"
        )
    BACKENDS[backend.name] = backend


def get_backend(name: str, **options: Any) -> Backend:
    """The backend of that name, with its options set. Raises ValueError for an unknown name or
    option, listing the valid ones.

    `pkg.module:NAME` is a user's Backend, in the current folder or anywhere on Python's path. Its
    name becomes `pkg.module:NAME`, because two users' backends may have the same name.
    """
    if name in BACKENDS:
        return BACKENDS[name].configured(**options)
    if ":" in name:
        return replace(_load(name, Backend, "attention"), name=name).configured(**options)
    raise ValueError(
        f"attention={name} is not known; valid: {', '.join(BACKENDS)}, or pkg.module:NAME for a "
        "Backend of your own"
    )


def get_score_mod(target: str) -> ScoreMod:
    """The ScoreMod at pkg.module:NAME. Raises ValueError if there is none."""
    return _load(target, ScoreMod, "attention.score_mod")


def _load(target: str, kind: type[Loaded], setting: str) -> Loaded:
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"{setting}={target} must read pkg.module:NAME")
    found = import_object(module_name, attribute, called=f"{setting}={target}")
    if not isinstance(found, kind):
        raise ValueError(
            f"{setting}={target} must be an attention.{kind.__name__}, its type is "
            f"{type(found).__name__}"
        )
    return found


def import_object(
    module: str, name: str, *, called: str, find: Callable[[Any, str], Any] = getattr
) -> Any:
    """find(module, name), for a module in the current folder or anywhere on Python's path. Raises
    ValueError, which names the object as `called`, for a file's path and any error in the module.
    """
    if module.endswith(".py"):
        folder, file = os.path.split(module)
        where = f", and PYTHONPATH={folder} before the command" if folder not in ("", ".") else ""
        way_out = f"{file.removesuffix('.py')}:{name}{where}"
        raise ValueError(f"{called} names a file; name its module: {way_out}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return find(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}{without_gpu(error)}"
        top = module.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name == top:
            reason += f"; run this in the folder with {top}.py, or set PYTHONPATH to that folder"
        raise ValueError(f"{called} cannot be loaded: {reason}") from error


def is_shipped(backend: Backend) -> bool:
    """Whether this is a backend of BACKENDS, with any options: not a user's with the same name."""
    listed = BACKENDS.get(backend.name)
    return listed is not None and listed.fn is backend.fn


def is_operator(backend: Backend) -> bool:
    """Whether torch.compile takes this backend as one operator: a tile loop in BACKENDS.

    The operator finds its loop by name. So a user's wrapper around a loop, or another loop with the
    same name, does not count.
    """
    return isinstance(backend.fn, TiledAttention) and is_shipped(backend)
