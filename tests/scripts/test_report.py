"""The report, from fabricated sweeps: whole ones, broken ones, and none.

Its numbers are tested where they are computed; the page is tested as a whole.
"""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from scripts.report import figures
from scripts.report.__main__ import main
from scripts.report.drawing import variant_styles
from scripts.report.page import Table
from scripts.report.ranking import rank
from scripts.report.runs import load_runs
from scripts.report.sections import provenance, variant_table, warnings
from training.record.palette import BACKENDS

ENV = {
    "commit": "c0ffee",
    "dirty": False,
    "data_fingerprint": "corpus-1",
    "versions": {"torch": "2.13"},
    "hardware": {"cpu": "some CPU", "gpu": None},
}
OOM = {
    "asked_gib": 64.0,
    "free_gib": 8.5,
    "message": "CUDA out of memory",
}
DIAGNOSIS = {
    "message": "inf in layer <2>",
    "step": 240,
    "layer": 1,
    "queries": [0, 64],
    "max_score": 90.5,
    "float32_overflow_step": None,
    "history": [[220, 11.0], [240, 12.0]],
    "of a later version": {"some_thing": [1.5, True]},
}

pytest.importorskip("matplotlib")


def write_json(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def write_lines(path: Path, rows: list) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_run(
    folder: Path,
    attention: str,
    *,
    seq_len: int = 256,
    seed: int = 0,
    status: str = "completed",
    env: dict | None = None,
    extra: tuple[str, ...] = (),
    **summary,
) -> Path:
    """A run directory as training leaves it, with a loss that falls from 5.5."""
    folder.mkdir(parents=True)
    last = {"completed": 600, "interrupted": 300, "diverged": 260, "oom": 0}[status]
    gap = 0.5 if attention == "no_rescale" else 0.0
    rows = []
    for step in range(0, last, 20):
        loss = 1.5 + 4 * math.exp(-step / 150) + 0.01 * seed
        row = {
            "step": step,
            "tokens": step * 16 * seq_len,
            "train/loss": loss if step < 240 or status != "diverged" else None,
            "attention/max_score": 0.05 * (step + 1),
        }
        if step % 40 == 0:
            row |= {"val/loss": loss, "val/loss_exact": loss + gap}
        rows.append(row)
    write_lines(folder / "metrics.jsonl", rows)
    measured = {
        "tokens_per_sec": 400.0 + seed,
        "step_tokens_per_sec": 1000.0 + seed,
        "memory/peak_gib": (seq_len / 1024) ** 2,
        "val/loss": 1.6,
        "val/loss_exact": 1.6 + gap,
    }
    found = {
        "status": status,
        "attention": attention,
        "seq_len": seq_len,
        "seed": seed,
        "steps_done": last,
        "defect": attention in ("no_max", "no_rescale"),
        "overrides": [f"attention={attention}", f"seq_len={seq_len}", f"seed={seed}", *extra],
    }
    found |= measured if status != "oom" else {}
    write_json(folder / "summary.json", found | summary)
    write_json(folder / "env.json", ENV | (env or {}))
    return folder


class Page(HTMLParser):
    """What the page would load, its tags and its text."""

    def __init__(self, path: Path):
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.addresses, self.tags, self.text = [], set(), ""
        self.feed(self.html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        loads = ("src", "href", "xlink:href", "srcset")
        self.addresses += [value for name, value in attributes if name in loads]

    def handle_data(self, data):
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
    """Two lengths, two seeds, a defect that diverges, naive out of memory."""
    folder = tmp_path_factory.mktemp("sweep")
    endings = {
        ("naive", 512): {"status": "oom", "oom": OOM},
        ("no_max", 512): {"status": "diverged", "first_bad_step": 240, "diagnosis": DIAGNOSIS},
    }
    for attention in ("naive", "tiled", "no_max", "no_rescale"):
        for seq_len in (256, 512):
            for seed in (0, 1):
                ending = endings.get((attention, seq_len), {})
                name = f"{attention}-{seq_len}-{seed}"
                write_run(folder / name, attention, seq_len=seq_len, seed=seed, **ending)
    return folder


def test_a_page_holds_everything_and_loads_nothing(sweep):
    page = report_on(sweep)
    assert "svg" in page.tags and "script" not in page.tags
    assert all(address.startswith("#") for address in page.addresses)
    assert not re.search(r"@import|url\((?!#)", page.html)
    told = ("no_rescale", "c0ffee", "some CPU", "corpus-1", "2.13", *map(str, OOM.values()))
    diagnosed = ("inf in layer <2>", "0:64", "90.5", "1.5, yes")
    assert [fact for fact in (*told, *diagnosed) if fact.removesuffix(".0") not in page.text] == []
    assert "None" not in page.text
    assert str(sweep) not in page.html, "reports are passed on"
    # the report is no run, and the same runs give the same page
    assert report_on(sweep).html == page.html


def test_means_over_seeds(sweep):
    rows = {(row["variant"], row["seq_len"]): row for row in variants_of(sweep)}
    row = rows["no_rescale", "512"]
    assert row["runs"] == "2 completed" and row["steps"] == "600"
    assert row["own val/loss"] == "1.600 ± 0.000"
    assert row["val/loss_exact"] == "2.100 ± 0.000"
    assert row["beside baseline"] == "+0.500"
    # 400 and 401, 1000 and 1001: standard deviation 0.7
    assert (row["tokens/s"], row["steps alone"]) == ("400 ± 1", "1,000 ± 1")
    assert row["peak GiB"] == "0.25 ± 0"
    # runs that diverged or ran out of memory have no mean
    for dead in (rows["naive", "512"], rows["no_max", "512"]):
        assert dead["own val/loss"] == dead["peak GiB"] == "-"


def points_of(axes) -> list[tuple]:
    """Colour, marker, x and y of each line."""
    return [
        (line.get_color(), line.get_marker(), list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.get_lines()
    ]


def loss_curves(folder: Path) -> tuple[list, dict]:
    """The axes of the loss figure, two for each length, and the style of each variant."""
    runs = load_runs([folder])
    styles = variant_styles(runs)
    panels = figures.draw_curves(runs, styles, "val/loss", "train/loss")
    return [panel.axes[0] for panel in panels], styles


def test_a_curve_is_the_mean_over_seeds_and_ends_in_a_cross(sweep):
    (own, exact, own_long, _), styles = loss_curves(sweep)
    color = styles["no_rescale"].color
    (mean,) = [y for c, marker, _, y in points_of(exact) if c == color and marker != "None"]
    curves = [
        list(run.curve("val/loss_exact").values())
        for run in load_runs([sweep])
        if (run.variant, run.seq_len) == ("no_rescale", 256)
    ]
    assert mean == pytest.approx([(a + b) / 2 for a, b in zip(*curves, strict=True)])
    # at their last finite value, step 240
    crosses = [(c, x) for c, marker, x, _ in points_of(own_long) if marker == "X"]
    assert crosses == [(styles["no_max"].color, [240 * 16 * 512])] * 2
    assert "X" not in [marker for _, marker, _, _ in points_of(own)]


def test_two_losses_are_a_curve_and_one_is_none(tmp_path):
    """A regression test: runs with fewer than five losses had no curve."""
    metrics = write_run(tmp_path / "0", "tiled") / "metrics.jsonl"
    rows = read_lines(metrics)
    for count, curves in ((2, {"train/loss"}), (1, set())):
        write_lines(metrics, rows[:count])
        (run,) = load_runs([tmp_path])
        assert {name for name in run.logged if "loss" in name} == curves
        assert report_on(tmp_path).text


def test_memory_and_speed_against_length(sweep):
    runs = load_runs([sweep])
    styles = variant_styles(runs)
    memory, speed = (panel.axes[0] for panel in figures.draw_cost(runs, styles))
    lines = {color: (x, y) for color, marker, x, y in points_of(memory) if marker != "X"}
    assert lines[styles["tiled"].color] == ([256, 512], [0.0625, 0.25])
    assert lines[styles["naive"].color][0] == [256]
    crosses = [(color, x) for color, marker, x, _ in points_of(memory) if marker == "X"]
    assert crosses == [(styles["naive"].color, [512])]
    speeds = {color: y for color, _, _, y in points_of(speed)}
    assert speeds[styles["tiled"].color] == [1000.5, 1000.5]


def test_metrics_of_any_name_are_drawn(tmp_path):
    metrics = write_run(tmp_path / "0", "tiled") / "metrics.jsonl"
    write_lines(metrics, [row | {"probe/<error>": 1e-6} for row in read_lines(metrics)])
    runs = load_runs([tmp_path])
    assert figures.other_metrics(runs) == ["attention/max_score", "probe/<error>"]
    assert "probe/<error>" in report_on(tmp_path).text


def test_a_switch_of_attention_names_its_variant(tmp_path):
    switched = {"switch_at": 300, "switch_to": "tiled", "extra": ("attention.switch_at=300",)}
    write_run(tmp_path / "0", "no_rescale", extra=("attention.switch_at=null",))
    write_run(tmp_path / "1", "no_rescale", **switched)
    plain, other = load_runs([tmp_path])
    assert plain.variant == "no_rescale" and not plain.switches
    assert re.findall(r"no_rescale|tiled|\d+", other.variant) == ["no_rescale", "tiled", "300"]
    # the first row at or after step 300
    assert other.switches == {300 * 16 * 256}
    assert list(figures.end_marks([plain, other]).values()) == ["|"]


def test_a_run_that_was_resumed_under_another_attention_is_named(tmp_path):
    """A regression test: all its steps passed for those of the last attention."""
    changed = {"attention.name": ["tiled", "sdpa"], "optim.lr": [None, 0.1]}
    starts = [
        {"step": 0, "attention": [[0, "tiled"]], "changed": {}},
        {"step": 300, "attention": [[300, "sdpa"]], "changed": changed},
    ]
    write_run(tmp_path / "0", "sdpa", starts=starts)
    write_run(tmp_path / "1", "naive")
    runs = load_runs([tmp_path])
    resumed, plain = (run.variant for run in runs)
    assert re.findall(r"tiled|sdpa|\d+", resumed) == ["tiled", "sdpa", "300"] and plain == "naive"
    assert [run.switches for run in runs] == [{300 * 16 * 256}, set()]
    (told,) = warnings(runs)
    assert all(each in told for each in ("step 300", "attention.name=sdpa", "optim.lr=0.1"))
    assert "attention.name=sdpa" in report_on(tmp_path).text


def test_a_sweep_that_was_cut_short(tmp_path):
    """Losses of before the last step do not count, and jobs that never started are counted."""
    write_run(tmp_path / "0", "tiled", status="interrupted", steps_done=605)
    never = [{"job": job, "status": "not started"} for job in (1, 2)]
    write_lines(tmp_path / "index.jsonl", [{"job": 0, "dir": "0", "status": "interrupted"}, *never])
    (run,) = load_runs([tmp_path])
    assert run.figure("val/loss") is None and run.figure("tokens_per_sec")
    assert "2 jobs" in report_on(tmp_path).text
    write_run(tmp_path / "1", "naive")  # run later, in its place
    assert "1 job " in report_on(tmp_path).text


def test_one_seed_has_no_deviation(tmp_path):
    write_run(tmp_path / "0", "tiled")
    assert "±" not in report_on(tmp_path).text


LITTLE = {
    "oom": {"status": "oom", "seq_len": 256},
    "failed": {"status": "failed", "seq_len": 256, "error": "no such <corpus>"},
    "nothing measured": {"status": "completed", "seq_len": 256, "steps_done": 600},
}


@pytest.mark.parametrize("summary", LITTLE.values(), ids=LITTLE)
def test_a_sweep_without_a_figure_still_has_its_page(tmp_path, summary):
    for job in "01":
        write_json(tmp_path / job / "summary.json", {"attention": "custom"} | summary)
    page = report_on(tmp_path)
    assert summary["status"] in page.text and summary.get("error", "") in page.text
    assert "svg" not in page.tags


def test_a_failed_job_is_told_once(tmp_path):
    """A regression test: it had a row in every table, and `unknown:` in every fact."""
    write_run(tmp_path / "0", "tiled")
    failed = {"status": "failed", "error": "no kernel", "attention": "flex", "seq_len": 256}
    write_json(tmp_path / "1/summary.json", failed)
    page = report_on(tmp_path)
    assert "unknown" not in page.text and page.text.count("no kernel") == 1


def test_variants_name_only_what_differs(tmp_path):
    write_run(tmp_path / "0", "tiled", extra=("attention.block_kv=16", "steps=5"))
    write_run(tmp_path / "1", "tiled", seed=1, extra=("attention.block_kv=128", "steps=5"))
    runs = load_runs([tmp_path])
    assert list(variant_styles(runs)) == ["tiled block_kv=16", "tiled block_kv=128"]
    assert [run.name for run in runs] == ["tiled block_kv=16 seed=0", "tiled block_kv=128 seed=1"]


def test_resumed_runs_stay_with_their_variant(tmp_path):
    write_run(tmp_path / "0", "tiled", extra=("steps=600",))
    write_run(tmp_path / "1", "tiled", seed=1, extra=("steps=1200", f"resume='{tmp_path}/1'"))
    assert [run.variant for run in load_runs([tmp_path])] == ["tiled", "tiled"]
    # steps that were a choice from the start tell runs apart
    write_run(tmp_path / "2", "tiled", extra=("steps=100",))
    names = ["tiled steps=600", "tiled steps=1200", "tiled steps=100"]
    assert [run.variant for run in load_runs([tmp_path])] == names


def test_runs_that_are_the_same_are_told_apart_and_one_given_twice_is_one(tmp_path):
    for job in ("a", "b"):
        write_run(tmp_path / job, "tiled")
    runs = load_runs([tmp_path, tmp_path / "a"])
    assert [run.name for run in runs] == ["tiled (a)", "tiled (b)"]


def test_each_attention_has_its_colour_whatever_ran_beside_it(tmp_path):
    """A regression test: tiled was orange in reports, which is no_rescale's colour elsewhere."""
    write_run(tmp_path / "a/0", "tiled")
    write_run(tmp_path / "b/0", "naive")
    write_run(tmp_path / "b/1", "no_rescale", extra=("attention.block_kv=8",))
    write_run(tmp_path / "b/2", "no_rescale", extra=("attention.block_kv=16",))
    write_run(tmp_path / "b/3", "tiled")
    alone, beside = (variant_styles(load_runs([tmp_path / each])) for each in "ab")
    assert alone["tiled"].color == beside["tiled"].color == BACKENDS["tiled"]
    assert beside["no_rescale block_kv=8"].color == BACKENDS["no_rescale"]
    assert len({style.color for style in beside.values()}) == 4


def test_damaged_runs_are_named_though_the_index_knows_how_they_ended(tmp_path):
    runs = [write_run(tmp_path / str(job), "tiled", seed=job) for job in range(5)]
    rows = [json.loads((run / "summary.json").read_text()) | {"dir": run.name} for run in runs]
    write_lines(tmp_path / "index.jsonl", rows)
    (runs[1] / "summary.json").unlink()
    (runs[2] / "summary.json").write_text('{"status": "comp')
    lines = (runs[3] / "metrics.jsonl").read_text().splitlines(keepends=True)
    (runs[3] / "metrics.jsonl").write_text("".join(lines[:20]) + lines[20][:9])
    (runs[4] / "metrics.jsonl").unlink()
    whole, *damaged = load_runs([tmp_path])
    assert whole.damage == ""
    named = (("summary.json",), ("summary.json",), ("metrics.jsonl", "380"), ("metrics.jsonl",))
    for run, names in zip(damaged, named, strict=True):
        assert all(name in run.damage for name in names), run.damage
    assert damaged[2].damage in report_on(tmp_path).text


def test_broken_runs_are_told_and_the_rest_is_drawn(tmp_path):
    write_run(tmp_path / "0", "tiled")
    for job, content in {
        "1": {},
        "2": {"metrics.jsonl": ""},
        "3": {"summary.json": '{"status": "comp', "env.json": "{"},
    }.items():
        (tmp_path / job).mkdir()
        (tmp_path / job / "config.yaml").write_text("attention: {name: naive}\nseed: 0\n")
        for name, text in content.items():
            (tmp_path / job / name).write_text(text)
    failed = {"status": "failed", "error": "no such <corpus>", "attention": "flex"}
    write_json(tmp_path / "4/summary.json", failed)
    write_run(tmp_path / "5", "sdpa", status="interrupted")
    # a job that died before it had a folder's content, and lines of no use
    (tmp_path / "6").mkdir()
    died = {"dir": "6", "status": "failed", "error": "CUDA <died>", "attention": "triton"}
    write_lines(tmp_path / "index.jsonl", [died, {"job": 1}, [], "x"])
    page = report_on(tmp_path)
    assert "no such <corpus>" in page.text and "CUDA <died>" in page.text
    assert "svg" in page.tags
    rows = {row["variant"]: row for row in variants_of(tmp_path)}
    assert {name: row["runs"] for name, row in rows.items()} == {
        "tiled": "1 completed",
        "naive": "3 unfinished",
        "flex": "1 failed",
        "sdpa": "1 interrupted",
        "triton": "1 failed",
    }
    assert [name for name, row in rows.items() if row["own val/loss"] != "-"] == ["tiled"]


def test_where_runs_differ_is_named_by_run(tmp_path):
    for seed in range(3):
        write_run(tmp_path / str(seed), "tiled", seed=seed)
    other = {
        "data_fingerprint": "corpus-2",
        "versions": {"torch": "2.11"},
        "hardware": {"cpu": "another"},
    }
    write_run(tmp_path / "3", "tiled", seed=3, env=other)
    runs = load_runs([tmp_path])
    rows = dict(provenance(runs).rows)
    assert rows["commit"] == "c0ffee"
    assert rows["versions: torch"].startswith("2.13: 3 ")
    assert rows["versions: torch"].endswith("2.11: tiled seed=3")
    most, one = rows["data fingerprint"].split("; ")
    assert most.startswith("corpus-1: 3 ") and one == "corpus-2: tiled seed=3"
    data, machines = warnings(runs)
    assert "fingerprint" in data and "2" in machines


def test_tokenizers_compare_by_bits_per_byte_and_not_by_loss(tmp_path):
    for name, loss, bpb in (("byte", 1.4, 2.1), ("bpe", 3.9, 1.9)):
        held_out = {"val/loss": loss, "val/loss_exact": loss, "val/bpb": bpb, "val/bpb_exact": bpb}
        here = {"extra": [f"tokenizer={name}"], "env": {"data_fingerprint": name}}
        write_run(tmp_path / name, "tiled", **held_out, **here)
    runs = load_runs([tmp_path])
    assert [len(ranking.losses) for ranking in rank(runs)] == [1, 1]
    assert {row["variant"]: row["val/bpb_exact"] for row in variants_of(tmp_path)} == {
        "tiled tokenizer=byte": "2.100",
        "tiled tokenizer=bpe": "1.900",
    }
    assert "val/bpb" in warnings(runs)[0]


def test_everything_embedded_is_escaped(tmp_path):
    nasty = "<script>alert(1)</script>&\"'|`*_$\\frac$"
    env = {"commit": nasty, "hardware": {nasty: nasty}}
    write_run(tmp_path / "0", nasty, extra=(f"data.path={nasty}",), env=env)
    said = {"first_bad_step": 240, "diagnosis": {"message": nasty}}
    write_run(tmp_path / "1", "no_max", status="diverged", **said)
    write_json(tmp_path / "2/summary.json", {"status": nasty, "error": nasty, "attention": "x"})
    page = report_on(tmp_path)
    assert nasty in page.text
    assert "script" not in page.tags and "<script" not in page.html


def test_without_runs_it_is_one_line(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SystemExit) as ended:
            main([str(folder)])
        line = ended.value.code
        assert line.startswith("report: ") and str(folder) in line and "\n" not in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["page.pdf", "folder", "sub.html"])
def test_a_place_that_takes_no_page(tmp_path, out):
    write_run(tmp_path / "0", "tiled")
    (tmp_path / "sub.html").mkdir()
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), f"out={tmp_path / out}"])
    assert str(tmp_path / out) in ended.value.code and ".html" in ended.value.code
