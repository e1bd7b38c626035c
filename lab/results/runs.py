"""The sections of results/README.md about training runs: what they learnt, what they took, how they
ended.
"""

from itertools import combinations
from statistics import fmean
from typing import Any

from lab.results.headline import crossing, draw_headline, points
from lab.results.tables import FOLDER, finite, groups, load, plain, section, spread, table
from scripts.cross_eval_matrix import draw as draw_cross_eval
from scripts.plan import predict_run
from scripts.plots import COLORS

SPEED = "tokens/s, steps alone"  # the head of every column of step_speed()


def step_speed(run: dict[str, Any]) -> float | None:
    """Tokens per second of the steps alone. Where the wall clock's was not measured beside it,
    tokens_per_sec has that meaning.
    """
    return run.get("step_tokens_per_sec", run.get("tokens_per_sec"))


def evaluated(run: dict[str, Any]) -> dict[int, tuple[float, float]]:
    """Step to (val/loss, val/loss_exact), where both are finite."""
    curves = run["curves"]
    rows = zip(curves["step"], curves["val/loss"], curves["val/loss_exact"], strict=True)
    return {
        step: (own, exact) for step, own, exact in rows if own is not None and exact is not None
    }


def planned_steps(run: dict[str, Any]) -> str:
    return next(
        override.removeprefix("steps=")
        for override in run["overrides"]
        if override.startswith("steps=")
    )


def diagnosis(run: dict[str, Any]) -> str:
    """The sentence; older runs recorded nothing else."""
    return run["diagnosis"]["message"] if isinstance(run["diagnosis"], dict) else run["diagnosis"]


def headline() -> str:
    """The two defects beside exact attention at GPT-2's size, with what their weights are worth
    under every attention.
    """
    data, judged = load("headline_h200"), load("headline_cross_eval_h200")
    draw_headline(data["runs"], load("defects_retrieval")["runs"], FOLDER / "headline.png")
    draw_cross_eval(judged["rows"], FOLDER / "headline_cross_eval.png")
    by_variant = groups(data["runs"], lambda run: (run["attention"], run["dtype"]))
    rows = []
    for (name, dtype), runs in by_variant.items():
        bad = finite(runs, "first_bad_step")
        own = "not finite" if bad else spread(finite(runs, "val/loss"))
        scores = "/".join(f"{run['max_score']:.1f}" for run in runs)
        ended = (
            f"died at step {'/'.join(map(str, bad))}" if bad else f"{runs[0]['steps_done']:,} steps"
        )
        rows.append([name, dtype, ended, own, spread(finite(runs, "val/loss_exact")), scores])
    run = data["runs"][0]
    step = crossing(by_variant["triton", "bfloat16"], by_variant["no_rescale", "bfloat16"])
    what = (
        f"{run['parameters']:,} parameters (GPT-2's 12 layers of 12 heads of 64, byte "
        f"vocabulary), {run['seq_len']:,} tokens, "
        f"{run['tokens'] // run['steps_done']:,} tokens a step, PyTorch's own source as text, "
        "tiles of 64 keys, all in the Triton kernels. "
        f"The curves of no_rescale and exact attention cross: from step {step} on no_rescale is "
        "behind for good."
    )
    head = [
        "attention",
        "dtype",
        "ended",
        "held-out loss, own attention",
        "same weights, exact attention",
        "largest score",
    ]
    pictures = (
        "![headline](headline.png)\n\n![trained under x evaluated under](headline_cross_eval.png)"
    )
    return section(data, what, table(head, rows), pictures)


