"""The smallest failing call of a red property, as a script that does not import this project.

Each candidate is a case. We write its script, run it here, and compare its error with the budget of
the case. So we shrink exactly what the user gets.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import torch

from attention import Backend
from conformance.backend_under_test import TENSORS, Subject
from conformance.cases import SHORT, Case, expect
from conformance.errors import in_one_line
from conformance.outside.dialect import Dialect
from conformance.outside.dialects import Target
from conformance.outside.script import OPTIONAL, Call, write
from conformance.properties import Cell, why_unusable
from conformance.views import LAYOUTS

LITERAL = (int, float, str, bool, type(None))
SIZES = ("num_heads", "num_kv_heads", "num_queries", "num_keys", "head_dim")
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)


class Minimiser:
    """Makes the scripts of one attention."""

    def __init__(self, target: Target, subject: Subject) -> None:
        self.target, self.subject = with_options(target, subject.backend), subject
        self.failing = cache(self._failing)  # shrinking repeats calls

    def script(self, cell: Cell) -> str | None:
        """The script for a red property that was just examined; None if no single call with random
        inputs fails, or the GPU no longer runs any.
        """
        if cell.property in ("saved bytes", "largest tensor"):
            return None  # memory against length, which one call does not show
        if why_unusable(self.subject.device):
            return None
        dtypes = [self.subject.dtype]
        if named := re.search(rf"-({'|'.join(SHORT.values())})(:|, )", cell.note):
            dtypes = [x for x in SHORT if SHORT[x] == named[1]]
        elif cell.raised:
            dtypes += [torch.bfloat16, torch.float16]
        layouts = [*LAYOUTS] if cell.property == "strides and views" else [""]
        # what the note names comes first
        candidates = product(
            dtypes,
            sorted(layouts, key=lambda layout: f", {layout}" not in cell.note),
            sorted(dict.fromkeys(self.subject.tried), key=lambda case: f"{case}" not in cell.note),
            sorted(TENSORS, key=lambda name: not cell.note.startswith(f"{name} of")),
        )
        for dtype, layout, case, tensor in candidates:
            call = Call(plain(case, self.target.dialect), tensor, dtype, cell.raised, layout)
            if script := self.failing(call):
                return self.smallest(call, script)
        return None

    def smallest(self, call: Call, script: str) -> str:
        """The script of the smallest call that still fails; `script` if none is smaller."""
        for case in smaller(call.case, self.subject):
            if found := self.failing(call._replace(case=case)):
                return self.smallest(call._replace(case=case), found)
        return script

    def _failing(self, call: Call) -> str | None:
        """The script if it fails, else None."""
        subject, case, tensor, dtype = self.subject, call.case, call.tensor, call.dtype
        if tensor == "dsinks" or (tensor == "lse" and "lse" not in subject.backend.features):
            return None
        try:
            if not subject.in_dtype(dtype).takes(case, backward=tensor.startswith("d")):
                return None
            exact = expect(case, dtype, subject.device, with_lse=False)
        except (ValueError, IndexError, RuntimeError):  # shape too small for inputs such as spike
            return None
        budget = exact.budget(tensor)
        text = write(self.target, call, subject.device, budget)
        try:
            error = executed(text)["error"]
        except (Exception, SystemExit) as raised:  # a user's function may raise anything
            same = unnumbered(in_one_line(raised)) == unnumbered(call.raises)
            # after some errors of a kernel every call fails, which would shrink to nonsense
            return text if same and not why_unusable(subject.device) else None
        return text if not call.raises and error > budget else None


def unnumbered(line: str) -> str:
    """An error in one line without its numbers, such as sizes. The end of a long line is left out,
    because in_one_line() cuts it after numbers of any length.
    """
    return re.sub(r"\d+", "", line)[:200]


def executed(text: str) -> dict[str, Any]:
    """The variables of a script that ran up to its last two lines, which judge them."""
    variables: dict[str, Any] = {}
    try:
        exec(text[: text.index("print(f")], variables)
    finally:
        torch.set_default_device(None)
    return variables


def with_options(target: Target, backend: Backend) -> Target:
    """The target with the backend's options in each call, such as small tiles on a CPU."""
    if not backend.options:
        return target
    constants = [f"{key}={x!r}" for key, x in backend.options.items() if isinstance(x, LITERAL)]
    return target._replace(dialect=replace(target.dialect, constants=", ".join(constants)))


def plain(case: Case, dialect: Dialect) -> Case:
    """The case without the arguments that a script cannot write."""
    optional = {x: y for x, y in case.optional.items() if x in OPTIONAL}
    # fewer keys would move the queries' positions
    moves = case.causal or optional.keys() & {"window", "alibi_slopes"}
    if moves or not dialect.mask:
        optional.pop("key_lengths", None)
    return replace(case, optional=optional)


def smaller(case: Case, subject: Subject) -> Iterator[Case]:
    """Simpler cases, the largest reductions first."""
    lengths = [*map(subject.rounded, LENGTHS)]
    heads = ((1, 1), (case.num_kv_heads, case.num_kv_heads), (2, 1))
    changes: list[dict[str, Any]] = [
        *(
            {"optional": {x: y for x, y in case.optional.items() if x != name}}
            for name in case.optional
        ),
        *({"inputs": "normal"}, {"batch": 1}, {"seed": 0}),
        *({"num_heads": of_q, "num_kv_heads": of_kv} for of_q, of_kv in heads),
        *({"num_queries": n, "num_keys": n} for n in lengths),
        *({"num_queries": n} for n in lengths),
        *({"num_keys": n} for n in lengths),
        *({"head_dim": size} for size in (1, 2, 4, 8, 16, 32, 64) if size in subject.head_dims),
        {"causal": case.causal and "window" in case.optional},
    ]
    for change in changes:
        found = replace(case, **change)
        grows = any(getattr(found, name) > getattr(case, name) for name in SIZES)
        # rows without a key would be another failure
        adds_empty_rows = case.num_queries <= case.num_keys and found.num_queries > found.num_keys
        if found != case and not grows and not adds_empty_rows:
            yield found
