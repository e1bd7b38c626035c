"""The comparison page, from fabricated sweeps: whole ones, broken ones, and none."""

import base64
import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from scripts import compare

ROOT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG\r\n\x1a\n"

pytest.importorskip("matplotlib")


def write_run(
    folder: Path,
    attention: str,
    *,
    seq_len: int = 256,
    seed: int = 0,
    status: str = "completed",
    fingerprint: str = "corpus-1",
    extra: tuple[str, ...] = (),
    accuracy: bool = False,
    **summary,
) -> Path:
    """A run directory as training leaves it, with a loss that falls from 5.5."""
    folder.mkdir(parents=True)
    last = {"completed": 600, "diverged": 260, "oom": 0}[status]
    rows = []
    for step in range(0, last, 20):
        loss = 1.5 + 4 * math.exp(-step / 150) + 0.01 * seed
        rows.append({"step": step, "tokens": step * 16 * seq_len, "train/loss": loss if step < 240 or status == "completed" else None})
        if step % 100 == 0:
            rows[-1] |= {"val/loss": loss, "val/loss_exact": loss + (0.5 if attention == "no_rescale" else 0)}
            rows[-1] |= {"val/accuracy": 0.7, "val/accuracy_exact": 0.6} if accuracy else {}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = (
        {}
        if status == "oom"
        else {"tokens_per_sec": 1000.0 + seed, "memory/peak_gib": (seq_len / 1024) ** 2, "val/loss": 1.6, "val/loss_exact": 1.6}
    )
    summary = {
        "status": status,
        "attention": attention,
        "seq_len": seq_len,
        "seed": seed,
        "defect": attention in ("no_max", "no_rescale"),
        "overrides": [f"attention={attention}", f"seq_len={seq_len}", f"seed={seed}", *extra],
        **figures,
        **summary,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    env = {
        "commit": "c0ffee",
        "dirty": False,
        "data_fingerprint": fingerprint,
        "versions": {"torch": "2.13"},
        "hardware": {"cpu": "some CPU", "gpu": None},
    }
    (folder / "env.json").write_text(json.dumps(env))
    return folder


class Page(HTMLParser):
    """Every address that the page would load, its images, and its text."""

    def __init__(self, path: Path):
        super().__init__()
        self.addresses, self.images, self.text = [], [], ""
        self.open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == [], "unclosed tags"

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "img", "source", "br"):
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "srcset"):
                self.addresses.append(value)
            if tag == "img" and name == "src":
                self.images.append(base64.b64decode(value.removeprefix("data:image/png;base64,")))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data + "\n"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Two lengths, two seeds, a defect that diverges, naive out of memory; compared once for several tests."""
    folder = tmp_path_factory.mktemp("sweep")
    job = 0
    for attention in ("naive", "tiled", "no_max", "no_rescale"):
        for seq_len in (256, 512):
            for seed in (0, 1):
                status = {("naive", 512): "oom", ("no_max", 512): "diverged"}.get((attention, seq_len), "completed")
                remark = {
                    "oom": {"oom": {"message": "CUDA out of memory"}},
                    "diverged": {"first_bad_step": 240, "diagnosis": "inf in layer <2>"},
                }
                write_run(folder / str(job), attention, seq_len=seq_len, seed=seed, status=status, accuracy=True, **remark.get(status, {}))
                job += 1
    assert compare.main([str(folder)]) == 0
    return folder


def test_files(sweep):
    written = {path.name: path.read_bytes() for path in (sweep / "compare").iterdir()}
    assert set(written) == {"loss.png", "accuracy.png", "memory.png", "throughput.png", "index.html", "compare.json"}
    assert all(content.startswith(PNG) and len(content) > 10_000 for name, content in written.items() if name.endswith(".png"))


def test_page_is_self_contained(sweep):
    page = Page(sweep / "compare/index.html")
    assert len(page.images) == 4 and all(image.startswith(PNG) for image in page.images)
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    html = (sweep / "compare/index.html").read_text()
    assert not re.search(r"https?:|@import|<script|url\(", html)
    assert "prefers-color-scheme: dark" in html and "width=device-width" in html


def test_page_tells_results_and_provenance(sweep):
    text = Page(sweep / "compare/index.html").text
    for fact in ("no_rescale", "oom", "diverged", "CUDA out of memory", "inf in layer <2>", "c0ffee", "some CPU", "torch 2.13", "corpus-1"):
        assert fact in text
    # 14 runs of 16 completed or are results: nothing to warn of
    assert "unfinished" not in text and "fingerprint is the same" not in text


def test_json_holds_what_was_drawn(sweep):
    drawn = json.loads((sweep / "compare/compare.json").read_text())
    assert len(drawn["runs"]) == 16
    run = next(run for run in drawn["runs"] if (run["variant"], run["seq_len"], run["seed"]) == ("no_rescale", 256, 1))
    on_disk = [json.loads(line) for line in (Path(run["dir"]) / "metrics.jsonl").read_text().splitlines()]
    for metric in compare.CURVES:
        assert run["curves"][metric] == [[row["tokens"], row[metric]] for row in on_disk if metric in row]


def lines_of(axes) -> list[dict]:
    return [
        {
            "color": line.get_color(),
            "style": line.get_linestyle(),
            "x": list(line.get_xdata()),
            "y": list(line.get_ydata()),
            "marker": line.get_marker(),
        }
        for line in axes.get_lines()
    ]


def test_loss_figure(sweep):
    runs = compare.load_runs([sweep])
    styles = compare._styles(runs)
    figure = compare.draw_curves(runs, styles, compare.LIGHT, "val/loss", "train/loss")
    (own, exact), (own_long, exact_long) = (figure.axes[:2], figure.axes[2:])
    defects = {styles[name].color for name in ("no_max", "no_rescale")}
    assert len({style.color for style in styles.values()}) == 4
    for axes in (exact, exact_long):
        assert all((line["style"] != "-") == (line["color"] in defects) for line in lines_of(axes))
    # each of two seeds as a thin line, and their mean
    mine = [line for line in lines_of(exact) if line["color"] == styles["no_rescale"].color]
    assert len(mine) == 3
    assert mine[2]["y"] == pytest.approx([(a + b) / 2 for a, b in zip(mine[0]["y"], mine[1]["y"], strict=True)])
    # the two runs of no_max at 512 end in a cross at their last finite value, step 220
    crosses = [line for line in lines_of(own_long) if line["marker"] == "X"]
    assert [line["x"] for line in crosses] == [[220 * 16 * 512]] * 2
    assert {line["color"] for line in crosses} == {styles["no_max"].color}
    assert not [line for line in lines_of(own) if line["marker"] == "X"]


def test_a_diverging_curve_does_not_stretch_the_figure(tmp_path):
    run = write_run(tmp_path / "0", "no_max", status="diverged")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[11]["train/loss"] = 1e6
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = compare.load_runs([tmp_path])
    axes = compare.draw_curves(runs, compare._styles(runs), compare.LIGHT, "val/loss", "train/loss").axes[0]
    low, high = axes.get_ylim()
    assert 2 < low < 2.5 and 5.5 < high < 6.5
    (cross,) = [line for line in lines_of(axes) if line["marker"] == "X"]
    assert low < cross["y"][0] <= high


def test_memory_figure(sweep):
    runs = compare.load_runs([sweep])
    styles = compare._styles(runs)
    (axes,) = compare.draw_memory(runs, styles, compare.LIGHT).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    by_color = {line["color"]: line for line in lines_of(axes) if line["marker"] != "X"}
    assert by_color[styles["tiled"].color]["x"] == [256, 512]
    assert by_color[styles["tiled"].color]["y"] == [0.0625, 0.25]
    assert by_color[styles["naive"].color]["x"] == [256]
    (cross,) = [line for line in lines_of(axes) if line["marker"] == "X"]
    assert cross["color"] == styles["naive"].color and cross["x"] == [512]


def test_variants_name_only_what_differs(tmp_path):
    write_run(tmp_path / "0", "tiled", extra=("attention.block_kv=16", "steps=5"))
    write_run(tmp_path / "1", "tiled", seed=1, extra=("attention.block_kv=32", "steps=5"))
    assert [run.variant for run in compare.load_runs([tmp_path])] == ["tiled block_kv=16", "tiled block_kv=32"]


def test_runs_too_short_for_a_curve_have_no_loss_figure(tmp_path):
    for job, seq_len in enumerate((256, 512)):
        run = write_run(tmp_path / str(job), "tiled", seq_len=seq_len)
        (run / "metrics.jsonl").write_text("".join(line + "\n" for line in (run / "metrics.jsonl").read_text().splitlines()[:2]))
    assert compare.main([str(tmp_path)]) == 0
    assert sorted(path.name for path in (tmp_path / "compare").glob("*.png")) == ["memory.png", "throughput.png"]


def test_a_run_given_twice_counts_once(tmp_path):
    write_run(tmp_path / "0", "tiled")
    assert len(compare.load_runs([tmp_path, tmp_path / "0"])) == 1


def test_different_corpora_are_warned_of(tmp_path):
    write_run(tmp_path / "0", "tiled")
    write_run(tmp_path / "1", "naive", fingerprint="corpus-2")
    assert compare.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    text = Page(tmp_path / "out/index.html").text
    assert "2 different corpora" in text
    # one length has no memory figure over lengths
    assert not (tmp_path / "out/memory.png").exists()
    assert not (tmp_path / "compare").exists()


def test_broken_runs_are_told_and_the_rest_is_drawn(tmp_path):
    write_run(tmp_path / "0", "tiled")
    for job, content in {"1": {}, "2": {"metrics.jsonl": ""}, "3": {"summary.json": '{"status": "comp', "env.json": "{"}}.items():
        (tmp_path / job).mkdir()
        for name, text in ({"config.yaml": "attention: {name: naive}\n"} | content).items():
            (tmp_path / job / name).write_text(text)
    (tmp_path / "4").mkdir()
    (tmp_path / "4/summary.json").write_text(json.dumps({"status": "failed", "error": "no such <corpus>", "attention": "flex"}))
    assert compare.main([str(tmp_path)]) == 0
    page = Page(tmp_path / "compare/index.html")
    assert "unfinished: 3 of 5 runs" in page.text and "failed: 1 of 5 runs" in page.text and "no such <corpus>" in page.text
    assert len(page.images) == 2


@pytest.mark.parametrize("status", ["oom", "failed"])
def test_a_sweep_without_a_figure_still_has_its_page(tmp_path, status):
    for job in range(2):
        (tmp_path / str(job)).mkdir()
        (tmp_path / str(job) / "summary.json").write_text(json.dumps({"status": status, "attention": "naive", "seq_len": 2**job}))
    assert compare.main([str(tmp_path)]) == 0
    assert status in Page(tmp_path / "compare/index.html").text


def test_a_figure_of_an_earlier_comparison_is_removed(tmp_path):
    write_run(tmp_path / "0", "tiled")
    (tmp_path / "compare").mkdir()
    (tmp_path / "compare/memory.png").write_bytes(PNG)
    assert compare.main([str(tmp_path)]) == 0
    assert not (tmp_path / "compare/memory.png").exists()


def test_without_runs_it_is_one_line_and_exit_code_2(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert compare.main([str(folder)]) == 2
        printed = capsys.readouterr()
        (line,) = printed.err.splitlines()
        assert str(folder) in line and printed.out == ""
    assert not list(tmp_path.iterdir())


def test_help_shows_a_command_that_runs(tmp_path):
    write_run(tmp_path / "multirun/a/0", "tiled")
    done = subprocess.run([sys.executable, "-m", "scripts.compare", "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    example = re.search(r"example: python (-m scripts\.compare .*)", done.stdout)[1]
    command = [sys.executable, *example.replace("multirun/*", "multirun/a").split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "comparison/index.html").exists()
