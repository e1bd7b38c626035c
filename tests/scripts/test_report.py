"""The report as one page: what it says of whole, broken and damaged sweeps, and whether a browser
draws it.
"""

import json
import re
import subprocess
from html import unescape
from pathlib import Path

import pytest

from attention import BACKENDS
from scripts.report.__main__ import main
from scripts.report.charts import cost_charts, looks_of, loss_charts
from scripts.report.runs import Run, load_runs
from tests.browser import CHROMIUM, needs_browser
from tests.scripts.fabricated import read_lines, write_lines, write_run, write_seeds

OOM = {"asked_gib": 64.0, "free_gib": 8.5, "message": "CUDA out of memory"}
DIAGNOSIS = {
    "message": "inf in layer <2>",
    "queries": [0, 64],
    "max_score": 90.5,
    "float32_overflow_step": None,
    "history": [[220, 11.0], [240, 12.0]],
    "of a later version": {"some_thing": 1.5},
}


class Page:
    """A report: its text, and the rows of its table."""

    def __init__(self, path: Path):
        self.html = path.read_text(encoding="utf-8")
        self.body = re.sub(r"(?s)<(script|style).*?</\1>", "", self.html)
        self.text = text_of(self.body)
        self.rows = []
        for variant, cells in re.findall(r'<tr data-variant="(.*?)">(.*?)</tr>', self.html):
            found = re.findall(r'data-label="(.*?)">(.*?)</td>', cells)
            cells = {label: text_of(cell) for label, cell in found}
            self.rows.append({"variant": unescape(variant)} | cells)


def text_of(html: str) -> str:
    return unescape(re.sub("<[^>]*>", "", html))


def report_on(folder: Path) -> Page:
    main([str(folder)])
    return Page(folder / "report.html")


def broken_sweep(folder: Path) -> None:
    """Two lengths, two seeds, a defect that diverges, naive out of memory."""
    endings = {
        ("naive", 512): {"status": "oom", "oom": OOM},
        ("no_max", 512): {"status": "diverged", "first_bad_step": 240, "diagnosis": DIAGNOSIS},
    }
    for attention in ("naive", "tiled", "no_max", "no_rescale"):
        for seq_len in (256, 512):
            for seed in (0, 1):
                settings = {"loss": 1.6 + seed, "gap": 0.5 * (attention == "no_rescale")}
                settings |= endings.get((attention, seq_len), {})
                name = f"{attention}-{seq_len}-{seed}"
                write_run(folder / name, attention, seq_len=seq_len, seed=seed, **settings)


def twelve_variants(folder: Path) -> None:
    name = "my_module:BACKEND_<b>of</b>_" + 100 * "x"
    for attention in ("naive", "tiled", "sdpa", "flex", "triton", "no_max", "no_rescale", name):
        write_seeds(folder, attention, 1.6, 1.7)
    for window in (16, 32, 64, 128, 256):
        write_seeds(folder, "triton", 1.8, 1.9, variant=f"triton window={window}")


def one_run(folder: Path) -> None:
    write_run(folder / "0", "tiled")


def an_oom_alone(folder: Path) -> None:
    write_run(folder / "0", "naive", status="oom", oom=OOM)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    broken_sweep(folder)
    return folder


@pytest.fixture(scope="module")
def page(sweep):
    return report_on(sweep)


OTHERS = (one_run, an_oom_alone, twelve_variants)
SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in OTHERS]


@needs_browser
@pytest.mark.parametrize("write", [broken_sweep, *SLOW])
def test_a_browser_draws_every_chart_and_no_script_fails(tmp_path, write):
    write(tmp_path / "sweep")
    charts = report_on(tmp_path / "sweep").html.count('<script type="application/json">')
    browser = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    browser += ["--virtual-time-budget=30000", f"--user-data-dir={tmp_path}/profile"]
    address = (tmp_path / "sweep/report.html").as_uri()
    done = subprocess.run([*browser, address], capture_output=True, text=True, timeout=120)
    drawn = re.search(r'<body data-drawn="(\d+)"', done.stdout)
    assert re.search(r'<p id="failed" role="alert" hidden="[^>]*></p>', done.stdout), done.stdout
    assert drawn and int(drawn[1]) == charts == done.stdout.count("<canvas")


