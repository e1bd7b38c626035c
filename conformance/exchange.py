"""Judge an attention that runs elsewhere, as in JAX or MLX: one .npz file holds its inputs, another
its outputs. The side of the attention:

    inputs, outputs = np.load("inputs.npz"), {}
    for case in inputs["cases"]:
        q, k, v, d_out = (inputs[f"{case}/{name}"] for name in ("q", "k", "v", "d_out"))
        arguments = json.loads(str(inputs[f"{case}/arguments"]))  # causal, scale; window, softcap
        outputs[f"{case}/out"] = attend(q, k, v, **arguments)
    np.savez("outputs.npz", **outputs)

Cases with alibi_slopes, document_ids, key_lengths or sinks hold these as arrays; a window may be
[left, right]. A case without an output is one that the attention does not take.

Dimensions: B batch, H heads, N queries, M keys, D head dim.
"""

import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from attention import Backend
from attention.interface import FEATURES, Refusal
from conformance.backend_under_test import Subject
from conformance.cases import Case, Check
from conformance.files import write_file
from conformance.properties import PROPERTIES, SLOW, TENSORS, Cell, examine

WHAT_COMES_BACK = (
    "write arrays CASE/out to outputs.npz, and CASE/lse, CASE/dq, CASE/dk, CASE/dv where there are "
    "any: gradients of (out * d_out).sum()"
)
ARRAYS = ("alibi_slopes", "document_ids", "key_lengths", "sinks")
# features that a file leaves out: functions, calls of another form, outputs of another width
UNFILED = {"score_mod", "max_score", "cu_seqlens", "value_dim"}


def elsewhere(*_: Any, **__: Any) -> NoReturn:
    raise Refusal("it asks for more than a file of outputs tells")


@dataclass
class Filed(Subject):
    """A subject whose results come from a file, by case. `asked` collects the cases that the
    properties compare.
    """

    results: Mapping[str, dict[str, Tensor]] = field(default_factory=dict)
    asked: list[Case] = field(default_factory=list)

    def takes(self, case: Case, *, backward: bool) -> bool:
        return True

    def compare(self, case: Case) -> dict[str, Check] | None:
        self.asked.append(case)
        results = self.results.get(str(case))
        if results is None:
            self.refusals.append("the file has no outputs for its cases")
            return None
        return self.expected(case).checks(case, results)


def filed(cases: int, seed: int, *, lse: bool = True) -> Filed:
    features = FEATURES - UNFILED - (set() if lse else {"lse"})
    backend = Backend("the file", elsewhere, features=features)
    subject = Filed(backend, "cpu", torch.float32, cases, seed)
    subject.lse_gradient = False
    return subject


def export(file: Path, cases: int, seed: int) -> int:
    """Write the inputs of every case; return the number of cases."""
    subject = filed(cases, seed)
    for name in PROPERTIES.keys() - SLOW:
        examine(subject, name)
    asked = sorted(dict.fromkeys(case for case in subject.asked if writable(case)), key=str)
    arrays: dict[str, Any] = {"cases": list(map(str, asked)), "settings": [cases, seed]}
    for case in asked:
        (q, k, v), arguments, d_out, _ = case.make(torch.float32, "cpu")
        given = {"q": q, "k": k, "v": v, "d_out": d_out.float()}
        given |= {name: arguments.pop(name) for name in ARRAYS if name in arguments}
        arrays |= {f"{case}/{name}": x.numpy() for name, x in given.items()}
        arguments["scale"] = case.head_dim**-0.5
        arrays[f"{case}/arguments"] = json.dumps(arguments)
    content = io.BytesIO()
    np.savez(content, **arrays)
    write_file(file, content.getvalue())
    return len(asked)


def writable(case: Case) -> bool:
    return case.value_dim is None and UNFILED.isdisjoint(case.optional)


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file. Raises ValueError for another or a damaged file."""
    try:
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    # NumPy raises these for text, an empty file, a single array or half a file
    except (ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is no .npz file of arrays, or a part of one is missing; np.savez writes one"
        ) from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


def judge(inputs: Path, outputs: Path) -> Iterator[Cell]:
    """A cell for every property that compares results. Raises ValueError if the outputs do not
    belong to these inputs.
    """
    given = arrays_of(inputs)
    try:
        cases, seed = given["settings"].tolist()
        shapes = {
            str(case): (given[f"{case}/q"].shape, given[f"{case}/k"].shape)
            for case in given["cases"]
        }
    except KeyError as error:
        raise ValueError(
            f"{inputs} has no {error}: name the file that `attn-conform export` wrote"
        ) from error
    results: dict[str, dict[str, Tensor]] = {}
    for name, x in arrays_of(outputs).items():
        case, _, tensor = name.partition("/")
        if case not in shapes or tensor not in TENSORS:
            raise ValueError(f"{outputs}: {name} is not CASE/out, lse, dq, dk or dv of {inputs}")
        if x.dtype.kind not in "fiu":
            raise ValueError(f"{outputs}: {name} must hold floats, it holds {x.dtype}")
        q, k = shapes[case]
        shape = {"lse": q[:3], "dk": k, "dv": k}.get(tensor, q)
        if x.shape != shape:
            raise ValueError(f"{outputs}: {name} must be {shape}, it is {x.shape}")
        results.setdefault(case, {})[tensor] = torch.from_numpy(x).double()
    subject = filed(cases, seed, lse=any("lse" in found for found in results.values()))
    subject.results = results
    for name in PROPERTIES:
        if name not in SLOW:
            yield examine(subject, name)
