"""How the memory of one forward and backward pass grows with the length: the exponent in
bytes ~ N^exponent, fitted over growing N.

On a CPU we count every tensor that an operator returns. On a GPU we take the allocator's peak,
because the tensors of a compiled kernel cannot be observed.

Dimensions: N tokens, D head dim.
"""

from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention import Backend, attention

LINEAR = 1.15  # the largest exponent that counts as linear in N


class LiveTensors(TorchDispatchMode):
    """Bytes of the live tensors that operators return.

    count_inputs: also count tensors made outside, once an operator returns a view of them.
    """

    def __init__(self, *, count_inputs: bool = False) -> None:
        super().__init__()
        self.count_inputs = count_inputs
        self.largest = self.peak = 0  # bytes of one tensor; of all live tensors together
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outside = set()
        if not self.count_inputs:
            outside = storages(args, kwargs).keys() - self.alive.keys()
        result = func(*args, **(kwargs or {}))
        for key, storage in storages(result).items():
            if key not in outside:
                self.alive[key] = (StorageWeakRef(storage), storage.nbytes())
                self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, self.bytes)
        return result

    @property
    def bytes(self) -> int:
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        return sum(nbytes for _, nbytes in self.alive.values())


def storages(*trees: Any) -> dict[int, torch.UntypedStorage]:
    """The storages of all tensors in nested arguments, each once."""
    tensors = (x for x in tree_leaves(trees) if isinstance(x, torch.Tensor))
    return {x.untyped_storage()._cdata: x.untyped_storage() for x in tensors}


def weigh(
    backend: Backend,
    length: int,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    head_dim: int = 32,
) -> dict[str, int]:
    """Bytes of one causal forward and backward pass: those `saved` for the backward pass, the
    `peak`, and on a CPU the `largest` tensor.
    """
    q, k, v = (
        torch.randn(1, 2, length, head_dim, device=device, dtype=dtype).requires_grad_()
        for _ in range(3)
    )
    d_out = torch.ones_like(q)

    def passes() -> int:
        saved: dict[int, int] = {}  # bytes of each storage by its address

        def keep(x: torch.Tensor) -> torch.Tensor:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = attention(q, k, v, backend=backend).out
        out.backward(d_out)
        return sum(saved.values())

    if q.device.type == "cpu":
        with LiveTensors(count_inputs=True) as scale:
            saved = passes()
        return {"largest": scale.largest, "peak": scale.peak, "saved": saved}
    passes()  # warm-up: compiles, and allocates the libraries' workspaces
    q.grad = k.grad = v.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    saved = passes()
    torch.cuda.synchronize()
    return {"peak": torch.cuda.max_memory_allocated() - before, "saved": saved}


def exponents(backend: Backend, lengths: tuple[int, ...], **shape) -> dict[str, float]:
    """For each result of `weigh`, the slope of log(bytes) over log(N): 1 is linear, 2 means an
    N x N matrix.
    """
    rows = [weigh(backend, length, **shape) for length in lengths]
    return {
        name: float(np.polyfit(np.log(lengths), np.log([row[name] for row in rows]), 1)[0])
        for name in rows[0]
    }