def test_a_page_tells_everything_and_loads_nothing(sweep, page):
    assert not re.search("<[^>]* (src|href)=", page.body)
    policy = re.search(r'Policy" content="(.*?)"', page.html, re.DOTALL)[1]
    scripts = re.search(r"script-src ([^;]*)", policy)[1].split()
    assert "default-src 'none'" in policy
    assert [source[:8] for source in scripts] == ["'sha256-"] * 2, "only its own scripts may run"
    told = ("c0ffee", "some CPU", "corpus-1", "2.13", *map(str, OOM.values()))
    diagnosed = ("inf in layer <2>", "queries [0, 64]", "90.5", "of a later version")
    assert [fact for fact in (*told, *diagnosed) if fact.removesuffix(".0") not in page.text] == []
    for secret in (str(sweep), "/home/me"):
        assert secret not in page.html, "reports are passed on"
    # the report is no run, and the same runs give the same page
    assert report_on(sweep).html == page.html


def test_means_over_seeds_beside_the_baseline(page):
    rows = {(row["variant"], row["seq_len"]): row for row in page.rows}
    row = rows["no_rescale", "512"]
    # losses of 1.6 and 2.6, speeds of 400 and 401, 1000 and 1001: the deviations are 0.7
    assert re.findall(r"[\d.]+", row["val/loss"]) == ["2.100", "0.707"]
    assert re.findall(r"[\d.]+", row["val/loss_exact"]) == ["2.600", "0.707"]
    assert re.findall(r"[\d,]+", row["tokens/s"]) == ["400", "1"]
    assert re.findall(r"[\d,]+", row["steps alone"]) == ["1,000", "1"]
    assert row["beside baseline"].startswith("+0.500") and row["peak GiB"].startswith("0.25")
    assert row["status"] == "2 completed"
    # runs that diverged or ran out of memory have no mean
    for dead in (rows["naive", "512"], rows["no_max", "512"]):
        assert dead["val/loss"] == dead["peak GiB"] == "-"


def by_title(charts: list[dict]) -> dict[str, dict]:
    """The data of each chart."""
    return {chart["description"]: chart["datasets"] for chart in charts}


def losses(runs: list[Run]) -> tuple[dict[str, dict], str]:
    """The data of their charts, and the note on what these leave out."""
    charts, note = loss_charts(runs, looks_of(runs))
    return by_title(charts), note


def test_a_curve_is_the_mean_over_seeds_and_ends_in_a_cross(sweep):
    runs = load_runs([sweep])
    of_length = [[run for run in runs if run.seq_len == length] for length in (256, 512)]
    short, long = (losses(own)[0]["Loss under exact attention"] for own in of_length)
    (mean,) = [row for row in short["means"] if row["variant"] == "no_rescale"]
    curves = [row["value"] for row in short["points"] if row["variant"] == "no_rescale"]
    assert mean["value"] == pytest.approx([(a + b) / 2 for a, b in zip(*curves, strict=True)])
    # the last evaluation of the diverged runs was at step 200
    ends = [(row["variant"], row["tokens"]) for row in long["ends"]]
    assert ends == [("no_max", 200 * 16 * 512)] * 2 and not short["ends"]


def test_memory_and_speed_against_length(sweep):
    runs = load_runs([sweep])
    memory, speed = by_title(cost_charts(runs, looks_of(runs))).values()
    tiled = {row["seq_len"]: row["value"] for row in memory["dots"] if row["variant"] == "tiled"}
    assert tiled == {256: 0.0625, 512: 0.25}
    ended = {(row["variant"], row["seq_len"], row["ended"]) for row in memory["ends"]}
    assert ended == {("naive", 512, "oom")} and not speed["ends"]
    assert {row["value"] for row in speed["dots"]} == {1000.0, 1001.0}


