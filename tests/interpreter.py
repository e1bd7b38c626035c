"""Triton's interpreter does the same in half of the time: what it computes again and again for
every operation of a kernel is kept. What a version of Triton lacks is left as it is there.
"""

import inspect
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
        (interpreter, "_patch_builtin", found_once),
        (interpreter, "_patch_attr", called_at_once),
        (interpreter, "_get_np_dtype", numpy_dtype),
        (tl.block_type, "__init__", block_type),
        (tl.tensor, "__init__", tensor),
        (tl.core, "_unwrap_if_constexpr", unwrapped),
        # the interpreter's own: kernels that are compiled beside it keep theirs
        (interpreter.interpreter_semantic, "cast", cast),
        (interpreter.interpreter_semantic, "broadcast_impl_value", broadcast),
        (interpreter.interpreter_semantic, "binary_op_type_checking_impl", operands),
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


def found_once(patch: Callable) -> Callable:
    """What is there to replace in a module or class does not change between two launches."""
    if not hasattr(interpreter, "_patch_attr"):
        return patch
    known: dict[Any, list[tuple[str, Callable]]] = {}

    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in known:
            members = inspect.getmembers(pkg)
            known[pkg] = [each for each in members if tl.core.is_builtin(each[1])]
        for name, member in known[pkg]:
            interpreter._patch_attr(pkg, name, member, builder, scope)

    return patch_builtin


def called_at_once(patch: Callable) -> Callable:
    """Without the call in between that looks whether the language is called inside a kernel."""

    def patch_attr(obj: Any, name: str, member: Callable, builder: Any, scope: Any) -> None:
        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return function(*arguments, **named)

        function = getattr(member, "__wrapped__", member)
        scope.set_attr(obj, name, call)

    return patch_attr if hasattr(interpreter, "_LangPatchScope") else patch


def numpy_dtype(find: Callable) -> Callable:
    known: dict[str, np.dtype] = {}

    def get(dtype: tl.dtype) -> np.dtype:
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    return get


SHAPES: dict[tuple[int, ...], Any] = {}  # one for all tensors: who has the same need not compare
SEEN: dict[int, Any] = {}  # of these, by id


def block_type(construct: Callable) -> Callable:
    known: dict[tuple, dict[str, Any]] = {}

    def init(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        if id(shape) not in SEEN:
            sizes = tuple(shape)
            if not all(type(size) is int for size in sizes):  # constants of the language
                construct(self, element_ty, shape)
                return
            if sizes not in SHAPES:
                construct(self, element_ty, shape)
                SHAPES[sizes] = SEEN[id(self.shape)] = self.shape
            shape = SHAPES[sizes]
        key = element_ty.name, id(shape)
        if key not in known:
            construct(self, element_ty, shape)
            known[key] = vars(self) | {"shape": shape}
        vars(self).update(known[key], element_ty=element_ty)

    return init


def tensor(construct: Callable) -> Callable:
    known: dict[int | None, dict[str, Any]] = {}

    def init(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        shape = id(type.shape) if type.is_block() else None
        if shape is not None and shape not in SEEN:
            construct(self, handle, type)
            return
        if shape not in known:
            construct(self, handle, type)
            known[shape] = dict(vars(self))
        vars(self).update(known[shape], handle=handle, type=type, dtype=type.scalar)

    return init


def unwrapped(unwrap: Callable) -> Callable:
    plain = (tl.tensor, int, float, bool, str, type(None))

    def unwrap_if_constexpr(x: Any) -> Any:
        return x if type(x) in plain else unwrap(x)

    return unwrap_if_constexpr


def cast(convert: Callable) -> Callable:
    def to(input: tl.tensor, dtype: tl.dtype, *rounding: Any, **named: Any) -> tl.tensor:
        return input if input.dtype is dtype else convert(input, dtype, *rounding, **named)

    return to


def broadcast(widen: Callable) -> Callable:
    def both(lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        one, other = lhs.type, rhs.type
        if one.is_block() == other.is_block() and (not one.is_block() or one.shape is other.shape):
            return lhs, rhs
        return widen(lhs, rhs)

    return both


# two operands of one of these types need no promotion
KEPT = {id(each) for each in (tl.float32, tl.float64, tl.int32, tl.int64)}


def operands(check: Callable) -> Callable:
    semantic = interpreter.interpreter_semantic

    def alike(lhs: Any, rhs: Any, *rules: Any, **named: Any) -> tuple[tl.tensor, tl.tensor]:
        dtype = getattr(lhs, "dtype", None)
        if id(dtype) in KEPT and not named and len(rules) < 3:  # pointers may be allowed, no more
            if type(rhs) is float and dtype.is_floating() or type(rhs) is int and abs(rhs) < 2**31:
                rhs = semantic.scalar_constant(rhs, dtype)
            if getattr(rhs, "dtype", None) is dtype:
                return semantic.broadcast_impl_value(lhs, rhs)
        return check(lhs, rhs, *rules, **named)

    return alike