def text() -> str:
    """The two defects beside exact attention on text: loss under their own attention and under
    exact attention.
    """
    from matplotlib import pyplot

    data = load("defects_text")
    rows = []
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    # runs of one dtype are compared at the last step at which all that did not diverge were
    # evaluated
    compared = {
        dtype: max(
            set.intersection(*({*evaluated(run)} for run in runs if run["status"] != "diverged"))
        )
        for dtype, runs in groups(data["runs"], lambda run: run["dtype"]).items()
    }
    for (name, dtype), runs in groups(
        data["runs"], lambda run: (run["attention"], run["dtype"])
    ).items():
        bad = finite(runs, "first_bad_step")
        own = [] if bad else [evaluated(run)[compared[dtype]][0] for run in runs]
        exact = (
            finite(runs, "val/loss_exact")
            if bad
            else [evaluated(run)[compared[dtype]][1] for run in runs]
        )
        rows.append(
            [
                name,
                dtype,
                "/".join(map(str, bad)) if bad else compared[dtype],
                spread(own) if own else "not finite",
                spread(exact),
                "/".join(f"{run['max_score']:.1f}" for run in runs),
                diagnosis(runs[0]) if bad else "trains",
            ]
        )
        for run in runs if dtype == "bfloat16" or name == "no_max" else []:
            for axis, column in zip(axes, ("val/loss", "val/loss_exact"), strict=True):
                label = (
                    f"{name}, {dtype}, schedule of {planned_steps(run)}" if run is runs[0] else None
                )
                style = {
                    "linestyle": ":" if dtype == "float32" else "-",
                    "marker": "x" if run["status"] == "diverged" else None,
                }
                steps, losses = points(run, column)
                if steps:
                    axis.plot(steps, losses, color=COLORS[name], label=label, **style)
    axes[0].set(
        title="held-out loss under the run's own attention",
        xlabel="optimizer step",
        ylabel="nats per byte",
    )
    axes[1].set(title="the same weights under exact attention", xlabel="optimizer step")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(FOLDER / "defects_text.png", dpi=150)
    head = [
        "attention",
        "dtype",
        "step",
        "held-out loss, own attention",
        "same weights, exact attention",
        "largest score",
        "what happened",
    ]
    return section(data, table(head, rows), "![losses](defects_text.png)")


def retrieval() -> str:
    """Accuracy on last_write by tile size, and where no_max overflows."""
    from matplotlib import pyplot

    data = load("defects_retrieval")
    rows = []
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    by_variant = groups(data["runs"], lambda run: (run["attention"], run["options"]["block_kv"]))
    for (name, block_kv), runs in sorted(by_variant.items()):
        own, exact, bad = (
            finite(runs, "val/accuracy"),
            finite(runs, "val/accuracy_exact"),
            finite(runs, "first_bad_step"),
        )
        ended = f"diverged at step {'/'.join(map(str, bad))}" if bad else "completed"
        accuracies = [spread(x, "{:.1%}") if x and not bad else "-" for x in (own, exact)]
        rows.append(
            [
                name,
                block_kv,
                *accuracies,
                "/".join(f"{run['max_score']:.0f}" for run in runs),
                ended,
            ]
        )
    by_tile = {
        block_kv: finite(runs, "val/accuracy")
        for (name, block_kv), runs in sorted(by_variant.items())
        if name == "no_rescale"
    }
    for block_kv, values in by_tile.items():
        axes.plot([block_kv] * len(values), values, "o", color=COLORS["no_rescale"], alpha=0.6)
    axes.plot(
        list(by_tile),
        [fmean(values) for values in by_tile.values()],
        color=COLORS["no_rescale"],
        label="no_rescale",
    )
    axes.axhline(
        fmean(finite(by_variant["tiled", 8], "val/accuracy")),
        color=COLORS["tiled"],
        label="exact (tiled)",
    )
    axes.set(
        xscale="log",
        xlabel="keys of a tile (sequence of 128)",
        ylabel="held-out accuracy",
        ylim=(0, 1.03),
        title="last_write",
    )
    axes.set_xticks(list(by_tile), [str(x) for x in by_tile])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(FOLDER / "defects_retrieval.png", dpi=150)
    head = [
        "attention",
        "block_kv",
        "accuracy, own attention",
        "same weights, exact attention",
        "largest score",
        "ended",
    ]
    return section(data, table(head, rows), "![accuracy](defects_retrieval.png)")


