"""What summary.json says of the attention of a run."""

import torch

from attention import get_backend
from training.schedule import schedule_summary


def test_the_kernels_that_run_are_named_with_the_reason():
    place = {"device": torch.device("cpu"), "dtype": torch.bfloat16, "head_dim": 64}
    described = schedule_summary({0: get_backend("triton")}, **place)
    assert (
        described["kernel"] == "portable"
        and "they run on NVIDIA's Hopper GPUs" in described["kernel_reason"]
    )
    assert "kernel" not in schedule_summary({0: get_backend("tiled")}, **place)
