"""The properties of a function in a dialect: those of conformance, and masks as tensors, of each
form that it takes and of any layout in memory.

Each layout catches a bug that was shipped: a float32 mask read as bfloat16 (pytorch#191612), a mask
of one row or one head read as if it had them all. See conformance.outside.dialect for the forms
and layouts.
"""

from collections.abc import Iterator
from dataclasses import replace

from attention import Backend
from conformance.backend_under_test import Check, Subject
from conformance.cases import run
from conformance.errors import in_one_line
from conformance.outside.adapter import Adapter, dialect_of
from conformance.outside.dialect import MASK_VIEWS
from conformance.properties import PROPERTIES, Property


def properties_of(backend: Backend) -> dict[str, Property]:
    """The properties to hold it to, by their usual names."""
    if dialect_of(backend) is None:
        return PROPERTIES
    return PROPERTIES | {"mask positions": mask_positions}


def mask_positions(subject: Subject) -> Iterator[Check]:
    """Which keys have weight, key by key, also under masks that are tensors."""
    yield from PROPERTIES["mask positions"](subject)
    yield from masks_as_tensors(subject)


def masks_as_tensors(subject: Subject) -> Iterator[Check]:
    """Masks that hide nothing, what comes later, and padding."""
    adapter, n = subject.backend.fn, subject.length
    assert isinstance(adapter, Adapter)
    dialect = adapter.dialect
    if not dialect.mask or dialect.mask_form == "block":
        return
    cases = (
        subject.case(batch=2, causal=False, window=(n, n)),
        subject.case(n // 2, n, batch=2),
        subject.case(batch=2, causal=False, key_lengths=True),
    )
    forms = [dialect.mask_form, *filter(None, dialect.more_mask_forms.split(","))]
    for case in filter(subject.takes, cases):
        inputs, backward = subject.expected(case).inputs, subject.takes(case, backward=True)
        for form in forms:
            for view in filter(None, MASK_VIEWS):
                if view == "of_one_row" and case.causal:
                    continue
                changed = replace(dialect, mask_form=form, mask_view=view)
                backend = replace(subject.backend, fn=Adapter(adapter.function, changed))
                try:
                    found = run(backend, *inputs, backward=backward)
                except Exception as error:  # a user's function may raise anything
                    if form == dialect.mask_form:
                        raise
                    # it says so itself, which is no mistake
                    subject.refusals.append(f"{form} masks: {in_one_line(error)}")
                    break
                yield from subject.exactly(case, f"a {form} mask {view}", found)
