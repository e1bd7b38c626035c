"""Peak memory, the limit that turns a fatal allocation into an error, and what is read out of the
error.
"""

import resource
import sys

import pytest
import torch

from tests.command import metrics, run, summary, tiny
from training.record import memory
from training.record.memory import (
    MemoryMeter,
    cpu_memory_limit,
    describe_out_of_memory,
    is_out_of_memory,
    release_memory,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.50 TiB. GPU 0 has a total capacity of 139.72 GiB of "
    "which 512.00 MiB is free.\nSee documentation for Memory Management"
)


@linux
def test_peak_follows_what_was_touched_and_reset_forgets_it():
    meter, of_the_process = MemoryMeter("cpu"), "memory/process_gib"
    before = meter.row()[of_the_process]
    block = torch.ones(64 * 1024**2)  # 0.25 GiB
    assert meter.row()[of_the_process] - before == pytest.approx(0.25, abs=0.02)
    del block
    assert meter.row()[of_the_process] - before == pytest.approx(0.25, abs=0.02)
    meter.reset()
    row = meter.row()
    assert row[of_the_process] == pytest.approx(before, abs=0.02)
    assert row["memory/reserved_gib"] is None and row["memory/peak_gib"] is None
    assert meter.summary[of_the_process] == pytest.approx(before + 0.25, abs=0.02)
    # of several processes, the one that needs most counts
    others = MemoryMeter("cpu", lambda row: row | {of_the_process: 1000.0})
    assert others.row()[of_the_process] == others.summary[of_the_process] == 1000.0


def test_a_measured_step_counts_tensors_as_they_come_and_go():
    """Held before, made within, freed within; views and shared storages once. The largest step
    counts.
    """
    meter, held = MemoryMeter("cpu"), torch.ones(2**20)  # 4 MiB
    with meter.measured([held, {"again": held[1:]}]):
        a = held + 1
        b = a * 2
        del a
        c = (b + 1).view(4, -1)
    three = pytest.approx(3 * 2**22 / 2**30, rel=1e-5)
    assert meter.row()["memory/peak_gib"] == three
    with meter.measured(held):
        del b
    assert meter.row()["memory/peak_gib"] == three
    assert c.numel() == 2**20


def test_a_block_of_before_is_no_gain():
    """A regression test: PyTorch tells of its free, with the size of what it last profiled there.
    Peaks were some bytes smaller where the step before had left a tensor at such an address.
    """
    with MemoryMeter("cpu").measured():
        profiled = [torch.ones(2**10) for _ in range(9)]
    del profiled
    again = [torch.ones(2**10) for _ in range(9)]  # most at the same addresses
    meter = MemoryMeter("cpu")
    with meter.measured():
        del again
        new = torch.ones(2**12)
    assert meter.row()["memory/peak_gib"] == new.nbytes / 2**30


@linux
def test_limit_makes_an_oversized_tensor_an_error_and_the_process_lives_on():
    before = resource.getrlimit(resource.RLIMIT_AS)
    # more than the machine has, less than the addresses Linux would hand out without the limit
    numel = (memory.free_memory() + 2**32) // 4
    with cpu_memory_limit():
        with pytest.raises(RuntimeError) as caught:
            torch.empty(numel)
        assert is_out_of_memory(caught.value)
        assert torch.ones(1000).sum() == 1000
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    described = describe_out_of_memory(caught.value)
    assert described["asked_gib"] == pytest.approx(numel * 4 / 1024**3)
    assert "can't allocate memory" in described["message"]
    # a lower limit counts: that of the caller, and that of the user
    with cpu_memory_limit(2**28):
        lower = resource.getrlimit(resource.RLIMIT_AS)
        with cpu_memory_limit(), pytest.raises(RuntimeError, match="can't allocate memory"):
            assert resource.getrlimit(resource.RLIMIT_AS) == lower
            torch.empty(2**29, dtype=torch.uint8)


