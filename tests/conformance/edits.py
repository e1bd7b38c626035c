"""Wrong lines that survive tidying: an edit names a function, and as code what it changes there.

    swap("OnlineSoftmax.update", "alpha * self.row_sum", "self.row_sum")
    swap("TileScores.__call__", "_x * self.scale", "_x")      the factor goes, whatever it scaled
    drop("TileLoop.backward_from_lse", "ds * derivative")     the statement that holds it
    argument("dq_kernel", "add_key_tile", "MASKED", "True", "False")

A place is a qualified name, with its module where two have it: "kernels.softmax:finite". In a
pattern `_` is any expression, and `_x` is any that the new code may use. `...` after the arguments
of a call stands for any others.

A name that the function or its module has means itself. A name that neither has any longer is a
local that somebody renamed: it is found by what stands around it. New code uses names that are
there, and its own variables end in `_`. A pattern that does not match exactly one place is an
EditError of one sentence.
"""

import ast
import builtins
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# a block, a run of its statements, and the pattern and the code to compare
Place = tuple[list[ast.stmt], slice, Any, Any]


class EditError(AssertionError):
    """An edit that does not apply."""


@dataclass(frozen=True)
class Edit:
    place: str
    old: str
    new: str
    argument: tuple[str, str] | None = None  # of which function, and its parameter

    def __str__(self) -> str:
        return f"in {self.place}: {' '.join(self.old.split())}"


def swap(place: str, old: str, new: str) -> Edit:
    """The one expression or run of statements. An expression whose `new` is a statement stands for
    the statement that holds it.
    """
    return Edit(place, old, new)


def drop(place: str, old: str) -> Edit:
    return swap(place, old, "pass")


def argument(place: str, function: str, parameter: str, old: str, new: str) -> Edit:
    """The one call of `function` that gives `old` for a parameter gives `new`."""
    return Edit(place, old, new, (function, parameter))


class Package:
    """The modules of a package."""

    def __init__(self, folder: Path) -> None:
        self.sources: dict[str, str] = {}
        self.homes: dict[str, list[str]] = {}  # the modules that define each qualified name
        self.functions: dict[tuple[str, str], Any] = {}
        for path in sorted(folder.rglob("*.py")):
            module = ".".join(path.relative_to(folder).with_suffix("").parts)
            module = module.removesuffix(".__init__")
            self.sources[module] = path.read_text()
            for name, node in definitions(ast.parse(self.sources[module])):
                self.homes.setdefault(name, []).append(module)
                self.functions[module, name] = node

    def find(self, place: str) -> tuple[str, str]:
        """The module and the qualified name."""
        module, _, name = place.rpartition(":")
        homes = [home for home in self.homes.get(name, ()) if module in (home, "")]
        if len(homes) != 1:
            raise EditError(f"{place} is defined {len(homes)} times {homes or ''}".rstrip())
        return homes[0], name

    def edited(self, edits: tuple[Edit, ...], author: str = "nobody") -> dict[str, str]:
        """The new source of each module that the edits change."""
        trees: dict[str, ast.Module] = {}
        for edit in edits:
            try:
                module, name = self.find(edit.place)
                if module not in trees:
                    trees[module] = ast.parse(self.sources[module])
                self.apply(edit, trees[module], dict(definitions(trees[module]))[name])
            except EditError as error:
                raise EditError(f"{author}: {error} ({edit})") from None
        return {module: ast.unparse(tree) for module, tree in trees.items()}

    def apply(self, edit: Edit, tree: ast.Module, function: ast.AST) -> None:
        before = ast.dump(function)
        pattern, new = ast.parse(edit.old).body, ast.parse(edit.new).body
        scope = Scope(tree, function, names_in(pattern))
        found = []
        for block, run, old, node in self.places(edit, function, pattern):
            match = Match(scope)
            if match(old, node):
                found.append((block, run, node, match))
        if len(found) != 1:
            raise EditError(f"{len(found)} places match")
        block, run, node, match = found[0]
        code: list[Any] = [match.visit(statement) for statement in new]
        for name in names_in(code):
            if name not in scope.known and not name.endswith("_"):
                raise EditError(f"the new code uses {name}, which is not there")
        if isinstance(node, ast.expr) and len(code) == 1 and isinstance(code[0], ast.Expr):
            Replacement(node, code[0].value).visit(block[run][0])
        else:
            block[run] = code
        if ast.dump(function) == before:
            raise EditError("the edit changes nothing")

    def places(self, edit: Edit, function: ast.AST, pattern: list[ast.stmt]) -> Iterator[Place]:
        """The runs of statements that the pattern is compared with, or the expressions."""
        first = pattern[0]
        for block, i in statements_of(function):
            if not isinstance(first, ast.Expr) or len(pattern) > 1:
                run = slice(i, i + len(pattern))
                yield block, run, pattern, block[run]
                continue
            nodes = [*expressions(block[i])]
            if edit.argument:
                nodes = self.given(nodes, *edit.argument)
            yield from ((block, slice(i, i + 1), first.value, node) for node in nodes)

    def given(self, nodes: list[ast.AST], callee: str, parameter: str) -> list[ast.AST]:
        """What calls of `callee` give for a parameter, by place or by name."""
        takes, found = self.functions[self.find(callee)].args, []
        names = [x.arg for x in takes.posonlyargs + takes.args]
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) == callee.rpartition(":")[2]:
                values = dict(zip(names, node.args, strict=False))
                values |= {x.arg: x.value for x in node.keywords}
                found += [values[parameter]] if parameter in values else []
        return found