def paired() -> str:
    """Do exact attentions train the same? Differences of the training loss, step by step, between
    runs that share seed and data.
    """
    data = load("paired_curves")
    names = {
        id(run): run["attention"]
        + (f" {run['options']['backend']}" if run["attention"] == "sdpa" else "")
        for run in data["runs"]
    }
    rows = []
    for seed, runs in groups(data["runs"], lambda run: run["seed"]).items():
        for a, b in combinations(runs, 2):
            differences = [
                x - y
                for x, y in zip(a["curves"]["train/loss"], b["curves"]["train/loss"], strict=True)
                if x is not None and y is not None
            ]
            noise = a["attention"] == b["attention"] == "sdpa"
            rms = fmean(x * x for x in differences) ** 0.5
            rows.append(
                (
                    noise,
                    seed,
                    f"{names[id(a)]} - {names[id(b)]}",
                    fmean(differences),
                    rms,
                    max(map(abs, differences)),
                    len(differences),
                )
            )
    floor = [row[4] for row in rows if row[0]]
    head = ["seed", "pair", "mean difference", "rms difference", "largest", "steps"]
    body = [
        [seed, pair, f"{mean:+.5f}", f"{rms:.5f}", f"{top:.4f}", n]
        for _, seed, pair, mean, rms, top, n in sorted(rows, key=lambda row: row[:2])
    ]
    floor = (
        f"Float noise alone, PyTorch's own kernels against each other: rms {min(floor):.5f} to "
        f"{max(floor):.5f}."
    )
    others = [row[4] for row in rows if not row[0]]
    ours = f"Pairs with naive, tiled or triton in them: rms {min(others):.5f} to {max(others):.5f}."
    return section(data, f"{floor} {ours}", table(head, body))


def predicted() -> str:
    """The memory calculator beside the peaks that training runs measured."""
    names = [
        name
        for name in ("training_h200", "paired_curves", "defects_text")
        if load(name)["environment"]["hardware"]["gpu"]
    ]
    rows = []
    for run in (
        run
        for name in names
        for run in load(name)["runs"]
        if run["seed"] == 0 and run["status"] == "completed"
    ):
        found, peak = predict_run(run), run["memory/peak_gib"]
        settings = " ".join(
            x
            for x in run["overrides"]
            if x.startswith(("attention", "model", "seq_len", "batch_size"))
        )
        rows.append(
            [
                settings,
                run["dtype"],
                "compiled" if run["compiled"] else "eager",
                f"{found:.2f}",
                f"{peak:.2f}",
                f"{found / peak - 1:+.1%}",
            ]
        )
    head = ["run", "dtype", "", "predicted GiB", "measured GiB", "error"]
    return section(
        load(names[0]),
        "Predicted by `training/plan.py`: counted from the code, but for the libraries' 64 MiB of "
        "workspaces, read off these runs.",
        table(head, rows),
    )


def training() -> str:
    data = load("training_h200")
    rows = [
        [
            " ".join(run["overrides"][:4]),
            run["status"],
            f"{run['parameters']:,}",
            f"{step_speed(run):,.0f}",
            f"{run['memory/peak_gib']:.2f}",
            f"{run['val/loss']:.3f}",
        ]
        for run in data["runs"]
    ]
    return section(
        data, table(["run", "status", "parameters", SPEED, "peak GiB", "val/loss"], rows)
    )