def test_one_variant_has_no_baseline_and_a_number_of_400_digits_no_room(tmp_path):
    write_run(tmp_path / "0", "tiled", tokens_per_sec=1e299)
    write_run(tmp_path / "1", "tiled", seed=1, tokens_per_sec=10**400)
    (row,) = report_on(tmp_path).rows
    assert "beside baseline" not in row and "tokens/s" not in row


def test_no_panel_shows_rounding(tmp_path):
    write_seeds(tmp_path, "tiled", 1.6, 1.7)
    write_seeds(tmp_path, "naive", 1.6004, 1.7004, gap=0.0005)
    charts, note = losses(load_runs([tmp_path]))
    assert {*charts} == {"Loss under its own attention", "Training loss"} and "0.001" in note


def test_of_runs_that_were_not_evaluated_no_loss_is_claimed(tmp_path):
    """A regression test: the page said that exact attention gives the same losses."""
    run = write_run(tmp_path / "0", "no_rescale")
    for name in ("summary.json", "metrics.jsonl"):
        text = (run / name).read_text()
        (run / name).write_text(re.sub(r'"val/\w+": [^,}]+, |, "val/\w+": [^,}]+', "", text))
    charts, note = losses(load_runs([tmp_path]))
    assert {*charts} == {"Training loss"} and "exact" not in note
    assert "evaluated" in report_on(tmp_path).text


def test_losses_far_above_the_first_are_named_and_leave_the_axis_alone(tmp_path):
    run = write_run(tmp_path / "0", "tiled", status="diverged", first_bad_step=260)
    rows = read_lines(run / "metrics.jsonl")
    rows[-2]["val/loss"] = 5e9
    write_lines(run / "metrics.jsonl", rows)
    charts, note = losses(load_runs([tmp_path]))
    (cross,) = charts["Loss under its own attention"]["ends"]
    assert "5e+09" in note and cross["value"] == 5e9 and cross["at"] < 10


def test_each_attention_has_its_colour_whatever_ran_beside_it(tmp_path):
    twelve_variants(tmp_path / "many")
    write_run(tmp_path / "one/0", "tiled")
    many, one = (looks_of(load_runs([tmp_path / name])) for name in ("many", "one"))
    assert many["tiled"] == one["tiled"]
    assert len({(look.hue, look.shape, *look.dash) for look in many.values()}) == len(many) == 13
    assert {name for name, look in many.items() if look.dash[1]} == {"no_max", "no_rescale"}


def test_what_casts_doubt_is_told(tmp_path):
    write_run(tmp_path / "0", "triton", loss=2.0, gap=0.1)
    resumed = {"step": 300, "attention": [], "changed": {"optim.lr": [None, 0.1]}}
    starts = [{"step": 0, "attention": [[0, "no_rescale"]], "changed": {}}, resumed]
    write_run(tmp_path / "1", "no_rescale", loss=2.0, gap=0.5, starts=starts)
    other = {"data_fingerprint": "corpus-2", "hardware": {"cpu": "another CPU"}}
    write_run(tmp_path / "2", "naive", loss=2.0, gap=0.0008, env=other)  # as dtypes differ
    write_lines(tmp_path / "index.jsonl", [{"job": job, "dir": str(job)} for job in range(5)])
    text = report_on(tmp_path).text
    (belied,) = re.findall(r"(\w+) is labelled exact and is not.*?2\.000.*?2\.100", text)
    assert belied == "triton"
    assert all(each in text for each in ("jobs, 2 never started", "corpus-2", "optim.lr=0.1"))
    assert "different data" in text and "another CPU" in text.partition("Where the numbers")[0]


