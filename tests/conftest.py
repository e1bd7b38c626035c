"""Shared by all tests: Triton's interpreter, --gpu, and the kill matrix."""

import atexit
import gc
import getpass
import importlib.util
import os
import signal
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
# a worker a core: more threads, or PyTorch's own pool of compilers, would only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# by AMX, a bfloat16 product leaks NaN between its rows (oneDNN#5717), and PyTorch's attention ends
# the process for strides past 2^31. oneDNN reads this at its first product
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import hypothesis
import pytest
import torch

# torch.compile would take its compiled code from a run with another ATEN_CPU_CAPABILITY, which then
# gives wrong numbers
kernels = f"tilegpt-tests-{getpass.getuser()}-{torch.backends.cpu.get_cpu_capability()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), kernels)))

# as at a terminal, for the processes of tests too: a shell lets background jobs ignore Ctrl-C
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # collecting the tests makes no garbage, and would take a third longer

# a shared machine may pause a test for longer than hypothesis' default deadline, and what fails in
# one run fails in all
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

KILLS = pytest.StashKey[list]()


def pytest_addoption(parser):
    parser.addoption(
        "--gpu",
        action="store_true",
        help="run the tests that are marked gpu or anywhere, on a GPU; without it none is seen",
    )
    parser.addoption(
        "--kill-matrix",
        type=Path,
        metavar="FILE",
        help="write which property catches which mutant to FILE (JSON)",
    )


def pytest_configure(config):
    config.stash[KILLS] = []
    if config.getoption("--kill-matrix") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--kill-matrix takes one process: leave out -n")
    if config.getoption("--gpu"):
        if not torch.cuda.is_available():
            raise pytest.UsageError("--gpu: PyTorch sees no GPU here")
        return
    # the same tests on every machine, before anything asks for a GPU or declares a kernel
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # the tests' tensors are small: threads would only wait for each other
    torch.set_num_threads(1)
    if os.environ["TRITON_INTERPRET"] == "1" and importlib.util.find_spec("triton"):
        from tests.interpreter import quicken

        quicken()


def pytest_report_header(config):
    return None if config.getoption("--gpu") else "tests marked gpu run by --gpu alone"


def pytest_collection_modifyitems(config, items):
    gpu, every = config.getoption("--gpu"), config.getoption("--kill-matrix")
    here, elsewhere = [], []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        runs = every or (marks & {"gpu", "anywhere"} if gpu else "gpu" not in marks)
        (here if runs else elsewhere).append(item)
    config.hook.pytest_deselected(items=elsewhere)
    items[:] = here


def pytest_collection_finish():
    gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or PyTorch's libraries tell of leaks


imported = 0


@pytest.fixture(autouse=True)
def frozen():
    """A run ends with gc.collect(), which would look again at all that is imported by then: half
    of the time of a tiny run.
    """
    global imported
    yield
    if len(sys.modules) > imported + 50:
        imported = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same numbers, whichever ran before it in the same worker."""
    # of a GPU that is not there, torch.manual_seed() would note who asked: half a millisecond
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)


@pytest.fixture(autouse=True)
def released(request):
    """Give a GPU's memory back after each test: several workers share the GPU."""
    yield
    if request.config.getoption("--gpu"):
        torch.cuda.empty_cache()


@pytest.fixture
def kill_record(request):
    """Call it with one mutant's row to add it to the matrix; None without --kill-matrix."""
    return request.config.stash[KILLS].append if request.config.getoption("--kill-matrix") else None


def pytest_sessionfinish(session):
    path, rows = session.config.getoption("--kill-matrix"), session.config.stash[KILLS]
    if path and rows:
        from tests.conformance.kill_matrix import write_matrix

        write_matrix(path, rows)