def nanogpt() -> str:
    """Our training beside nanoGPT's."""
    data = load("nanogpt_h200")
    rows = []
    for seq_len, found in groups(data["speed"], lambda row: row["seq_len"]).items():
        theirs = [row for row in found if row["who"] == "nanogpt"]
        speed, peak = (
            fmean(step_speed(row) for row in theirs),
            max(row["peak_gib"] for row in theirs),
        )
        for row in found:
            times = f"{step_speed(row):,.0f} ({row['p20']:,.0f} to {row['p80']:,.0f})"
            against = [f"{step_speed(row) / speed:.2f}", f"{row['peak_gib'] / peak:.2f}"]
            rows.append(
                [
                    plain(row["who"]),
                    f"{seq_len:,}",
                    row["batch_size"],
                    times,
                    f"{row['peak_gib']:.2f}",
                    *against,
                ]
            )
    settings, curves = data["settings"], data.get("curves")
    windows = [row["windows"] for row in data["speed"]]
    ours = f"`{' '.join(['python train.py', *settings['overrides']])}`"
    what = (
        f"{ours} with each attention, and the step of nanoGPT's train.py, first and last, in "
        "processes of their own: "
        f"{settings['model']}, vocabulary {settings['vocab_size']:,}, {settings['tokens']:,} "
        "tokens a step, the same initial weights and "
        f"batches. Tokens per second of the steps alone: median of {min(windows)} to "
        f"{max(windows)} times ten steps (20th to 80th "
        "percentile); the ratios are to the mean of nanoGPT's two runs."
    )
    head = [
        "training",
        "seq_len",
        "batch",
        SPEED,
        "peak GiB",
        "speed / nanoGPT's",
        "memory / nanoGPT's",
    ]
    parts = [what, table(head, rows)]
    if curves:
        lines = [
            [name, f"{curves['rms'][name]:.1e}", f"{curves['mean'][name]:+.1e}"]
            for name in curves["rms"]
        ]
        where = f"Loss of {curves['steps']} steps at {curves['seq_len']:,} tokens, minus nanoGPT's"
        noise = (
            "noise: nanoGPT again, its weights moved by a rounding; and nanoGPT in other kernels, "
            "which round in every step, as ours do"
        )
        parts += [f"{where} ({noise}):", table(["training", "rms", "mean"], lines)]
    return section(data, *parts)


def profile() -> str:
    """The parts of a training step."""
    data = load("profile_h200")
    what = (
        f"`python -m scripts.profile {' '.join(data['overrides'])}`: {data['n']} steps of "
        f"{data['batch_size'] * data['accumulation_steps']} x {data['seq_len']:,} tokens, "
        "the GPU's time."
    )
    rows = [
        [row["part"], f"{row['ms']:.2f}", f"{row['stdev_ms']:.2f}", f"{row['share']:.1%}"]
        for row in data["parts"]
    ]
    return section(data, what, table(["part", "ms", "standard deviation", "share"], rows))


def million() -> str:
    """One step of a million tokens in one sequence, in the memory of one GPU."""
    data = load("million_h200")
    rows = [
        [
            f"`python train.py {' '.join(run['overrides'])}`",
            f"{run['seq_len']:,}",
            f"{run['wall_seconds']:.0f}",
            f"{run['memory/peak_gib']:.1f}",
            f"{run['memory/predicted_gib']:.1f}",
            f"{run['curves']['train/loss'][0]:.3f}",
        ]
        for run in data["runs"]
    ]
    head = ["run", "tokens in one sequence", "seconds", "peak GiB", "predicted GiB", "train/loss"]
    what = (
        "GPT-2, one step: forward, backward, optimizer. The seconds are the whole run's, from its "
        "start to its checkpoint."
    )
    return section(data, what, table(head, rows))


def tricks() -> str:
    """What million_tokens does to fit, against the same training without it."""
    data = load("tricks_h200")
    small, large = sorted(data["runs"], key=lambda run: run["memory/peak_gib"])
    apart = [
        x - y
        for x, y in zip(small["curves"]["train/loss"], large["curves"]["train/loss"], strict=True)
    ]
    what = (
        f"GPT-2 on one sequence of {small['seq_len']:,} tokens, {len(apart)} steps, with "
        "attention's inputs and output kept and the rest "
        "computed again, norms, projections and MLP in chunks of 16,384 tokens, the blocks' "
        "inputs in the host's memory; and without all "
        f"that. The losses differ by {fmean(x * x for x in apart) ** 0.5:.5f} nats (rms), at most "
        f"by {max(map(abs, apart)):.5f}."
    )
    rows = [
        [
            f"`{' '.join(run['overrides'][:-3])}`",
            f"{step_speed(run):,.0f}",
            f"{run['memory/peak_gib']:.2f}",
        ]
        for run in (small, large)
    ]
    return section(data, what, table(["run", SPEED, "peak GiB"], rows))


