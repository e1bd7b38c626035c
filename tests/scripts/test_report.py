"""The report, from fabricated sweeps: whole ones, broken ones, and none."""

import io
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from scripts.report import figures, sections
from scripts.report.__main__ import main
from scripts.report.drawing import VARIABLES, variant_styles
from scripts.report.page import Table
from scripts.report.ranking import rank
from scripts.report.runs import load_runs
from scripts.report.sections import provenance, variant_table
from tests import processes
from training.palette import BACKENDS

ROOT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG\r\n\x1a\n"
ENV = {
    "commit": "c0ffee",
    "dirty": False,
    "data_fingerprint": "corpus-1",
    "versions": {"torch": "2.13"},
    "hardware": {"cpu": "some CPU", "gpu": None},
}

DIAGNOSIS = {"message": "inf in layer <2>", "step": 240, "history": [[220, 11.0], [240, 12.0]]}

matplotlib = pytest.importorskip("matplotlib")


def write_run(
    folder: Path,
    attention: str,
    *,
    seq_len: int = 256,
    seed: int = 0,
    status: str = "completed",
    env: dict | None = None,
    extra: tuple[str, ...] = (),
    accuracy: bool = False,
    **summary,
) -> Path:
    """A run directory as training leaves it, with a loss that falls from 5.5."""
    folder.mkdir(parents=True)
    last = {"completed": 600, "interrupted": 300, "diverged": 260, "oom": 0}[status]
    rows = []
    for step in range(0, last, 20):
        loss = 1.5 + 4 * math.exp(-step / 150) + 0.01 * seed
        rows.append(
            {
                "step": step,
                "tokens": step * 16 * seq_len,
                "train/loss": loss if step < 240 or status != "diverged" else None,
            }
        )
        rows[-1] |= {"attention/max_score": 0.05 * (step + 1), "lr": 1e-3}
        rows[-1] |= {"seconds": step / 10, "tokens_per_sec": 400.0, "step_tokens_per_sec": 1000.0}
        if step % 40 == 0:
            rows[-1] |= {
                "val/loss": loss,
                "val/loss_exact": loss + (0.5 if attention == "no_rescale" else 0),
            }
            rows[-1] |= {"val/accuracy": 0.7, "val/accuracy_exact": 0.6} if accuracy else {}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gap = 0.5 if attention == "no_rescale" else 0.0
    figures_ = {
        "tokens_per_sec": 400.0 + seed,
        "step_tokens_per_sec": 1000.0 + seed,
        "memory/peak_gib": (seq_len / 1024) ** 2,
    }
    figures_ |= {"val/loss": 1.6, "val/loss_exact": 1.6 + gap}
    summary = {
        "status": status,
        "attention": attention,
        "seq_len": seq_len,
        "seed": seed,
        "steps_done": last,
        "defect": attention in ("no_max", "no_rescale"),
        "overrides": [f"attention={attention}", f"seq_len={seq_len}", f"seed={seed}", *extra],
        **(figures_ if status != "oom" else {}),
        **summary,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "env.json").write_text(json.dumps(ENV | (env or {})))
    return folder


class Page(HTMLParser):
    """Every address that the page would load, its ids, its tables and its text."""

    def __init__(self, path: Path):
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.addresses, self.ids, self.labels, self.headings, self.tags, self.text = (
            [],
            [],
            [],
            [],
            set(),
            "",
        )
        self.open: list[str] = []
        self.feed(self.html)
        self.close()
        assert self.open == [], "unclosed tags"

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "srcset"):
                self.addresses.append(value)
            if name == "id":
                self.ids.append(value)
            if name == "aria-label":
                self.labels.append(value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "h2" in self.open[-1:]:
            self.headings.append(data)
        if self.open[-1:] != ["style"]:
            self.text += data + "\n"


def report_on(folder: Path, *arguments: str) -> Page:
    main([str(folder), *arguments])
    return Page(folder / "report.html")


def rows_of(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.head, row, strict=True)) for row in table.rows]


