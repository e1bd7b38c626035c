"""What summary.json says of the attention of a run."""

from dataclasses import replace

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


def test_the_summary_says_what_the_attentions_claim():
    """The report judges a defect under exact attention, and another function by its own loss."""
    naive, no_max = get_backend("naive"), get_backend("no_max")
    sigmoid = replace(naive, name="sigmoid", exact=False)
    for schedule, defect, exact in (
        ({0: naive}, False, True),
        ({0: no_max}, True, False),
        ({0: no_max, 10: naive}, True, False),
        ({0: naive, 10: no_max}, True, False),
        ({0: sigmoid}, False, False),
    ):
        row = schedule_summary(schedule)
        assert (row["defect"], row["exact"]) == (defect, exact)
