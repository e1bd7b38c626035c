"""Triton's interpreter does the same in half of the time: what it computes again and again for
every operation of a kernel is kept. What a version of Triton lacks is left as it is there.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    # a third of its time goes into whether integers overflow, which it says in debug mode alone
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    for owner, name, quick in (
        (interpreter, "_patch_lang", patched_once_a_launch),
        (interpreter, "_get_np_dtype", numpy_dtype),
        (tl.block_type, "__init__", block_type),
        (tl.tensor, "__init__", tensor),
    ):
        if hasattr(owner, name):
            setattr(owner, name, wraps(getattr(owner, name))(quick(getattr(owner, name))))


def patched_once_a_launch(patch: Callable) -> Callable:
    """The interpreter puts its own operations into triton.language for every call of a function
    inside a kernel, over those that it put there for the kernel: half of its time.
    """
    empty = getattr(interpreter, "_LangPatchScope", None)
    if empty is None:  # before Triton 3.7 it was done otherwise
        return patch
    done, known = set(), {}

    def patch_once(fn: Callable) -> Any:
        if fn not in known:
            values = [id(value) for value in fn.__globals__.values()]
            known[fn] = tuple(id(module) in values for module in (interpreter.tl, tl.core))
        if known[fn] in done:
            return empty()
        scope = patch(fn)
        if not done:  # the kernel's own, which is restored at its end
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        done.add(known[fn])
        return scope

    return patch_once


def numpy_dtype(find: Callable) -> Callable:
    known: dict[str, np.dtype] = {}

    def get(dtype: tl.dtype) -> np.dtype:
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    return get


def block_type(construct: Callable) -> Callable:
    known: dict[tuple, dict[str, Any]] = {}

    def init(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        sizes = tuple(shape)
        if not all(type(size) is int for size in sizes):  # constants of the language
            construct(self, element_ty, shape)
            return
        key = element_ty.name, sizes
        if key not in known:
            construct(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key], element_ty=element_ty)

    return init


def tensor(construct: Callable) -> Callable:
    known: dict[tuple, dict[str, Any]] = {}

    def init(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in known:
            construct(self, handle, type)
            known[shape] = dict(vars(self))
        vars(self).update(known[shape], handle=handle, type=type, dtype=type.scalar)

    return init