def variants_of(folder: Path) -> list[dict[str, str]]:
    runs = load_runs([folder])
    return rows_of(variant_table(runs, rank(runs)))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Two lengths, two seeds, a defect that diverges, naive out of memory; reported on once for
    several tests.
    """
    folder = tmp_path_factory.mktemp("sweep")
    job = 0
    for attention in ("naive", "tiled", "no_max", "no_rescale"):
        for seq_len in (256, 512):
            for seed in (0, 1):
                status = {("naive", 512): "oom", ("no_max", 512): "diverged"}.get(
                    (attention, seq_len), "completed"
                )
                remark = {
                    "oom": {
                        "oom": {
                            "asked_gib": 64.0,
                            "free_gib": 8.5,
                            "predicted_gib": 70.25,
                            "message": "CUDA out of memory",
                        }
                    },
                    "diverged": {"first_bad_step": 240, "diagnosis": DIAGNOSIS},
                }
                write_run(
                    folder / str(job),
                    attention,
                    seq_len=seq_len,
                    seed=seed,
                    status=status,
                    accuracy=True,
                    **remark.get(status, {}),
                )
                job += 1
    main([str(folder)])
    return folder


def test_files(sweep):
    assert {path.name for path in sweep.iterdir() if not path.name.isdecimal()} == {"report.html"}


def test_page_is_self_contained(sweep):
    page = Page(sweep / "report.html")
    # two lengths, losses and accuracies; two cards; two costs; max_score at two lengths
    assert len(page.labels) == 4 + 4 + 2 + 2 + 2
    # what a figure refers to lies inside the page, and no two figures share a name
    assert page.addresses and {address.removeprefix("#") for address in page.addresses} <= set(
        page.ids
    )
    assert len(page.ids) == len(set(page.ids))
    assert {found for found in re.findall(r"url\(#(.*?)\)", page.html)} <= set(page.ids)
    assert not re.search(r"@import|<script|url\((?!#)", page.html)
    # the names of SVG's own vocabularies are no addresses
    assert not re.search(r"https?://(?!www\.w3\.org/)", page.html)
    assert (
        "prefers-color-scheme: dark" in page.html
        and "@media print" in page.html
        and "width=device-width" in page.html
    )


def test_figures_follow_the_page_from_light_to_dark(sweep):
    page = Page(sweep / "report.html")
    svg = page.html[page.html.index("<svg") :]
    # letters are text, and every colour of ours is one of the page's variables
    assert "seq_len=512" in page.text and "var(--ink)" in svg and "var(--c-d55e00)" in svg
    assert not re.search(r"(fill|stroke): #(?!000000)|" + "|".join(VARIABLES), svg)
    used = set(re.findall(r"var\((--[\w-]+)\)", page.html))
    # --share is set cell by cell
    assert used - {"--share"} <= set(re.findall(r"(--[\w-]+):", page.html))


def test_page_tells_results_and_provenance(sweep):
    text = Page(sweep / "report.html").text
    for fact in (
        "no_rescale",
        "diverged",
        "CUDA out of memory",
        "64.00 GiB",
        "8.50 GiB",
        "70.25 GiB",
        "inf in layer <2>",
        "c0ffee",
    ):
        assert fact in text
    assert "cpu some CPU" in text and "torch 2.13" in text and "corpus-1" in text
    assert "16 runs of 4 variants and 2 seeds: 12 completed, 2 oom, 2 diverged" in text
    # all runs completed or are results: nothing to warn of
    assert "different" not in text and "Not completed" not in text


def test_means_over_seeds(sweep):
    rows = variants_of(sweep)
    row = next(row for row in rows if (row["variant"], row["seq_len"]) == ("no_rescale", "512"))
    assert row["runs"] == "2 completed" and row["steps"] == "600"
    assert (row["own val/loss"], row["val/loss_exact"], row["beside baseline"]) == (
        "1.600 ± 0.000",
        "2.100 ± 0.000",
        "+0.500",
    )
    # 400 and 401, 1000 and 1001: standard deviation 0.7
    assert (row["tokens/s"], row["steps alone"], row["peak GiB"]) == (
        "400 ± 1",
        "1,000 ± 1",
        "0.25 ± 0",
    )
    # what diverged or ran out of memory has no mean
    dead = [row for row in rows if row["runs"] in ("2 oom", "2 diverged")]
    assert len(dead) == 2 and {row["own val/loss"] for row in dead} == {
        row["peak GiB"] for row in dead
    } == {"-"}


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


def axes_of(panels: list) -> list:
    return [figure.axes[0] for figure in panels]


def bands_of(axes) -> dict[str, list[tuple[float, float, float]]]:
    """By colour: x, lowest and highest of every band."""
    from matplotlib.colors import to_hex

    bands = {}
    for band in axes.collections:
        heights: dict[float, list[float]] = {}
        for x, y in band.get_paths()[0].vertices:
            heights.setdefault(float(x), []).append(float(y))
        bands[to_hex(band.get_facecolor()[0])] = [
            (x, min(ys), max(ys)) for x, ys in sorted(heights.items())
        ]
    return bands


def test_loss_figure(sweep):
    runs = load_runs([sweep])
    styles = variant_styles(runs)
    panels = axes_of(figures.draw_curves(runs, styles, "val/loss", "train/loss"))
    own, exact, own_long, exact_long = panels
    defects = {styles[name].color for name in ("no_max", "no_rescale")}
    assert len({style.color for style in styles.values()}) == 4
    for axes in (exact, exact_long):
        assert all((line["style"] != "-") == (line["color"] in defects) for line in lines_of(axes))
    # the mean of two seeds, and between them the band
    color = styles["no_rescale"].color
    (mean,) = [
        line for line in lines_of(exact) if line["color"] == color and line["marker"] != "None"
    ]
    low, high = (
        list(run.curve("val/loss_exact").values())
        for run in runs
        if run.variant == "no_rescale" and run.seq_len == 256
    )
    assert mean["y"] == pytest.approx([(a + b) / 2 for a, b in zip(low, high, strict=True)])
    band = bands_of(exact)[color]
    assert [x for x, _, _ in band] == mean["x"]
    assert [y for _, y, _ in band] == pytest.approx(low) and [
        y for _, _, y in band
    ] == pytest.approx(high)
    # the two runs of no_max at 512 end in a cross at their last finite value, step 240 of val/loss
    crosses = [line for line in lines_of(own_long) if line["marker"] == "X"]
    assert [line["x"] for line in crosses] == [[240 * 16 * 512]] * 2
    assert {line["color"] for line in crosses} == {styles["no_max"].color}
    assert not [line for line in lines_of(own) if line["marker"] == "X"]


def test_a_mean_ends_where_the_first_seed_does(tmp_path):
    write_run(tmp_path / "0", "tiled")
    write_run(tmp_path / "1", "tiled", seed=1)
    write_run(tmp_path / "2", "tiled", seed=2, status="interrupted")
    runs = load_runs([tmp_path])
    styles = variant_styles(runs)
    _, exact = axes_of(figures.draw_curves(runs, styles, "val/loss", "train/loss"))
    last = 280 * 16 * 256
    (mean,) = [line for line in lines_of(exact) if line["marker"] != "None"]
    assert mean["x"][-1] == last == bands_of(exact)[styles["tiled"].color][-1][0]
    rest = [line for line in lines_of(exact) if line["marker"] == "None"]
    assert [(line["x"][0], line["x"][-1]) for line in rest] == [(last, 560 * 16 * 256)] * 2


def test_a_switch_of_attention_is_marked(tmp_path):
    write_run(tmp_path / "0", "no_rescale", extra=("attention.switch_at=null",))
    write_run(
        tmp_path / "1",
        "no_rescale",
        extra=("attention.switch_at=300",),
        switch_at=300,
        switch_to="tiled",
    )
    runs = load_runs([tmp_path])
    assert [run.variant for run in runs] == [
        "no_rescale",
        "no_rescale, tiled after step 300",
    ]
    styles = variant_styles(runs)
    panels = axes_of(figures.draw_curves(runs, styles, "val/loss", "train/loss"))
    for axes in panels:
        (switch,) = [line for line in lines_of(axes) if len(set(line["x"])) == 1]
        # the first row at or after step 300
        assert (switch["x"][0], switch["color"]) == (
            300 * 16 * 256,
            styles["no_rescale, tiled after step 300"].color,
        )
    assert figures.end_marks(runs) == {"attention switched": "|"}


def test_a_run_that_was_resumed_under_another_attention_is_marked_and_named(tmp_path):
    """A regression test: all its steps passed for those of the last attention."""
    starts = [{"step": 0, "attention": [[0, "tiled"]], "changed": {}}]
    starts += [
        {
            "step": 300,
            "attention": [[300, "sdpa"]],
            "changed": {"attention.name": ["tiled", "sdpa"], "optim.lr": [None, 0.1]},
        }
    ]
    write_run(tmp_path / "0", "sdpa", starts=starts)
    write_run(tmp_path / "1", "naive", starts=[{"step": 0, "attention": "all", "changed": 3}])
    runs = load_runs([tmp_path])
    assert [run.variant for run in runs] == ["tiled, sdpa after step 300", "naive"]
    assert [run.switches for run in runs] == [{300 * 16 * 256}, set()]
    said = (
        "was resumed at step 300 with attention.name=sdpa (tiled before), optim.lr=0.1 (null "
        "before)."
    )
    assert [text for text in sections.warnings(runs) if "resumed" in text] == [
        f"tiled, sdpa after step 300 {said}"
    ]
    assert said in report_on(tmp_path).text


def test_what_is_missing_or_older_than_the_run_is_said(tmp_path):
    write_run(tmp_path / "0", "tiled", status="interrupted", steps_done=605)
    rows = [{"job": 0, "dir": "0", "status": "interrupted"}] + [
        {"job": job, "status": "not started"} for job in (1, 2)
    ]
    (tmp_path / "index.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run,) = load_runs([tmp_path])
    assert run.figure("val/loss") is None and run.figure("tokens_per_sec")
    assert (
        "2 jobs of the sweep never started: python train.py resume=DIR goes on with them."
        in report_on(tmp_path).text
    )
    write_run(tmp_path / "1", "naive")  # run later, in its place
    assert "1 job of the sweep never started" in report_on(tmp_path).text


def test_one_seed_has_no_band(tmp_path):
    write_run(tmp_path / "0", "tiled")
    runs = load_runs([tmp_path])
    for axes in axes_of(figures.draw_curves(runs, variant_styles(runs), "val/loss", "train/loss")):
        assert not axes.collections
    text = report_on(tmp_path).text
    assert "±" not in text and "means over seeds" not in text


def test_what_was_not_measured_is_not_drawn(tmp_path):
    """No loss under exact attention, no accuracy, no speed, no memory: no panel for any of them."""
    run = write_run(tmp_path / "0", "custom")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [
        {key: value for key, value in row.items() if key in ("step", "tokens", "train/loss")}
        for row in rows
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "summary.json").write_text(
        json.dumps(
            {"status": "completed", "attention": "custom", "seq_len": 256, "steps_done": 600}
        )
    )
    runs = load_runs([tmp_path])
    (axes,) = axes_of(figures.draw_curves(runs, variant_styles(runs), "val/loss", "train/loss"))
    assert len(lines_of(axes)) == 1
    page = report_on(tmp_path)
    assert page.headings == [
        "Variants",
        "Loss",
        "Memory and speed",
        "Every run",
        "Where the numbers come from",
    ]
    assert page.labels == ["loss against training tokens"]


def test_a_caption_says_nothing_of_what_is_not_there(tmp_path):
    for job, seq_len in enumerate((256, 512)):
        write_run(
            tmp_path / str(job),
            "tiled",
            seq_len=seq_len,
            tokens_per_sec=None,
            step_tokens_per_sec=None,
        )
    text = report_on(tmp_path).text
    assert (
        "Both axes are logarithmic" in text and "speed drawn" not in text and "On a CPU" not in text
    )


def test_neither_a_diverging_curve_nor_the_untrained_loss_stretches_the_figure(tmp_path):
    write_run(tmp_path / "1", "tiled")
    run = write_run(tmp_path / "0", "no_max", status="diverged")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[11]["train/loss"] = 1e6
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = load_runs([tmp_path])
    axes = axes_of(figures.draw_curves(runs, variant_styles(runs), "val/loss", "train/loss"))[0]
    low, high = axes.get_ylim()
    assert 1.2 < low < 1.6 and 4.5 < high < 5.3
    (cross,) = [line for line in lines_of(axes) if line["marker"] == "X"]
    assert low < cross["y"][0] <= high


def test_memory_against_length(sweep):
    runs = load_runs([sweep])
    styles = variant_styles(runs)
    # as on the page; a regression test: with titles on the left no cross was drawn
    with matplotlib.rc_context({"axes.titlelocation": "left"}):
        memory, speed = axes_of(figures.draw_cost(runs, styles))
    assert memory.get_title(loc="left") == "peak memory (GiB)"
    assert (memory.get_xscale(), memory.get_yscale()) == ("log", "log")
    by_color = {line["color"]: line for line in lines_of(memory) if line["marker"] != "X"}
    assert by_color[styles["tiled"].color]["x"] == [256, 512]
    assert by_color[styles["tiled"].color]["y"] == [0.0625, 0.25]
    assert by_color[styles["naive"].color]["x"] == [256]
    (cross,) = [line for line in lines_of(memory) if line["marker"] == "X"]
    assert cross["color"] == styles["naive"].color and cross["x"] == [512]
    assert {line["color"]: line["y"] for line in lines_of(speed)}[styles["tiled"].color] == [
        1000.5,
        1000.5,
    ]


def test_bars_where_there_is_one_length(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / str(seed), "tiled", seed=seed)
    write_run(tmp_path / "2", "naive", status="oom")
    runs = load_runs([tmp_path])
    memory, speed = axes_of(figures.draw_cost(runs, variant_styles(runs)))
    assert [bar.get_width() for bar in speed.patches] == [1000.5] and [
        bar.get_width() for bar in memory.patches
    ] == [0.0625]
    assert [text.get_text() for text in memory.texts] == ["oom", "0.0625"]


@pytest.mark.filterwarnings("error")
def test_long_names_leave_room_for_the_bars(tmp_path):
    """A regression test: beside a name as long as the figure no bar was drawn, and matplotlib
    warned on the terminal. Beside a shorter one the title was cut off.
    """
    changes = (
        "attention.window=16 attention.pattern=SSSL attention.sinks=true attention.block_kv=16"
    )
    write_run(
        tmp_path / "0", "tiled", extra=(*changes.split(), "attention.score_mod=my_scores:OWN")
    )
    write_run(tmp_path / "1", "tiled")
    runs = load_runs([tmp_path])
    panels = figures.draw_cost(runs, variant_styles(runs))
    for panel in panels:
        panel.savefig(io.BytesIO(), format="svg")
        assert panel.axes[0].get_position().width > 0.25
        (title,) = panel.texts
        assert title.get_window_extent().x1 < panel.bbox.x1
        names = [label.get_text() for label in panel.axes[0].get_yticklabels()]
        assert {" ".join(name.split()) for name in names} == {run.variant for run in runs}


def test_metrics_of_any_name_are_drawn(tmp_path):
    run = write_run(tmp_path / "0", "tiled")
    rows = [
        json.loads(line) | {"probe/relative <error>": 1e-6}
        for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = load_runs([tmp_path])
    assert figures.other_metrics(runs) == ["attention/max_score", "probe/relative <error>"]
    assert "probe/relative <error>" in report_on(tmp_path).text


def test_a_run_that_ends_far_from_finite_has_its_card(tmp_path):
    """The diagnosis as data: every figure is told, and its own history is the one drawn."""
    history = [[step, 2.0**step] for step in range(6)]
    diagnosis = {
        "message": "p is inf",
        "step": 240,
        "layer": 1,
        "head": 2,
        "queries": [0, 64],
        "keys": [16, 32],
        "tensor": "acc",
    }
    diagnosis |= {
        "fate": "inf",
        "max_score": 90.5,
        "float16_overflow_step": 120,
        "float32_overflow_step": None,
        "history": history,
    }
    diagnosis |= {"of a later version": {"some_thing": [1.5, True]}}
    write_run(tmp_path / "0", "no_max", status="diverged", first_bad_step=240, diagnosis=diagnosis)
    text = report_on(tmp_path).text
    for fact in (
        "p is inf",
        "layer\n1",
        "head\n2",
        "queries\n0:64",
        "keys\n16:32",
        "tensor\nacc",
        "fate\ninf",
        "max score\n90.5",
    ):
        assert fact in text
    assert (
        "float16 overflow step\n120" in text and "of a later version\nsome thing 1.5, yes" in text
    )
    assert "float32 overflow step" not in text and "None" not in text


def test_resumed_runs_stay_with_their_variant(tmp_path):
    write_run(tmp_path / "0", "tiled", extra=("steps=600",))
    write_run(tmp_path / "1", "tiled", seed=1, extra=("steps=1200", f"resume='{tmp_path}/1'"))
    write_run(tmp_path / "2", "no_rescale", extra=("steps=600",))
    assert [run.variant for run in load_runs([tmp_path])] == ["tiled", "tiled", "no_rescale"]
    # steps that were a choice from the start tell runs apart
    write_run(tmp_path / "3", "tiled", extra=("steps=100",))
    assert [run.variant for run in load_runs([tmp_path])] == [
        "tiled steps=600",
        "tiled steps=1200",
        "no_rescale steps=600",
        "tiled steps=100",
    ]


def test_damaged_runs_are_named_though_the_index_knows_how_they_ended(tmp_path):
    for job in range(5):
        write_run(tmp_path / str(job), "tiled", seed=job)
    summaries = [json.loads((tmp_path / str(job) / "summary.json").read_text()) for job in range(5)]
    (tmp_path / "index.jsonl").write_text(
        "".join(json.dumps(x | {"dir": str(job)}) + "\n" for job, x in enumerate(summaries))
    )
    (tmp_path / "1/summary.json").unlink()
    (tmp_path / "2/summary.json").write_text('{"status": "comp')
    rows = (tmp_path / "3/metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "3/metrics.jsonl").write_text("".join(rows[:20]) + rows[20][:9])
    (tmp_path / "4/metrics.jsonl").unlink()
    assert {run.name: run.damage for run in load_runs([tmp_path])} == {
        "tiled seed=0": "",
        "tiled seed=1": "summary.json is missing",
        "tiled seed=2": "summary.json is unreadable",
        "tiled seed=3": "metrics.jsonl ends at step 380 of 600",
        "tiled seed=4": "metrics.jsonl is empty or missing",
    }
    assert (
        "Damaged: tiled seed=3: metrics.jsonl ends at step 380 of 600." in report_on(tmp_path).text
    )


def test_a_section_without_data_says_so(tmp_path):
    run = write_run(
        tmp_path / "0",
        "tiled",
        **{"tokens_per_sec": None, "step_tokens_per_sec": None, "memory/peak_gib": None},
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {key: value for key, value in row.items() if row["step"] == 0 or not key.startswith("val/")}
        for row in rows
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    page = report_on(tmp_path)
    assert (
        "No evaluation after step 0" in page.text
        and "No run has measured its memory or its speed." in page.text
    )
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[2:3]))
    assert "No curve: no run has logged a loss twice." in report_on(tmp_path).text


def test_variants_name_only_what_differs(tmp_path):
    write_run(tmp_path / "0", "tiled", extra=("attention.block_kv=16", "steps=5"))
    write_run(tmp_path / "1", "tiled", seed=1, extra=("attention.block_kv=128", "steps=5"))
    runs = load_runs([tmp_path])
    assert [run.variant for run in runs] == ["tiled block_kv=16", "tiled block_kv=128"]
    assert list(variant_styles(runs)) == ["tiled block_kv=16", "tiled block_kv=128"]
    assert [run.name for run in runs] == ["tiled block_kv=16 seed=0", "tiled block_kv=128 seed=1"]


def test_runs_that_are_the_same_are_told_apart(tmp_path):
    for job in ("a", "b"):
        write_run(tmp_path / job, "tiled")
    assert [run.name for run in load_runs([tmp_path])] == ["tiled (a)", "tiled (b)"]


def test_runs_too_short_for_a_curve_have_no_loss_figure(tmp_path):
    for job, seq_len in enumerate((256, 512)):
        run = write_run(tmp_path / str(job), "tiled", seq_len=seq_len)
        (run / "metrics.jsonl").write_text(
            "".join(line + "\n" for line in (run / "metrics.jsonl").read_text().splitlines()[:1])
        )
    assert not [label for label in report_on(tmp_path).labels if "loss" in label]


def test_a_run_given_twice_counts_once(tmp_path):
    write_run(tmp_path / "0", "tiled")
    assert len(load_runs([tmp_path, tmp_path / "0"])) == 1


def test_a_single_run(tmp_path):
    page = report_on(write_run(tmp_path / "alone", "tiled"))
    assert (
        "tiled" in page.text
        and "1 run of 1 variant: 1 completed" in page.text
        and "Loss" in page.headings
    )
    assert str(tmp_path) not in page.html


def test_what_differs_is_named_by_run(tmp_path):
    for seed in range(3):
        write_run(tmp_path / str(seed), "tiled", seed=seed)
    other = {
        "data_fingerprint": "corpus-2",
        "versions": {"torch": "2.11"},
        "dirty": True,
        "hardware": {"cpu": "another"},
    }
    write_run(tmp_path / "3", "tiled", seed=3, env=other)
    rows = dict(provenance(load_runs([tmp_path])).rows)
    assert rows["commit"] == "c0ffee: 3 runs; c0ffee with uncommitted changes: tiled seed=3"
    assert rows["versions: torch"] == "2.13: 3 runs; 2.11: tiled seed=3"
    assert rows["data fingerprint"] == "corpus-1: 3 runs; corpus-2: tiled seed=3"
    text = report_on(tmp_path).text
    assert "These runs read different data or tokenizers" in text and "2 different machines" in text


def test_tokenizers_compare_by_bits_per_byte_and_not_by_loss(tmp_path):
    for name, loss, bpb in (("byte", 1.4, 2.1), ("bpe", 3.9, 1.9)):
        held_out = {"val/loss": loss, "val/loss_exact": loss, "val/bpb": bpb, "val/bpb_exact": bpb}
        here = {"extra": [f"tokenizer={name}"], "env": {"data_fingerprint": name}}
        write_run(tmp_path / name, "tiled", **held_out, **here)
    runs = load_runs([tmp_path])
    assert [len(ranking.losses) for ranking in rank(runs)] == [1, 1]
    table = variant_table(runs, rank(runs))
    rows = [dict(zip(table.head, row, strict=True)) for row in table.rows]
    assert {row["variant"]: row["val/bpb_exact"] for row in rows} == {
        "tiled tokenizer=byte": "2.100",
        "tiled tokenizer=bpe": "1.900",
    }
    assert "val/bpb compares" in report_on(tmp_path).text


def test_broken_runs_are_told_and_the_rest_is_drawn(tmp_path):
    write_run(tmp_path / "0", "tiled")
    torn = write_run(tmp_path / "7", "tiled", seed=1)
    (torn / "summary.json").rename(torn / "config.yaml")  # JSON is YAML
    (torn / "metrics.jsonl").write_text((torn / "metrics.jsonl").read_text()[:1500])
    for job, content in {
        "1": {},
        "2": {"metrics.jsonl": ""},
        "3": {"summary.json": '{"status": "comp', "env.json": "{"},
    }.items():
        (tmp_path / job).mkdir()
        for name, text in (
            {"config.yaml": "attention: {name: naive}\nseed: 0\n"} | content
        ).items():
            (tmp_path / job / name).write_text(text)
    (tmp_path / "4").mkdir()
    (tmp_path / "4/summary.json").write_text(
        json.dumps({"status": "failed", "error": "no such <corpus>", "attention": "flex"})
    )
    write_run(tmp_path / "5", "sdpa", status="interrupted")
    # a job that died before it had a folder's content, and lines of no use
    (tmp_path / "6").mkdir()
    lines = [
        {"dir": "6", "status": "failed", "error": "CUDA <died>", "attention": "triton"},
        {"job": 1},
        [],
        "x",
    ]
    (tmp_path / "index.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"dir": "7", "sta'
    )
    page = report_on(tmp_path)
    (outcomes,) = re.findall("8 runs of 5 variants.*: (.*)[.]", page.text)
    assert set(outcomes.split(", ")) == {
        "1 completed",
        "1 interrupted",
        "4 unfinished",
        "2 failed",
    }
    assert "no such <corpus>" in page.text and "CUDA <died>" in page.text
    assert page.labels == [
        "loss against training tokens, panel 1",
        "loss against training tokens, panel 2",
        "peak memory and training speed, panel 1",
        "peak memory and training speed, panel 2",
        "other metrics against training tokens",
    ]
    rows = variants_of(tmp_path)
    assert {row["variant"]: row["runs"] for row in rows}["sdpa"] == "1 interrupted"
    assert {row["variant"]: row["own val/loss"] for row in rows} == dict.fromkeys(
        ("flex", "naive", "sdpa", "triton"), "-"
    ) | {"tiled": "1.600"}


def test_everything_embedded_is_escaped(tmp_path):
    nasty = "<script>alert(1)</script>&\"'|`*_$\\frac$"
    write_run(
        tmp_path / "0",
        nasty,
        extra=(f"data.path={nasty}",),
        env={"commit": nasty, "hardware": {nasty: nasty}},
    )
    write_run(
        tmp_path / "1",
        "no_max",
        status="diverged",
        first_bad_step=240,
        diagnosis={"message": nasty},
    )
    (tmp_path / "2").mkdir()
    (tmp_path / "2/summary.json").write_text(
        json.dumps({"status": nasty, "error": nasty, "attention": "x"})
    )
    page = report_on(tmp_path)
    assert "script" not in page.tags and nasty in page.text and "<script" not in page.html


@pytest.mark.parametrize("status", ["oom", "failed"])
def test_a_sweep_without_a_figure_still_has_its_page(tmp_path, status):
    for job in range(2):
        (tmp_path / str(job)).mkdir()
        (tmp_path / str(job) / "summary.json").write_text(
            json.dumps({"status": status, "attention": "naive", "seq_len": 2**job})
        )
    page = report_on(tmp_path)
    assert status in page.text and not page.labels


def test_a_report_replaces_the_one_before(tmp_path):
    write_run(tmp_path / "0", "tiled")
    first = report_on(tmp_path)
    # the report is no run, and the same runs give the same page
    assert report_on(tmp_path).html == first.html


def test_without_runs_it_is_one_line(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SystemExit) as ended:
            main([str(folder)])
        line = ended.value.code
        assert line.startswith("report: ") and str(folder) in line and "\n" not in line
        assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["page.pdf", "folder", "sub.html"])
def test_a_place_that_takes_no_page(tmp_path, out):
    write_run(tmp_path / "0", "tiled")
    (tmp_path / "sub.html").mkdir()
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), f"out={tmp_path / out}"])
    assert str(tmp_path / out) in ended.value.code and ".html" in ended.value.code


def test_help_shows_a_command_that_runs(tmp_path):
    write_run(tmp_path / "multirun/a/0", "tiled")
    done = processes.run("-m", "scripts.report", "--help", check=True)
    example = re.search(r"^    python (-m scripts\.report .*)$", done.stdout, re.MULTILINE)[1]
    example = example.replace("2026-01-31_12-00-00", "a")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = (*example.split(), "out=comparison.html")
    processes.run(*command, cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "comparison.html").exists()


def test_two_losses_are_a_curve(tmp_path):
    """A regression test: runs with fewer than five losses had no curve."""
    run = write_run(tmp_path / "0", "tiled")
    rows = (run / "metrics.jsonl").read_text().splitlines()[:2]
    (run / "metrics.jsonl").write_text("".join(row + "\n" for row in rows))
    runs = load_runs([tmp_path])
    own = axes_of(figures.draw_curves(runs, variant_styles(runs), "val/loss", "train/loss"))[0]
    assert sorted(len(line["x"]) for line in lines_of(own)) == [1, 2]


def test_a_failed_job_is_told_once(tmp_path):
    """A regression test: it had a row in every table, and `unknown:` in every fact."""
    write_run(tmp_path / "0", "tiled", env={"versions": {"torch": "2.13"}})
    (tmp_path / "1").mkdir()
    failed = {"status": "failed", "error": "no kernel", "attention": "flex", "seq_len": 256}
    (tmp_path / "1/summary.json").write_text(json.dumps(failed))
    page = report_on(tmp_path)
    assert "unknown" not in page.text and page.text.count("no kernel") == 1
    # the title names it, and one row
    assert page.text.replace("flex, tiled: 2 runs", "").count("flex") == 1


def test_each_attention_has_its_colour_whatever_ran_beside_it(tmp_path):
    """A regression test: tiled was orange in reports, which is no_rescale's colour elsewhere."""
    write_run(tmp_path / "a/0", "tiled")
    write_run(tmp_path / "b/0", "naive")
    write_run(tmp_path / "b/1", "no_rescale", extra=("attention.block_kv=8",))
    write_run(tmp_path / "b/2", "no_rescale", extra=("attention.block_kv=16",))
    write_run(tmp_path / "b/3", "tiled")
    colors = [
        {name: style.color for name, style in variant_styles(load_runs([folder])).items()}
        for folder in (tmp_path / "a", tmp_path / "b")
    ]
    assert colors[0]["tiled"] == colors[1]["tiled"] == BACKENDS["tiled"]
    assert colors[1]["no_rescale block_kv=8"] == BACKENDS["no_rescale"]
    assert len(set(colors[1].values())) == 4
