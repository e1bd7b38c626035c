"""The colours of every figure: one for each attention, the same in a run's loss curve, a sweep's
report and the README.

Most are those of Okabe and Ito, which every kind of colour vision tells apart.
"""

from collections import Counter
from collections.abc import Mapping
from zlib import crc32

INK, VERMILION = "#1c1c1e", "#d55e00"
ON_DARK = 0.35  # share of white mixed into a colour on a dark background

BACKENDS = {
    "triton": "#0072b2",
    "tiled": "#009e73",
    "sdpa": "#56b4e9",
    "flex": "#e69f00",
    "naive": "#8a8a8a",
    "alpha_beta": "#44aa99",
    "normalized_acc": "#999933",
    "kv_outer": "#4b5fb8",
    "lazy_rescale": "#2e8b2e",
    "no_rescale": VERMILION,
    "no_max": "#cc79a7",
    "local_softmax": "#7a5cc4",
    "zero_init_max": "#b03060",
    "relative_mask": "#9c5a2d",
    "no_scale": "#b8860b",
}
# a user's own attention has one of these, always the same
OTHERS = ("#00868b", "#a0522d", "#c71585", "#556b2f", "#6a5acd")
# share of white (of black, if negative) in the colours of the variants of one attention
SHADES = (0.0, -0.45, 0.35, -0.25, 0.2)


def attention_color(name: str) -> str:
    return BACKENDS.get(name) or OTHERS[crc32(name.encode()) % len(OTHERS)]


def variant_colors(variants: Mapping[str, str]) -> dict[str, str]:
    """A colour for each variant, given {variant: attention}. The first variant of an attention has
    the attention's colour, the others have shades of it.
    """
    colors: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for variant, attention in variants.items():
        color = attention_color(attention)
        colors[variant] = mixed(color, SHADES[seen[color] % len(SHADES)])
        seen[color] += 1
    return colors


def mixed(color: str, share: float) -> str:
    """The colour mixed with a share of white, or of black if the share is negative."""
    goal = 255 if share > 0 else 0
    parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + abs(share) * (goal - part)):02x}" for part in parts)
