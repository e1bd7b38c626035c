"""`python -m scripts.plots`: what it draws from a benchmark's file, and that it draws nothing
else.
"""

import json
from pathlib import Path

import pytest

from scripts import plots

pytest.importorskip("matplotlib")
RESULTS = Path(__file__).resolve().parents[2] / "results"
HARDWARE = {
    "cpu": "some CPU",
    "torch_threads": 1,
    "gpu": "NVIDIA H200",
    "gpu_memory_gib": 139.8,
    "memory_gib": 120.0,
}
ENVIRONMENT = {"hardware": HARDWARE, "versions": {"torch": "2.11"}, "commit": "c0ffee0"}


SHAPE = {"head_dim": 64, "batch": 1, "heads": 16, "causal": True, "dtype": "bfloat16"}


def row(attention: str, seq_len: int, *, exponent: int = 1, **fields) -> dict:
    found = {"attention": attention, "seq_len": seq_len} | SHAPE
    for name, factor in (("forward", 1), ("backward", 3), ("training", 4)):
        seconds = factor * 1e-9 * seq_len**2
        found |= {f"{name}_bytes": factor * seq_len**exponent, f"{name}_seconds": seconds}
        found |= {f"{name}_p20": 0.9 * seconds, f"{name}_p80": 1.1 * seconds}
    return found | {"forward_tflops": 100.0, "backward_tflops": 80.0} | fields


def oom(attention: str, seq_len: int, asked_gib: float | None) -> dict:
    ended = {"asked_gib": asked_gib, "free_gib": 10.0, "total_gib": 139.8, "message": "no more"}
    return {"attention": attention, "seq_len": seq_len, "oom": ended} | SHAPE


ROWS = [row("naive", 1024, exponent=2), row("naive", 2048, exponent=2), oom("naive", 4096, 256.0)]
ROWS += [row("triton", n) for n in (1024, 2048, 4096)] + [
    row("sdpa:backend=flash", n) for n in (1024, 2048)
]
LONGEST = [
    {"attention": name, "pass": kind, "memory_gib": gib, "limited_by": limit}
    | {"max_seq_len": round(gib * 1000)}
    | SHAPE
    for name, limit in (("naive", "memory"), ("triton", "time"))
    for kind in ("forward", "training")
    for gib in (8.0, 24.0)
]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, by file name, with their axes still to look into."""
    found = {}
    monkeypatch.setattr(
        plots, "save_figure", lambda figure, path, dpi: found.setdefault(path.name, figure) and path
    )
    return found


def write(folder: Path, rows: list[dict], environment: dict = ENVIRONMENT) -> Path:
    path = folder / "bench.json"
    path.write_text(json.dumps({"environment": environment, "rows": rows}))
    return path


def lines(axes) -> dict[str, list[tuple[float, float]]]:
    """What is drawn with a name to it."""
    return {
        line.get_label(): list(zip(*line.get_data(), strict=True))
        for line in axes.lines
        if not line.get_label().startswith("_")
    }


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_memory_holds_what_was_measured_and_no_more(drawn, tmp_path):
    plots.draw(write(tmp_path, ROWS), tmp_path)
    (axes,) = drawn["bench_memory.png"].axes
    found = lines(axes)
    assert found["naive: N^2.00"] == [(1024, 4 * 1024**2 / 2**30), (2048, 4 * 2048**2 / 2**30)]
    assert found["triton: N^1.00"] == [(n, 4 * n / 2**30) for n in (1024, 2048, 4096)]
    assert len(found) == 3
    # the forward pass alone has no name
    unnamed = [list(line.get_ydata()) for line in axes.lines]
    assert [n / 2**30 for n in (1024, 2048, 4096)] in unnamed
    # where naive ran out: a square at what it asked for
    squares = [line.get_data() for line in axes.lines if line.get_marker() == "s"]
    assert ([4096], [256.0]) in [(list(x), list(y)) for x, y in squares]
    assert all(any(size in text for text in texts(axes)) for size in ("256 GiB", "139.8 GiB"))
    assert axes.get_yscale() == "log"


def test_curves_that_coincide_are_stripes_of_one_line():
    """A regression test: cuDNN's memory is ours, and its line hid ours."""
    one, same, other = {1024: 1.0, 2048: 2.0}, {1024: 1.01}, {1024: 3.0}
    assert plots.striped([one, other, same, {}]) == [(0, (6, 6)), "-", (6, (6, 6)), "-"]


def test_shapes_in_words():
    """A regression test: without a number of heads a title began with "of 64"."""
    rows = [row("naive", 1024, heads=heads) for heads in (8, 32)]
    assert plots.shape_words(rows[:1]).split(", ") == [
        "batch 1",
        "8 heads of 64",
        "bfloat16",
        "causal",
    ]
    assert ", heads of 64" in plots.shape_words(rows)


