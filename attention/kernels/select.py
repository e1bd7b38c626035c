"""Choose the kernels that attention=triton runs: the portable ones, or those for Hopper. This
module does not import Triton.
"""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from attention.interface import Refusal, dtype_name

KERNELS = ("auto", "portable", "hopper")
# releases in which the Hopper kernels passed their tests on a GPU; their language, Gluon, changes
# with every release of Triton
TRITON_RELEASES = ("3.6", "3.7")
HEAD_DIMS = (64, 128)
SHIPPED = "attention.kernels.score_mods:"  # they compile in every language
SOFTCAP = f"{SHIPPED}softcap"


class Choice(NamedTuple):
    """kernel: "portable" or "hopper"; reason: why, as text for a log or a refusal."""

    kernel: str
    reason: str


@cache
def obstacle_of_the_place(device: torch.device) -> str:
    """Why the Hopper kernels cannot run on this device with this Triton; "" if they can."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"they run on NVIDIA's Hopper GPUs, the inputs are on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return (
            "they run on NVIDIA's Hopper GPUs (sm_90), this one is "
            f"sm_{capability[0]}{capability[1]}"
        )
    try:
        installed = version("triton")
    except PackageNotFoundError:
        installed = "unknown"
    if ".".join(installed.split(".")[:2]) not in TRITON_RELEASES:
        return (
            f"they are written in Gluon for Triton {' and '.join(TRITON_RELEASES)}, this is Triton "
            f"{installed}"
        )
    return ""


def why_not_hopper(
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    scale: float = 1.0,
    score_mod: str = "",
    softmax: str = "online",
    block_q: int = 0,
    block_kv: int = 0,
    **_: bool,
) -> str:
    """Why the Hopper kernels cannot take these inputs; "" if they can. From scale on, they are
    fields of launch.Settings; the others do not matter.
    """
    if place := obstacle_of_the_place(device):
        return place
    if dtype not in (torch.bfloat16, torch.float16):
        return f"they take bfloat16 and float16, the inputs are {dtype_name(dtype)}"
    if head_dim not in HEAD_DIMS:
        return f"they take head_dim {' and '.join(map(str, HEAD_DIMS))}, the inputs have {head_dim}"
    if softmax != "online":
        return "they take no broken softmax"
    if block_q or block_kv:
        return "their tiles are fixed, and block_q or block_kv is given"
    if not scale > 0:
        return f"they take a positive scale, not {scale}"
    if score_mod and not score_mod.startswith(SHIPPED):
        from attention.kernels.hopper.score_mods import why_not_in_gluon

        if against := why_not_in_gluon(score_mod):
            return f"Gluon does not compile the score_mod {score_mod}: {against}"
    return ""


def choose_kernel(kernel: str, **inputs) -> Choice:
    """The kernels that run for kernel=auto, portable or hopper. `inputs` are the arguments of
    why_not_hopper(). Raises Refusal for another kernel, and if kernel=hopper cannot run.
    """
    if kernel not in KERNELS:
        raise Refusal(f"kernel={kernel} is not one of: {', '.join(KERNELS)}")
    if kernel == "portable":
        return Choice("portable", "asked for")
    against = why_not_hopper(**inputs)
    if kernel == "hopper":
        if against:
            raise Refusal(
                f"attention.kernel=hopper cannot run: {against}; attention.kernel=auto takes the "
                "portable kernels there"
            )
        return Choice("hopper", "asked for")
    if not against and inputs.get("score_mod", "").startswith(SOFTCAP):
        # its forward takes 1.4 to 2 times as long there, on an H200: measured at d38cfaf by
        # python -m scripts.benchmark features=none,softcap
        against = "a softcap takes longer in them; attention.kernel=hopper takes them all the same"
    return (
        Choice("portable", f"not the Hopper kernels: {against}")
        if against
        else Choice("hopper", "the device and the inputs allow it")
    )
