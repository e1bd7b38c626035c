"""Triton's interpreter does the same in half of the time: what it computes again and again for
every operation of a kernel is kept. What a version of Triton lacks is left as it is there.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    # a third of its time goes into whether integers overflow, which it says in debug mode alone
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    for name, quick in (("_patch_lang", patched_once_a_launch), ("_patch_builtin", found_once)):
        if hasattr(interpreter, name):
            plain = getattr(interpreter, name)
            setattr(interpreter, name, wraps(plain)(quick(plain)))


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
