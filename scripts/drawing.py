"""Helpers for the figures of scripts/ and lab/: draw without a screen, write only whole files."""

from pathlib import Path

from training.record.plot import new_figure as new_figure
from training.record.plot import save_figure as save_figure

# CSS's invert(1) hue-rotate(180deg), with black replaced by the background of GitHub's dark pages
HUES = ((-0.574, 1.43, 0.144), (0.426, 0.43, 0.144), (0.426, 1.43, -0.856))
DARK_PAPER = (13 / 255, 17 / 255, 23 / 255)


def for_both_papers(path: Path) -> None:
    """Write the picture again for dark pages, as NAME_dark.png: light and dark swap, the hues stay.
    Both files get a palette, which makes them small.
    """
    import numpy as np
    from PIL import Image

    light = Image.open(path).convert("RGB")
    colors = np.clip((1 - np.asarray(light) / 255) @ np.array(HUES).T, 0, 1)
    paper = np.array(DARK_PAPER)
    dark = Image.fromarray((255 * (paper + (1 - paper) * colors)).round().astype(np.uint8))
    for image, name in ((light, path.stem), (dark, f"{path.stem}_dark")):
        small = image.quantize(128, dither=Image.Dither.NONE)
        small.save(path.with_stem(name), optimize=True)