def definitions(node: ast.AST, above: str = "") -> Iterator[tuple[str, Any]]:
    """Functions and classes with their qualified names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, DEFINITIONS):
            name = f"{above}.{child.name}".lstrip(".")
            yield name, child
            yield from definitions(child, name)
        elif not isinstance(child, ast.expr):
            yield from definitions(child, above)


def names_in(nodes: list[Any]) -> set[str]:
    return {x.id for node in nodes for x in ast.walk(node) if isinstance(x, ast.Name)}


def bound_in(node: ast.AST) -> Iterator[str]:
    """Each name that is given a value in it: variables, parameters, functions, imports."""
    for x in ast.walk(node):
        if isinstance(x, ast.Name) and not isinstance(x.ctx, ast.Load):
            yield x.id
        elif isinstance(x, ast.arg):
            yield x.arg
        elif isinstance(x, ast.alias):
            yield (x.asname or x.name).partition(".")[0]
        elif isinstance(x, DEFINITIONS):
            yield x.name


class Scope:
    """The names that a function can use, and those that a pattern names."""

    def __init__(self, tree: ast.Module, function: ast.AST, named: set[str]) -> None:
        self.named = named
        # not the function's own name, which is often that of a local too
        self.local = {name for x in ast.iter_child_nodes(function) for name in bound_in(x)}
        self.known = self.local.union(dir(builtins))
        for node in tree.body:
            self.known.update([node.name] if isinstance(node, DEFINITIONS) else bound_in(node))


def statements_of(function: ast.AST) -> Iterator[tuple[list[ast.stmt], int]]:
    """Each statement, as a block and its index there."""
    for parent in ast.walk(function):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(parent, field, None)
            if isinstance(block, list):
                yield from ((block, i) for i in range(len(block)))


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a statement, but those of statements inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.stmt, ast.ExceptHandler)):
            yield child
            yield from expressions(child)


class Replacement(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


class Match(ast.NodeTransformer):
    """Compares a pattern with code, and fills new code with what it captured and renamed."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.captured: dict[str, ast.AST] = {}
        self.renamed: dict[str, str] = {}

    def __call__(self, old: Any, new: Any) -> bool:
        if isinstance(old, ast.Name) and self.is_wildcard(old.id):
            return isinstance(new, ast.expr) and self.captures(old.id, new)
        if type(old) is not type(new):
            return False
        if isinstance(old, list):
            return len(old) == len(new) and all(map(self, old, new))
        if isinstance(old, ast.Name):
            return self.is_name(old.id, new.id)
        if isinstance(old, ast.Call) and old.args and ast.unparse(old.args[-1]) == "...":
            given = old.args[:-1]
            return self(old.func, new.func) and self(given, new.args[: len(given)])
        if isinstance(old, ast.AST):
            fields = [field for field in old._fields if field not in ("ctx", "kind")]
            return all(self(getattr(old, field), getattr(new, field)) for field in fields)
        return old == new

    def is_wildcard(self, name: str) -> bool:
        return name == "_" or name.startswith("_") and name not in self.scope.known

    def captures(self, name: str, node: ast.expr) -> bool:
        """The same name captures the same expression everywhere; `_` alone any."""
        if name == "_":
            return True
        return ast.dump(self.captured.setdefault(name, node)) == ast.dump(node)

    def is_name(self, old: str, new: str) -> bool:
        """Whether it is that name, or for a name that is gone the one local that took its place."""
        if old in self.scope.known or old in self.renamed:
            return new == self.renamed.get(old, old)
        taken = self.scope.named.union(self.renamed.values())
        if new not in self.scope.local or new in taken:
            return False
        self.renamed[old] = new
        return True

    def visit_Name(self, node: ast.Name) -> ast.AST:
        name = ast.Name(self.renamed.get(node.id, node.id), node.ctx)
        return copy.deepcopy(self.captured.get(node.id, name))
