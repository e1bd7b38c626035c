"""Shared by all tests: Triton's interpreter, the gpu marker, and the two report options."""

import atexit
import gc
import getpass
import importlib.util
import os
import signal
import sys
import tempfile
from pathlib import Path

# read by Triton when a kernel is declared, so before anything imports the kernels
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
# a worker a core: more threads, or PyTorch's own pool of compilers, would only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

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

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # the tests' tensors are small: threads would only wait for each other
    torch.set_num_threads(1)

# a shared machine may pause a test for longer than hypothesis' default deadline
hypothesis.settings.register_profile("no_deadline", deadline=None)
hypothesis.settings.load_profile("no_deadline")


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from tests.interpreter import quicken

    quicken()

NO_GPU = None if torch.cuda.is_available() else "no GPU: tests marked gpu are deselected"
CONFORMANCE = pytest.StashKey[list]()
KILLS = pytest.StashKey[list]()


def pytest_addoption(parser):
    parser.addoption(
        "--conformance-report",
        type=Path,
        metavar="FILE",
        help="write each backend's worst conformance error to FILE (JSON)",
    )
    parser.addoption(
        "--kill-matrix",
        type=Path,
        metavar="FILE",
        help="write which property catches which mutant to FILE (JSON)",
    )


def pytest_configure(config):
    config.stash[CONFORMANCE] = []
    config.stash[KILLS] = []


def pytest_report_header():
    return NO_GPU


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=on_gpu)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_terminal_summary(terminalreporter, exitstatus):
    """Where nothing ran, say why: -q prints no header."""
    if NO_GPU and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        terminalreporter.write_line(NO_GPU)


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
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def released(request):
    """Give a GPU's memory back after each test: several workers share the GPU."""
    yield
    if request.node.get_closest_marker("gpu"):
        torch.cuda.empty_cache()


@pytest.fixture
def conformance_record(request):
    """Call it with one case's row to add it to the report."""
    return request.config.stash[CONFORMANCE].append


@pytest.fixture
def kill_record(request):
    """Call it with one mutant's row to add it to the matrix; None without --kill-matrix."""
    return request.config.stash[KILLS].append if request.config.getoption("--kill-matrix") else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Take over the rows of a pytest-xdist worker that is done; one that crashed leaves none."""
    output = getattr(node, "workeroutput", {})
    node.config.stash[CONFORMANCE].extend(output.get("conformance", []))
    node.config.stash[KILLS].extend(output.get("kills", []))


def pytest_sessionfinish(session):
    stash = session.config.stash
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput |= {"conformance": stash[CONFORMANCE], "kills": stash[KILLS]}
        return
    if session.config.getoption("--conformance-report") and stash[CONFORMANCE]:
        write_conformance(session.config.getoption("--conformance-report"), stash[CONFORMANCE])
    if session.config.getoption("--kill-matrix") and stash[KILLS]:
        from tests.conformance.kill_matrix import write_matrix

        write_matrix(session.config.getoption("--kill-matrix"), stash[KILLS])


def write_conformance(path: Path, rows: list[dict]) -> None:
    from training.record.environment import measured_on
    from training.record.files import write_json

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [row for row in rows if row["device"] == device]
    summary = {}
    for name in sorted({row["backend"] for row in rows}):
        own = [row for row in rows if row["backend"] == name]
        worst = max(own, key=lambda row: row["worst_multiple_of_naive"])
        summary[name] = {
            "cases": len(own),
            "worst_share_of_budget": max(row["worst_share_of_budget"] for row in own),
            "worst_multiple_of_naive": worst["worst_multiple_of_naive"],
            "worst_case": worst["case"],
        }
    write_json(path, {"environment": measured_on(device), "summary": summary})