def kept() -> str:
    """Each way to keep less of a block, on the same batches."""
    data = load("kept_h200")
    rows = [
        [
            " ".join(setting for setting in run["overrides"] if setting.startswith("model.")),
            "compiled" if run["compiled"] else "eager",
            f"{step_speed(run):,.0f}",
            f"{run['memory/peak_gib']:.2f}",
            f"{run['memory/predicted_gib']:.2f}",
            f"{run['memory/predicted_gib'] / run['memory/peak_gib'] - 1:+.1%}",
            f"{run['curves']['train/loss'][-1]:.3f}",
        ]
        for run in data["runs"]
    ]
    first = data["runs"][0]
    command = " ".join(
        setting for setting in first["overrides"] if not setting.startswith("model.")
    )
    what = (
        f"`python train.py {command} ...`: {first['steps_done']} steps of 262,144 tokens "
        "each, one run a "
        "row, compiled where compile=auto does so. The speed is that of all steps but "
        "the first three."
    )
    head = ["setting", "", SPEED, "peak GiB", "predicted GiB", "error", "train/loss at the end"]
    return section(data, what, table(head, rows))


def wall() -> str:
    """Tokens a second by the wall clock, from outside the runs, before and after
    attention/max_score became cheap.
    """
    data = load("wall_h200")
    rows = []
    for run in data["runs"]:
        before, longest = run["tree"] == "before", run["each"][-1]
        # before, tokens_per_sec was that of the steps alone
        steps = longest["tokens_per_sec" if before else "step_tokens_per_sec"]
        rows.append(
            [
                f"{run['seq_len']:,}",
                f"{run['tree']} ({run['commit']})",
                f"{steps:,.0f}",
                f"{run['by_arrival']:,.0f}",
                f"{1 - run['by_arrival'] / steps:.1%}",
                f"{run['slope']['tokens_per_sec']:,.0f} "
                f"({' to '.join(f'{speed:,.0f}' for speed in run['slope']['of_two'])})",
                f"{longest['tokens'] / longest['seconds']:,.0f}",
                "/".join(str(each["steps"]) for each in run["each"]),
            ]
        )
    what = (
        f"`python -m lab.wall {' '.join(data['overrides'])}`. This is GPT-2 with 32,768 "
        "tokens a step and a row of metrics every 10 "
        "steps. Each run is a process of its own, n=1 a length; both checkouts take turns on one "
        "GPU. By arrival: rows are timed as they "
        "arrive in metrics.jsonl. By whole runs: the slope of wall time against steps, with the "
        "least and the most of any two runs. "
        "Start-up differs by seconds from run to run, which blurs the slope. The last column "
        "counts all, imports and compilation too."
    )
    head = [
        "seq_len",
        "",
        "steps alone, as reported",
        "by arrival of rows",
        "lost",
        "by whole runs",
        "longest run, all in all",
        "steps",
    ]
    return section(data, what, table(head, rows))


def card() -> str:
    """A sweep of attentions with different options: its statuses, both speeds, its memory."""
    data = load("card_h200")
    literal = data["literal"]

    def line(run: dict[str, Any]) -> list[str]:
        options = ", ".join(
            x.removeprefix("attention.") for x in run["overrides"] if x.startswith("attention.")
        )
        unread = ", ".join(key.removeprefix("attention.") for key in run.get("left_out") or {})
        figures = (
            ("val/loss", "{:.3f}"),
            ("tokens_per_sec", "{:,.0f}"),
            ("step_tokens_per_sec", "{:,.0f}"),
            ("memory/peak_gib", "{:.2f}"),
        )
        cells = [
            "-" if run["status"] == "oom" or run.get(key) is None else form.format(run[key])
            for key, form in figures
        ]
        return [
            run["attention"],
            f"{run['seq_len']:,}",
            options,
            unread or "-",
            run["status"],
            *cells,
            f"{run['wall_seconds']:.0f}",
        ]

    what = (
        f"The command is `{literal['command']}`. It was stopped in job "
        f"{literal['stopped_in_job']}: tiled at 8,192 tokens takes "
        f"{literal['its_seconds_a_step']:.0f} s a step, 45 minutes in all, and no_max and "
        "no_rescale run the same loop. Its first three "
        "jobs ended as their rows below. The rows come from two commands, one for each length; "
        "the one at 8,192 leaves tiled out and adds "
        "`attention.impl=triton`. One run a row. In runs this short, start-up and compilation "
        "dominate tokens/s."
    )
    head = [
        "attention",
        "seq_len",
        "asked for",
        "left out",
        "status",
        "val/loss",
        "tokens/s",
        "tokens/s, steps alone",
        "peak GiB",
        "seconds",
    ]
    return section(data, what, table(head, map(line, data["runs"])))


