"""Hold an attention of your own to the properties of attention.

    attn-conform my_package.my_module:BACKEND

BACKEND is an attention.Backend; the built-in ones go by their names, such as naive. A property is
green where every check stays in its budget, which is relative to naive attention's own error
against float64; red where one does not; n/a where the backend declares that it takes no such input.
The exit code is 1 where a property is red, unless the backend names that property in `breaks`.
"""

import argparse
import os
import sys

import torch

from attention import get_backend
from conformance.backend_under_test import Subject
from conformance.cases import SHORT
from conformance.properties import PROPERTIES, SLOW, check_breaks, examine

DTYPES = {name: dtype for dtype, name in SHORT.items()}


def main() -> None:
    options = read_options()
    device = torch.device(options.device)
    set_up(device)
    try:
        backend = get_backend(options.backend)
        check_breaks(backend)
    except ValueError as error:
        sys.exit(f"attn-conform: {error}")
    cells = []
    for dtype in options.dtype.split(","):
        subject = Subject(backend, device.type, DTYPES[dtype], options.cases, options.seed)
        for name in PROPERTIES:
            if options.quick and name in SLOW:
                continue
            cell = examine(subject, name)
            status = f"{cell.status}, as documented" if cell.documented and cell.ok else cell.status
            print(f"{dtype}  {name:<20}  {status}{cell.note and f': {cell.note}'}", flush=True)
            cells.append(cell)
    if all(cell.status == "n/a" for cell in cells):
        sys.exit("attn-conform: nothing was verified")
    wrong = [cell for cell in cells if not cell.ok]
    sys.exit(f"attn-conform: {len(wrong)} of {len(cells)} are not as documented" if wrong else 0)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "attn-conform", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_gpu = torch.cuda.is_available()
    parser.add_argument("backend", help="pkg.module:NAME of a Backend, or the name of a built-in")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--dtype",
        default="fp32,bf16,fp16" if on_gpu else "fp32",
        help=f"of {', '.join(DTYPES)}, several with commas between (default: %(default)s)",
    )
    parser.add_argument("--cases", type=int, default=20, help="random shapes (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the random shapes (default: 0)")
    parser.add_argument(
        "--quick", action="store_true", help="leave out memory, repeats and torch.compile"
    )
    options = parser.parse_args()
    for name in options.dtype.split(","):
        if name not in DTYPES:
            parser.error(f"--dtype {name} is not one of: {', '.join(DTYPES)}")
    return options


def set_up(device: torch.device) -> None:
    """Prepare the process: repeatable products on a GPU, no idle threads on a CPU."""
    # cuBLAS reads at its first call what it needs to be deterministic
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device.type == "cpu":
        torch.set_num_threads(1)  # the tensors are small: threads would only wait for one another
    else:
        from torch import _dynamo

        # flex is compiled for every kind of case; past the limit it would run uncompiled
        _dynamo.config.recompile_limit = 1000


if __name__ == "__main__":
    main()
