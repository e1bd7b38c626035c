"""Claims about chips, by arithmetic from NVIDIA's documents: data sheets, the A100 white paper, the
CUDA programming guide.
"""

import torch

from lab.claims.claim import NOT_TESTABLE, Figures, claim, verdict
from training.hardware import (
    BLOCK_DEFAULT_KIB,
    PEAK_BANDWIDTH,
    PEAK_FLOPS,
    REGISTER_BYTES,
    SHARED_KIB,
)

KIB = 1024
# shared memory one thread block may use, in KiB
BLOCK_KIB = {
    "A100": SHARED_KIB["8.0"][1],
    "RTX 3090 and 4090": SHARED_KIB["8.6"][1],
    "H100 and H200": SHARED_KIB["9.0"][1],
}
A100_SMS = 108
A100_SM_KIB = 192  # shared memory and L1 together
SRAM_BANDWIDTH = 19e12  # of an A100, as in the first FlashAttention paper, section 2.1
# dense 16-bit FLOP/s and bytes/s
PEAKS = {
    "A100": (PEAK_FLOPS["A100"], PEAK_BANDWIDTH["A100.*80GB"]),
    "H100": (PEAK_FLOPS["H100"], PEAK_BANDWIDTH["H100"]),
}


@claim(
    "guide",
    says="The arithmetic intensity of standard attention is about d, 64 FLOP a byte, so it is "
    "bound by memory.",
    criterion="the FLOP of QK^T over its bytes in float16, as the guide counts its accesses, lie "
    "within 10% of d",
    measured="{intensity:.1f} FLOP a byte at 4,096 tokens: d / 2, as the guide counts elements and "
    "calls them bytes. The conclusion "
    "stands: an A100 needs {ridge:.0f}",
    verdict=lambda f: verdict(abs(f["intensity"] / 64 - 1) < 0.1),
    tiny={},
)
def intensity() -> Figures:
    length, head_dim, bytes_each = 4096, 64, 2
    flops, elements = 2 * length**2 * head_dim, 2 * length * head_dim + 2 * length**2
    flops_per_second, bandwidth = PEAKS["A100"]
    return {"intensity": flops / (elements * bytes_each), "ridge": flops_per_second / bandwidth}


@claim(
    "deep dive",
    says="An A100 does 156 operations for each byte it reads, an H100 296.",
    criterion="both ratios, from the data sheets' dense 16-bit rates, are right to 3%",
    measured="{A100:.0f} and {H100:.0f}",
    verdict=lambda f: verdict(abs(f["A100"] / 156 - 1) < 0.03 and abs(f["H100"] / 296 - 1) < 0.03),
    tiny={},
)
def ratio_of_the_chips() -> Figures:
    return {name: rate / bandwidth for name, (rate, bandwidth) in PEAKS.items()}


@claim(
    "guide",
    says="SRAM (20 MB) is 12 times faster and 2,000 times smaller than the GPU's memory "
    "(A100 of 40 GB).",
    criterion="both ratios are right to 10%",
    measured="{faster:.1f} times faster, {smaller:,.0f} times smaller",
    verdict=lambda f: verdict(
        abs(f["faster"] / 12 - 1) < 0.1 and abs(f["smaller"] / 2000 - 1) < 0.1
    ),
    tiny={},
)
def ratio_of_sram() -> Figures:
    sram_mb = A100_SM_KIB * A100_SMS * KIB / 1e6
    return {"faster": SRAM_BANDWIDTH / PEAK_BANDWIDTH["A100"], "smaller": 40_000 / sram_mb}


@claim(
    "guide",
    says="The hierarchy has 256 KB of registers, 20 MB of SRAM and 40 MB of L2.",
    criterion="all three sizes are those of the same thing (the whole A100)",
    measured="registers: {registers_sm} KB in one SM, {registers:.0f} MB in all; SRAM: "
    "{sram_sm} KB in "
    "one SM, {sram:.0f} MB in all",
    because="256 KB is one SM's, 20 MB the whole chip's. In fact the registers are the "
    "larger of the "
    "two. Its latencies were not tested.",
    verdict=lambda f: verdict(
        abs(f["registers"] / 0.256 - 1) < 0.1 and abs(f["sram"] / 20 - 1) < 0.1
    ),
    tiny={},
)
def hierarchy_of_the_guide() -> Figures:
    return {
        "registers_sm": REGISTER_BYTES // KIB,
        "registers": REGISTER_BYTES * A100_SMS / 1e6,
        "sram_sm": A100_SM_KIB,
        "sram": A100_SM_KIB * A100_SMS * KIB / 1e6,
    }


@claim(
    "guide",
    says="The latencies are about 1, 10, 30 and 200 cycles for registers, SRAM, L2 and the "
    "GPU's memory.",
    criterion="a pointer chase on an A100 gives them within a factor of 1.5",
    measured="not measured: the project has no probe of latencies",
    verdict=lambda f: NOT_TESTABLE,
    tiny={},
)
def latencies() -> Figures:
    return {}


@claim(
    "deep dive",
    says="A GPU has 48 KB of shared memory an SM, which tiles of 64 x 64 in float16 with their "
    "statistics just fit.",
    criterion="48 KB is what a thread block can have on some chip since the A100",
    measured="a block may have, in KB: {block}; {static} KB is what it gets without "
    "asking. Q, K and V "
    "tiles of 64 x 64 take {tiles:.0f} "
    "KB",
    because="48 KB is the default of a static allocation. Tiles that small leave most of the "
    "memory unused.",
    verdict=lambda f: verdict(f["static"] in f["block"].values()),
    tiny={},
    also="python -m scripts.plan model=gpt2 seq_len=8192 attention=naive,triton gpu=a100-40",
)
def forty_eight_kilobytes() -> Figures:
    return {
        "block": BLOCK_KIB,
        "static": BLOCK_DEFAULT_KIB,
        "tiles": 3 * torch.empty(64, 64, dtype=torch.float16, device="meta").nbytes / KIB,
    }


@claim(
    "guide",
    says="Blocks of 256 fit: 96 KB for d = 64 go into 20 MB, and 64 KB a tensor at d = 128 are "
    "safe on most GPUs.",
    criterion="Q, K and V tiles fit the shared memory of a thread block on every chip "
    "listed, and the "
    "float32 scores fit half the "
    "registers",
    measured="{d64:.0f} KB at d = 64 and {d128:.0f} KB at d = 128, where a block may have, in KB: "
    "{block}; the scores of 256 x 256 take "
    "{scores:.0f} KB, an SM's registers are {registers} KB",
    because="The 20 MB belong to 108 SMs; one thread block has one SM's share.",
    verdict=lambda f: verdict(
        max(f["d64"], f["d128"]) <= min(f["block"].values()) and f["scores"] <= f["registers"] / 2
    ),
    tiny={},
    also="python -m scripts.plan model=gpt2 seq_len=8192 attention=naive,triton gpu=a100-40",
)
def blocks_of_256() -> Figures:
    found = {
        f"d{d}": 3 * torch.empty(256, d, dtype=torch.float16, device="meta").nbytes / KIB
        for d in (64, 128)
    }
    scores = torch.empty(256, 256, device="meta").nbytes / KIB
    return found | {"block": BLOCK_KIB, "scores": scores, "registers": REGISTER_BYTES // KIB}