def test_tokenizers_compare_by_bits_per_byte(tmp_path):
    for name, bpb in (("byte", 2.1), ("bpe", 1.9)):
        held_out = {"val/bpb": bpb, "val/bpb_exact": bpb, "env": {"data_fingerprint": name}}
        write_run(tmp_path / name, "tiled", extra=(f"tokenizer={name}",), **held_out)
    page = report_on(tmp_path)
    assert {row["variant"]: row["val/bpb_exact"] for row in page.rows} == {
        "tiled tokenizer=byte": "2.100",
        "tiled tokenizer=bpe": "1.900",
    }
    assert "val/bpb" in page.text


# a file, the first match of what in it becomes what, and what is told
DAMAGES = {
    "torn summary": ("summary.json", r"[^{]+\Z", "", "summary.json"),
    "mistyped summary": ("summary.json", r'des": \[', 'des": [3, ', "int"),
    "torn env": ("env.json", "}", "", "env.json"),
    "torn config": ("config.yaml", "}", "", "config.yaml"),
}


def test_damaged_runs_are_named_and_the_others_reported(tmp_path):
    write_seeds(tmp_path, "naive", *[2.6] * len(DAMAGES))
    for number, (file, was, now, _) in enumerate(DAMAGES.values()):
        path = tmp_path / str(number) / file
        path.write_text(re.sub(was, now, path.read_text(), count=1))
    write_seeds(tmp_path, "tiled", 1.6, 1.7)
    write_run(tmp_path / "mistyped", "sdpa", env={"hardware": 3, "versions": [1]})
    write_run(tmp_path / "killed", "flex", status="unfinished")
    runs = {run.place: run for run in load_runs([tmp_path])}
    for number, name in enumerate(DAMAGES):
        run = runs[str(number)]
        assert run.status == "damaged" and DAMAGES[name][-1] in run.summary["error"], name
    page = report_on(tmp_path)
    assert {row["variant"]: row["status"] for row in page.rows if row["variant"] in BACKENDS} == {
        "tiled": "2 completed",
        "sdpa": "1 completed",
        "flex": "1 unfinished",
    }
    assert [row["val/loss"][:5] for row in page.rows if row["variant"] == "tiled"] == ["1.650"]
    assert page.text.count(" is damaged") == len(DAMAGES) - 1
    assert "variants 3 · seeds 2" in page.text


def test_runs_that_died_are_told_once(tmp_path):
    """A regression test: a failed job had a row in every table, and `unknown:` in every fact."""
    write_run(tmp_path / "0", "tiled")
    write_run(tmp_path / "1", "flex", status="failed", error="no such <corpus>")
    write_run(tmp_path / "2", "sdpa", status="interrupted", steps_done=305)
    (tmp_path / "3").mkdir()
    died = {"dir": "3", "status": "failed", "error": "CUDA <died>", "attention": "triton"}
    write_lines(tmp_path / "index.jsonl", [died, {"job": 1}, [], "x"])
    page = report_on(tmp_path)
    assert page.text.count("no such <corpus>") == page.text.count("CUDA <died>") == 1
    assert {row["variant"]: row["status"] for row in page.rows} == {
        "tiled": "1 completed",
        "flex": "1 failed",
        "sdpa": "1 interrupted",
        "triton": "1 unfinished",
    }
    # losses of before the last step are no result
    assert [row["variant"] for row in page.rows if row["val/loss"] != "-"] == ["tiled"]


def test_everything_embedded_is_escaped(tmp_path):
    nasty = "<script>alert(1)</script>&\"'|`*_$\\frac$"
    env = {"commit": nasty, "hardware": {nasty: nasty}}
    write_run(tmp_path / "0", nasty, extra=(f"data.path={nasty}",), env=env)
    said = {"first_bad_step": 240, "diagnosis": {"message": nasty, nasty: nasty}}
    write_run(tmp_path / "1", "no_max", status="diverged", **said)
    write_run(tmp_path / "2", "x\ud800", status="failed", error=nasty)
    summary = tmp_path / "2/summary.json"
    summary.write_text(summary.read_text().replace('"failed"', json.dumps(nasty)))
    page = report_on(tmp_path)
    assert nasty in page.text and "<script>alert" not in page.html