def sweep() -> str:
    """Jobs of one process one after the other, some without enough memory, some that diverge."""
    data = load("sweep_h200")
    rows = [
        [
            run["overrides"][0].partition("=")[2],
            f"{run['seq_len']:,}",
            run["status"],
            *(
                form.format(value) if value else "-"
                for value, form in ((run.get("val/loss"), "{:.3f}"), (step_speed(run), "{:,.0f}"))
            ),
            f"{run['memory/at_start_gib']:.4f}",
            "-" if run["status"] == "oom" else f"{run['memory/peak_gib']:.2f}",
            f"{run['wall_seconds']:.0f}",
        ]
        for run in data["runs"]
    ]
    command = " ".join(["python", *data["environment"]["command"][1:]])
    what = (
        f"`{command}`, where DIR holds no_max on the kernels (`impl: triton`) as a choice of its "
        f"own: {data['wall_seconds']} s from start "
        "to table. Memory at a job's start is what the jobs before it left behind: what the first "
        "computation leaves stays, and nothing is "
        "added. The learning rate is high so that no_max breaks soon. It is none to compare "
        "losses at: those of exact attentions come "
        "apart, at 32,768 tokens after a jump to 6.84 at step 5, until which they differ by 0.001."
    )
    head = [
        "attention",
        "seq_len",
        "status",
        "val/loss",
        SPEED,
        "GiB at start",
        "peak GiB",
        "seconds",
    ]
    return section(data, what, table(head, rows))


def survival() -> str:
    """Runs that were killed or harmed and resumed, against one that nothing disturbed."""
    data = load("kills")
    cases = {
        "killed (SIGKILL) while it trains": [
            each for each in data["kills"] if not each["in_a_save"]
        ],
        "killed (SIGKILL) while it saves": [each for each in data["kills"] if each["in_a_save"]],
        "disk full (a limit on file sizes: a write fails half way)": [
            each for each in data["harms"] if each["harm"] == "disk full"
        ],
        "latest checkpoint damaged": [
            each for each in data["harms"] if each["harm"] == "latest damaged"
        ],
        "all checkpoints damaged": [
            each for each in data["harms"] if each["harm"] == "all damaged"
        ],
        "metrics.jsonl, overrides.yaml or config.yaml damaged": [
            each for each in data["harms"] if each["harm"] == "record damaged"
        ],
    }
    rows = []
    for case, found in cases.items():
        outcomes = [each["outcome"] for each in found]
        same, refused = outcomes.count("identical"), outcomes.count("refused")
        rows.append([case, len(found), same, refused, len(found) - same - refused])
    what = (
        "Each is a training of its own on one CPU core, disturbed at a random moment and resumed. "
        "Identical: weights, optimizer, random "
        "state and every computed row of metrics.jsonl are, to the bit, those of the run that "
        "nothing disturbed. Refused: one line says "
        "why, and no file of the run has changed."
    )
    return section(
        data, what, table(["what happened", "n", "identical", "refused", "anything else"], rows)
    )


def laptop() -> str:
    data = load("laptop")
    rows = [[name, value] for name, value in data["figures"].items()]
    return section(data, table(["what", "figure"], rows))
