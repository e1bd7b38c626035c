"""Claims about the bytes of tensors, counted on PyTorch's meta device."""

import torch

from lab.claims.claim import FAILS, HOLDS, Figures, claim, only_if, verdict

MIB, GIB = 2**20, 2**30


def nbytes(*shape: int, dtype: torch.dtype = torch.float16) -> int:
    """Bytes of a tensor of that shape, without making it."""
    return torch.empty(shape, dtype=dtype, device="meta").nbytes


@claim(
    "chapter, notebook",
    says="At 4,096 tokens the score table has about 16.8 million entries a head, 33 MB in float16.",
    criterion="the entries round to 16.8 million and the bytes lie between 33 and 34 MB",
    measured="{entries:,} entries, {megabytes:.2f} MB",
    verdict=lambda f: verdict(round(f["entries"] / 1e6, 1) == 16.8 and int(f["megabytes"]) == 33),
    tiny={},
)
def score_table() -> Figures:
    return {
        "entries": torch.empty(4096, 4096, device="meta").numel(),
        "megabytes": nbytes(4096, 4096) / 1e6,
    }


@claim(
    "chapter",
    says="With 2 sequences, 8 heads, 4,096 tokens and float16, each score tensor takes 1 GB.",
    criterion="between 0.95 and 1.1 GB (either unit)",
    measured="{float16:.2f} GiB; {float32:.2f} GiB in float32",
    because="It is 1 GiB in float32, or for scores and weights together.",
    verdict=lambda f: (
        verdict(0.95 <= f["float16"] <= 1.1)
        if f["float16"] >= 0.95
        else only_if("it is float32")
        if 0.95 <= f["float32"] <= 1.1
        else FAILS
    ),
    tiny={},
)
def one_gigabyte() -> Figures:
    shape = (2, 8, 4096, 4096)
    return {"float16": nbytes(*shape) / GIB, "float32": nbytes(*shape, dtype=torch.float32) / GIB}


@claim(
    "chapter",
    says="With 8 sequences and 8 heads in float16, a layer's scores take 128 MB at 1,024 tokens "
    "and 2 GB at 4,096; six layers 12 GB.",
    criterion="all three, as MiB and GiB",
    measured="{short:.0f} MiB, {long:.0f} GiB, {layers:.0f} GiB",
    because="If one of scores and weights is kept a layer, as training does.",
    verdict=lambda f: verdict((f["short"], f["long"], f["layers"]) == (128, 2, 12)),
    tiny={},
)
def scores_of_a_model() -> Figures:
    long = nbytes(8, 8, 4096, 4096) / GIB
    return {"short": nbytes(8, 8, 1024, 1024) / MIB, "long": long, "layers": 6 * long}


@claim(
    "deep dive",
    says="At 8,192 tokens in float16 S takes 128 MB a head; 32 heads, 32 layers and 32 sequences "
    "of S and P 8 TB; one head with 32 "
    "sequences at 32,768 tokens 128 GB.",
    criterion="all three, as MiB, TiB and GiB",
    measured="{head:.0f} MiB, {model:.0f} TiB, {long:.0f} GiB",
    because="The layers only add up in training, which keeps them all.",
    verdict=lambda f: verdict((f["head"], f["model"], f["long"]) == (128, 8, 128)),
    tiny={},
)
def eight_terabytes() -> Figures:
    head = nbytes(8192, 8192)
    return {
        "head": head / MIB,
        "model": 2 * head * 32**3 / 2**40,
        "long": 2 * nbytes(32, 32768, 32768) / GIB,
    }


@claim(
    "deep dive",
    says="At 1,024 tokens, d = 64 and blocks of 32 in float32: standard 8.25 MB, statistics 16 KB, "
    "tiled 280 KB in all, 30 times less; at "
    "4,096 tokens 130 MB against 1.1 MB.",
    criterion="every figure is right to 10%",
    measured="standard {standard:.2f} MiB, statistics {statistics:.0f} KiB, tiled {tiled:.0f} KiB, "
    "{ratio:.0f} times less; at 4,096 tokens "
    "{standard_4096:.0f} MiB against {tiled_4096:.2f} MiB",
    because="16 KB of statistics are two float64 numbers a row; the table says float32.",
    verdict=lambda f: (
        HOLDS
        if table_is_right(f) and abs(f["statistics"] / 16 - 1) < 0.1
        else only_if("the statistics are float64")
        if table_is_right(f) and f["statistics"] == 8
        else FAILS
    ),
    tiny={},
)
def memory_table_of_the_deep_dive() -> Figures:
    def standard(length: int) -> int:
        return 2 * nbytes(length, length, dtype=torch.float32) + nbytes(
            length, 64, dtype=torch.float32
        )

    def statistics(length: int) -> int:
        return 2 * nbytes(length, dtype=torch.float32)

    def tiled(length: int) -> int:
        return (
            2 * nbytes(32, 32, dtype=torch.float32)
            + statistics(length)
            + nbytes(length, 64, dtype=torch.float32)
        )

    return {
        "standard": standard(1024) / MIB,
        "statistics": statistics(1024) / 1024,
        "tiled": tiled(1024) / 1024,
        "ratio": standard(1024) / tiled(1024),
        "standard_4096": standard(4096) / MIB,
        "tiled_4096": tiled(4096) / MIB,
    }


def table_is_right(f: Figures) -> bool:
    wanted = {"standard": 8.25, "tiled": 280, "ratio": 30, "standard_4096": 130, "tiled_4096": 1.1}
    return all(abs(f[name] / value - 1) < 0.1 for name, value in wanted.items())


@claim(
    "guide",
    says="At 100,000 tokens the attention matrix of a head takes 20 GB in float16, flash "
    "attention 12 MB.",
    criterion="20 GB and 12 MB to 10%",
    measured="{matrix:.0f} GB; one tensor of q, k, v or out {tensor:.1f} MB, the four together "
    "{four:.1f} MB",
    because="12.8 MB is one of the four tensors.",
    verdict=lambda f: (
        only_if("one of q, k, v and out is counted")
        if abs(f["tensor"] / 12 - 1) < 0.1 < abs(f["four"] / 12 - 1)
        else verdict(abs(f["four"] / 12 - 1) < 0.1)
    ),
    tiny={},
)
def hundred_thousand_tokens() -> Figures:
    tensor = nbytes(100_000, 64) / 1e6
    return {"matrix": nbytes(100_000, 100_000) / 1e9, "tensor": tensor, "four": 4 * tensor}
