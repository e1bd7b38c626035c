"""Launches by a CUDA driver without a device: what Triton brings it, one JSON line a launch.

    python -m tests.attention.no_device.launches libcuda.so.1 hopper

Each Launch is called twice with the same tensors: first through Triton's launcher, then by the
shorter way. Then once with others.
"""

import ctypes
import json
import re
import struct
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

SIZES = {"u64": 8, "u32": 4, "f32": 4}  # of a kernel's arguments, by their type in PTX
H200 = SimpleNamespace(multi_processor_count=132, L2_cache_size=60 * 2**20)
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch._C._cuda_getCurrentRawStream = lambda device: 1

from triton.backends.nvidia.driver import CudaDriver  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402
from triton.runtime import driver  # noqa: E402

from attention.kernels import launch, portable  # noqa: E402
from attention.kernels.hopper import launch as hopper  # noqa: E402

compiled: dict[int, CompiledKernel] = {}  # by the driver's handle
reached: list[dict[str, Any]] = []


class Recorded(launch.Launch):
    def __call__(self, *tensors: Tensor | None) -> None:
        for _ in range(2 if self.start is None else 1):
            super().__call__(*tensors)
            reached[-1]["tensors"] = [x.data_ptr() for x in tensors if x is not None]


def argument_sizes(ptx: str) -> list[int]:
    arguments = re.search(r"\.entry\s+\w+\((.*?)\)", ptx, re.DOTALL)[1]
    return [
        int(bytes_of[1]) if (bytes_of := re.search(r"\[(\d+)\]", each)) else
        SIZES[re.search(r"\.(u64|u32|f32)", each)[1]]
        for each in arguments.split(",")
    ]  # fmt: skip


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
def record(config: int, function: int, arguments: Any) -> None:
    kernel = compiled[function]
    sizes = enumerate(argument_sizes(kernel.asm["ptx"]))
    reached.append(
        {
            "kernel": kernel.name,
            "shape": struct.unpack("7I", ctypes.string_at(config, 28)),  # grid, block, bytes
            "arguments": [ctypes.string_at(arguments[i], size).hex() for i, size in sizes],
        }
    )


def main() -> None:
    library, kernels = sys.argv[1:]
    ctypes.CDLL(library).record_launches(record)
    driver.set_active(CudaDriver())
    load = CompiledKernel._init_handles

    def load_and_note(self: CompiledKernel) -> None:
        load(self)
        compiled[self.function] = self

    CompiledKernel._init_handles = load_and_note
    hopper.properties = launch.properties = lambda device: H200
    hopper.Launch = portable.Launch = Recorded
    zeros = torch.zeros(2, dtype=torch.int32)
    hopper.counters = lambda device: zeros
    module = {"hopper": hopper, "portable": portable}[kernels]
    # lo, starts, causal, scale and settings of portable kernels
    how = None, None, True, 0.1, "", "online", 0, 0
    forward = backward = None
    rounds = []
    for _ in range(2):
        q, out, d_out, dq = torch.empty(4, 1, 8, 640, 128, dtype=torch.bfloat16)
        k, v, dk, dv = torch.empty(4, 1, 1, 640, 128, dtype=torch.bfloat16)
        lse = torch.empty(q.shape[:3])
        forward = forward or module.Forward(q, k, out, None, *how)
        forward(q, k, v, out, lse, None, None, None, None, None)
        backward = backward or module.Backward(d_out, q, k, out, dq, dk, dv, *how)
        backward(d_out, None, q, k, v, out, lse, dq, dk, dv, None, None, None, None)
        rounds.append((q, k, lse))  # alive, so that the next ones lie elsewhere
    for row in reached:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