@linux
def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    """Less what it holds that cannot be reclaimed."""
    machine = memory.free_memory()
    monkeypatch.setattr(memory, "CONTAINER", tmp_path)
    (tmp_path / "memory.max").write_text(f"{3 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{2**20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {2**19}\nfile 7\n")
    assert memory.free_memory() == 3 * 2**20 - 2**20 + 2**19
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_memory() == pytest.approx(machine, rel=0.5)


# {what says that memory ran out: the GiB that were asked for}
OUT = {
    torch.OutOfMemoryError(CUDA_MESSAGE): 2560.0,
    MemoryError("Unable to allocate 8.00 PiB for an array"): 8 * 2.0**20,  # NumPy's
    MemoryError(): None,
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8"): None,
    RuntimeError("CUDA error: out of memory"): None,
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED in `cublasCreate(handle)`"): None,
}
NOT_OUT = (
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    ValueError("not enough memory of the past"),
)


def test_what_counts_as_out_of_memory_and_the_size_that_was_asked_for():
    assert [error for error in (*OUT, *NOT_OUT) if is_out_of_memory(error)] == [*OUT]
    assert {error: describe_out_of_memory(error)["asked_gib"] for error in OUT} == OUT
    messages = [describe_out_of_memory(error)["message"] for error in OUT]
    assert "2.50 TiB" in messages[0] and "\n" not in messages[0]
    assert messages[2] == "MemoryError"


@pytest.mark.gpu
def test_gpu_meter_and_release():
    release_memory("cuda")
    before = torch.cuda.memory_allocated() / 2**30
    meter = MemoryMeter("cuda")
    block = torch.ones(2**28, device="cuda", dtype=torch.uint8)
    assert meter.row()["memory/peak_gib"] - before == pytest.approx(0.25, abs=0.01)
    assert meter.row()["memory/reserved_gib"] >= 0.25
    del block
    release_memory("cuda")
    assert meter.row()["memory/peak_gib"] - before == pytest.approx(0.0, abs=0.01)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**42, device="cuda", dtype=torch.uint8)
    assert describe_out_of_memory(caught.value)["asked_gib"] == 4096.0


def test_each_attention_of_a_run_is_measured(tmp_path):
    """After a switch the second step is measured again; a run of one step measures that one. Long
    enough for the scores to be most of the memory.
    """
    shape = ("seq_len=384", "batch_size=1", "eval_every=0", "diagnose_every=0")
    switch = ("attention=tiled", "attention.switch_at=4", "attention.switch_to=naive")
    # the measured steps, 2 and 6, do not look at the scores
    assert run(*tiny(tmp_path / "two", *shape, *switch, "steps=8", "log_every=5")).code == 0
    rows = {row["step"]: row["memory/peak_gib"] for row in metrics(tmp_path / "two")}
    # two heads of 384 x 384 scores, in float32 and as probabilities: what tiled does without
    assert rows[8] - rows[5] > 2 * 384 * 384 * 4 / 2**30
    assert summary(tmp_path / "two")["memory/peak_gib"] == rows[8]
    assert run(*tiny(tmp_path / "one", *shape, "steps=1")).code == 0
    assert summary(tmp_path / "one")["memory/peak_gib"] > 0


@pytest.mark.slow
def test_a_compiled_step_has_its_memory(tmp_path):
    """Its graph allocates by itself, and not by the operators that PyTorch's dispatcher sees."""
    shape = ("seq_len=256", "batch_size=2", "steps=2", "eval_every=0", "diagnose_every=0")
    done = run(*tiny(tmp_path, *shape, "attention=naive", "compile=true"))
    assert done.code == 0, done.output
    result = summary(tmp_path)
    # weights, gradients and AdamW's two means
    assert result["memory/peak_gib"] * 2**30 > 16 * result["parameters"]
    assert result["seconds_by_phase"]["compiling"] > result["seconds_by_phase"]["training"]
