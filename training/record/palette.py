"""The colours of every figure: one for each attention, the same in a run's loss curve, a sweep's
report and the README.

Most are those of Okabe and Ito, which every kind of colour vision tells apart.
"""

from collections.abc import Mapping
from itertools import count
from zlib import crc32

INK, VERMILION = "#1c1c1e", "#d55e00"
# on white, and on black; nobody tells more of them apart
HUES = (
    ("#0072b2", "#4a9ff5"),
    ("#009e73", "#2fc899"),
    ("#56b4e9", "#a3dcff"),
    ("#e69f00", "#f5bd3d"),
    ("#8a8a8a", "#9aa3ad"),
    (VERMILION, "#ff8142"),
    ("#cc79a7", "#f5a3cf"),
    ("#7a5cc4", "#a68af5"),
    ("#b03060", "#ff6688"),
    ("#8a4f24", "#b5835a"),
    ("#7d8f00", "#b9e04a"),
    (INK, "#f4f5f7"),
)
# the place in HUES of each attention; what is seldom compared shares one
HOMES = {
    "triton": 0,
    "tiled": 1,
    "sdpa": 2,
    "flex": 3,
    "naive": 4,
    "no_rescale": 5,
    "no_max": 6,
    "local_softmax": 7,
    "zero_init_max": 8,
    "relative_mask": 9,
    "no_scale": 10,
    "alpha_beta": 10,
    "normalized_acc": 9,
    "kv_outer": 8,
    "lazy_rescale": 7,
}
BACKENDS = {name: HUES[home][0] for name, home in HOMES.items()}


def home_of(attention: str) -> int:
    """The place in HUES of an attention; a user's own has always the same."""
    # no attention's home is the ink of val/loss_exact
    return HOMES.get(attention, crc32(attention.encode(errors="replace")) % (len(HUES) - 1))


def attention_color(name: str) -> str:
    return HUES[home_of(name)][0]


def variant_places(variants: Mapping[str, str]) -> dict[str, int]:
    """A place in HUES for each variant, given {variant: attention}; past its end it begins anew.

    The first variant of an attention has its home, and the others what is free. Of two attentions
    with one home, the one that is no user's own has it, or else the first.
    """
    homes: dict[int, str] = {}
    for variant in sorted(variants, key=lambda name: variants[name] not in HOMES):
        homes.setdefault(home_of(variants[variant]), variant)
    places = {variant: place for place, variant in homes.items()}
    free = (place for place in count() if place not in homes)
    return {name: places[name] if name in places else next(free) for name in variants}


def variant_colors(variants: Mapping[str, str]) -> dict[str, str]:
    """The colour of each variant on white, given {variant: attention}."""
    places = variant_places(variants)
    return {variant: HUES[place % len(HUES)][0] for variant, place in places.items()}