def test_time_and_speedup_are_against_the_baseline(drawn, tmp_path):
    rows = [*ROWS, row("flex", 2048, forward_seconds=1e-9 * 1024**2)]
    plots.draw(write(tmp_path, rows), tmp_path, baseline="triton")
    forward, backward, speedup = drawn["bench_time.png"].axes
    assert [*lines(forward)] == ["naive", "triton", "sdpa flash", "flex"]
    times = [(n, pytest.approx(3e-6 * n**2)) for n in (1024, 2048, 4096)]
    assert lines(backward)["triton"] == times
    assert "triton" in speedup.get_ylabel()
    assert lines(speedup)["flex"] == [(2048, pytest.approx(4.0))]
    assert lines(speedup)["naive"] == [(1024, 1.0), (2048, 1.0)]


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((1.0, 1.1), ["0.5", "1", "2"]),
        ((0.3, 8.0), ["0.5", "1", "2", "5"]),
        ((0.01, 1000.0), ["0.01", "0.1", "1", "10", "100", "1,000"]),
    ],
    ids=["narrow", "usual", "wide"],
)
def test_a_logarithmic_axis_has_plain_ticks(values, ticks):
    """A regression test: between two powers of ten no tick had a label."""
    figure, axes = plots.new_figure(size=(5.2, 4.3))
    axes.plot([1, 2], values)
    axes.set_yscale("log")
    plots.plain_ticks(axes.yaxis)
    figure.draw_without_rendering()
    low, high = axes.get_ylim()
    labels = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
    assert [label.get_text() for place, label in labels if low <= place <= high] == ticks
    assert not any(label.get_text() for label in axes.get_yticklabels(minor=True))


def test_roofline_has_the_ceilings_of_a_data_sheet_and_says_so(drawn, tmp_path):
    plots.draw(write(tmp_path, ROWS), tmp_path)
    (axes,) = drawn["bench_roofline.png"].axes
    found = lines(axes)
    assert found["data sheet"][1] == (pytest.approx(989 / 4.8), pytest.approx(989))
    assert all(any(peak in text for text in texts(axes)) for peak in ("4.8 TB/s", "989 TFLOP/s"))
    # a fused kernel does far more for a byte than naive attention
    assert min(x for x, _ in found["triton"]) > 20 * max(x for x, _ in found["naive"])
    assert all(y == 100 for name in ("naive", "triton", "sdpa flash") for _, y in found[name])


def test_an_unknown_chip_has_no_ceiling(drawn, tmp_path):
    hardware = HARDWARE | {"gpu": None, "gpu_memory_gib": None}
    plots.draw(write(tmp_path, ROWS, ENVIRONMENT | {"hardware": hardware}), tmp_path)
    assert "data sheet" not in lines(drawn["bench_roofline.png"].axes[0])
    assert not [text for text in texts(drawn["bench_memory.png"].axes[0]) if "card" in text]


def test_longest(drawn, tmp_path):
    plots.draw(write(tmp_path, LONGEST), tmp_path)
    assert list(drawn) == ["bench_longest.png"]
    forward, _ = drawn["bench_longest.png"].axes
    naive, triton = lines(forward)
    assert lines(forward)["naive"] == [(8.0, 8000), (24.0, 24000)]
    assert naive == "naive" and triton.startswith("triton, at least")


def test_a_broken_backend_is_marked(drawn, tmp_path):
    plots.draw(write(tmp_path, [*ROWS, row("no_max", 1024, broken=["large logits"])]), tmp_path)
    (name,) = (name for name in lines(drawn["bench_time.png"].axes[0]) if "no_max" in name)
    assert "wrong" in name


def test_nothing_measured_nothing_drawn(drawn, tmp_path):
    plots.main([str(write(tmp_path, [oom("naive", 4096, None)]))])
    assert not drawn


def test_the_committed_measurements_can_be_drawn(tmp_path):
    paths = plots.draw(RESULTS / "memory_h200.json", tmp_path)
    assert {path.stem for path in paths} == {
        f"memory_h200_{kind}" for kind in ("memory", "time", "roofline")
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["{folder}/absent.json"], "absent.json"),
        (["{folder}/text.json"], "text.json"),
        (["{folder}/bench.json", "baseline=flex"], "naive, triton"),
        (["{folder}/bench.json", "outt=x"], "out?"),
        (["out=x"], "a file"),
    ],
    ids=["absent", "no-benchmark", "baseline", "option", "no-file"],
)
def test_refused_in_one_line(arguments, named, tmp_path):
    write(tmp_path, ROWS)
    (tmp_path / "text.json").write_text("{}")
    with pytest.raises(SystemExit, match="^plots: ") as error:
        plots.main([argument.format(folder=tmp_path) for argument in arguments])
    assert named in error.value.code and "\n" not in error.value.code


def test_a_name_is_no_formula(tmp_path):
    """A regression test: matplotlib read mathematics in the name of a user's backend, and drew
    nothing.
    """
    rows = [row("mine:b$_{$", n) for n in (1024, 2048)]
    path = write(tmp_path, rows, ENVIRONMENT | {"commit": "$\\frac{$"})
    assert [each.stem for each in plots.draw(path, tmp_path)] == ["bench_memory", "bench_time"]
