"""The colours: one for each attention, on light and on dark paper."""

import json

from matplotlib.figure import Figure

from attention import BACKENDS as TABLE
from training.record.palette import BACKENDS, HUES, variant_colors, variant_places
from training.record.plot import draw_loss_curve


def test_every_attention_has_a_colour_and_a_dark_one():
    assert BACKENDS.keys() == TABLE.keys()
    assert len({light for light, _ in HUES}) == len({dark for _, dark in HUES}) == 12


def test_variants_of_one_attention_differ_and_the_first_keeps_its_colour():
    sizes = {f"no_rescale block_kv={size}": "no_rescale" for size in (8, 16, 32, 64)}
    colors = variant_colors({"tiled": "tiled", **sizes, "mine": "my_module:BACKEND"})
    assert len(set(colors.values())) == 6
    assert colors["tiled"] == BACKENDS["tiled"]
    assert colors["no_rescale block_kv=8"] == BACKENDS["no_rescale"]
    # the same in another figure
    assert variant_colors({"x": "my_module:BACKEND"})["x"] == colors["mine"]


def test_a_colour_comes_twice_only_after_all_others():
    many = {f"triton window={size}": "triton" for size in range(14)} | {"tiled": "tiled"}
    places = variant_places(many)
    assert sorted(places.values()) == list(range(15)) and places["tiled"] == 1
    # a user's own attention does not take the colour of a known one
    names = [f"mine_{number}:BACKEND" for number in range(11)]
    colors = variant_colors({name: name for name in [*names, "tiled"]})
    assert colors["tiled"] == BACKENDS["tiled"] and len(set(colors.values())) == 12


def test_a_loss_curve_has_the_colour_of_its_attention(tmp_path, monkeypatch):
    rows = [{"step": i, "tokens": i, "val/loss": 2.0, "val/loss_exact": 3.0} for i in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    draw_loss_curve(tmp_path, title="a run", attention="no_rescale")
    (figure,) = saved
    colors = {line.get_label(): line.get_color() for line in figure.axes[0].lines}
    assert colors["val/loss"] == BACKENDS["no_rescale"] != colors["val/loss_exact"]
