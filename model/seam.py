"""How the layers of a model compute their attention: by which backend, on which ranks, and whether
they keep their largest scores. The GPT itself knows nothing of these.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attention import Backend, attention

# values of Seam.look. They are on the CPU and read when a step runs, so one compiled graph serves
# both. Never write to them: a graph that reruns attention in the backward pass keeps the tensor of
# its forward pass
QUIET, LOOKING = torch.tensor(False), torch.tensor(True)


@dataclass(eq=False)
class Seam:
    """What all layers of a model do with q, k and v. They share one seam."""

    backend: Backend
    call: Callable[..., Any] = attention  # or a function with its signature
    look: Tensor = QUIET  # under LOOKING each layer keeps its largest scores, for max_scores()


class SeamedModel(nn.Module):
    """A model whose layers, `blocks`, share `seam`."""

    seam: Seam
    blocks: nn.ModuleList

    @contextmanager
    def using(self, **changes: Any) -> Iterator[None]:
        """Inside, other fields of the Seam: backend= for exact attention with the same weights,
        call= for ranks that share a sequence, look=LOOKING for max_scores().
        """
        before, after = dict(vars(self.seam)), replace(self.seam, **changes)
        vars(self.seam).update(vars(after))
        try:
            yield
        finally:
            vars(self.seam).update(before)

    @property
    def backend(self) -> Backend:
        return self.seam.backend

    @backend.setter
    def backend(self, backend: Backend) -> None:
        self.seam.backend = backend

    @property
    def attention_features(self) -> frozenset[str]:
        """The features that a backend needs for the functions of these layers."""
        asked = frozenset().union(*(block.attention.function for block in self.blocks))
        return asked - {"sinks"} | ({"lse"} if "sinks" in asked else set())

    def max_scores(self) -> Tensor:
        """The largest scores of each head in the last forward pass under using(look=LOOKING),
        (num_layers, B, H).
        """
        return torch.stack([block.attention.max_score for block in self.blocks])
