"""The colors of every figure: those of Okabe and Ito, which every kind of color vision tells apart,
without the yellow that vanishes on white.
"""

BLUE, ORANGE, GREEN, PINK = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
VERMILION, SKY, GRAY, VIOLET = "#d55e00", "#56b4e9", "#8a8a8a", "#7a5cc4"

# what stands for each of them on dark paper
ON_DARK = {
    BLUE: "#4aa8e0",
    ORANGE: "#f0b840",
    GREEN: "#2cc79b",
    PINK: "#e39cc4",
    VERMILION: "#f08040",
    SKY: "#8fd0f5",
    GRAY: "#b4b4b4",
    VIOLET: "#a993ea",
}
BACKENDS = {
    "triton": BLUE,
    "tiled": GREEN,
    "sdpa": SKY,
    "flex": ORANGE,
    "naive": GRAY,
    "no_rescale": VERMILION,
    "no_max": PINK,
}
OTHER_BACKENDS = (VIOLET, "#882255", "#999933", "#44aa99")
