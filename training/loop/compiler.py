"""torch.compile beside its call: its import and its caches."""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

from training.own_modules import ROOT
from training.record.files import try_folder

OPERATORS = ("attention", "model")  # the packages that register operators


@contextmanager
def importing_torch_compile(wanted: bool) -> Iterator[None]:
    """Load torch.compile in a thread, if it is wanted, while the block draws the first weights.

    Loading takes seconds of Python, and the drawing takes seconds outside Python.
    """
    if not wanted:
        yield
        return
    with ThreadPoolExecutor(1, thread_name_prefix="import") as thread:
        loaded = thread.submit(load_torch_compile)
        yield
        loaded.result()


def load_torch_compile() -> None:
    """Import it, and compute the hashes of Triton and PyTorch that the keys of caches contain.

    Raises OSError if the folder of its cache cannot be written.
    """
    # the import would fail halfway, and again in the next run of this process
    if folder := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        try_folder(Path(folder))
    with suppress(ImportError):
        import_module("triton.runtime.cache").triton_key()
    import_module("torch._inductor.lowering")
    import_module("torch._inductor.codecache").torch_key()


def keep_compiled() -> None:
    """Let a later process find all that torch.compile and Triton compile in this one."""
    import torch._functorch.config
    import torch.compiler.config

    # a graph with an autograd.Function, as a fused block is, is kept only on demand
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    # such a graph is found by the names of its operators. If their code changes, so may the
    # shapes and dtypes that were traced
    tag = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
    torch.compiler.config.cache_key_tag = tag + code_of_operators()
    # Inductor moves Triton's cache to a folder of its own when it compiles, but not when it finds
    # its graphs: a second run would compile every kernel again
    with suppress(ImportError):
        from triton import knobs

        os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)


def code_of_operators() -> str:
    """The SHA-256 of the code of this project's operators, as it is on the disk."""
    digest = hashlib.sha256()
    for path in sorted(path for name in OPERATORS for path in (ROOT / name).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
