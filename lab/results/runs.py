"""The sections of results/README.md about training runs: what they learnt, what they cost, how they
ended.
"""

import re
from itertools import combinations
from statistics import fmean, median

from lab.results.curves import (
    crossing,
    differences,
    draw_headline,
    draw_retrieval,
    draw_text,
    root_mean_square,
)
from lab.results.tables import (
    FOLDER,
    finite,
    formatted,
    joined,
    load,
    plain,
    rounded,
    section,
    spread,
    table,
)
from scripts import recall
from scripts.cross_eval_matrix import draw as draw_cross_eval
from scripts.plan import predict_run
from scripts.tables import Row, by, grouped
from training.names import WATCHING, name_runs

OWN, EXACT = "held-out loss, own attention", "same weights, exact attention"


def with_speed(run: Row) -> Row:
    """The run with `speed`, tokens per second of the steps alone. In runs without a separate
    step_tokens_per_sec, tokens_per_sec means that.
    """
    return run | {"speed": run.get("step_tokens_per_sec", run.get("tokens_per_sec"))}


def chosen(run: Row, *prefixes: str) -> str:
    """The settings from the run's command line that begin with one of `prefixes`."""
    return " ".join(setting for setting in run["overrides"] if setting.startswith(prefixes))


def evaluated(run: Row) -> dict[int, tuple[float, float]]:
    """(val/loss, val/loss_exact) by step, if both are finite."""
    curves = run["curves"]
    rows = zip(curves["step"], curves["val/loss"], curves["val/loss_exact"], strict=True)
    return {step: (own, exact) for step, own, exact in rows if None not in (own, exact)}


def headline() -> str:
    """The two defects beside exact attention at GPT-2's size, with what their weights are worth
    under every attention.
    """
    data, judged = load("headline_h200"), load("headline_cross_eval_h200")
    draw_headline(data["runs"], load("defects_retrieval")["runs"], FOLDER / "headline.png")
    draw_cross_eval(judged["rows"], FOLDER / "headline_cross_eval.png")
    by_variant = by(data["runs"], "attention", "dtype")
    rows = []
    for (name, dtype), runs in by_variant.items():
        bad = finite(runs, "first_bad_step")
        own = "not finite" if bad else spread(finite(runs, "val/loss"))
        ended = f"died at step {joined(bad)}" if bad else f"{runs[0]['steps_done']:,} steps"
        scores = joined(finite(runs, "max_score"), "{:.1f}")
        rows.append([name, dtype, ended, own, spread(finite(runs, "val/loss_exact")), scores])
    run = data["runs"][0]
    step = crossing(by_variant["triton", "bfloat16"], by_variant["no_rescale", "bfloat16"])
    what = (
        f"{run['parameters']:,} parameters (GPT-2's 12 layers of 12 heads of 64, byte "
        f"vocabulary), {run['seq_len']:,} tokens, {run['tokens'] // run['steps_done']:,} tokens a "
        "step, PyTorch's own source as text, tiles of 64 keys, all in the Triton kernels. The "
        f"curves of no_rescale and exact attention cross: from step {step} on no_rescale is behind "
        "for good."
    )
    head = ["attention", "dtype", "ended", OWN, EXACT, "largest score"]
    pictures = (
        "![headline](headline.png)\n\n![trained under x evaluated under](headline_cross_eval.png)"
    )
    return section(data, what, table(head, rows), pictures)


def findings() -> str:
    """The runs of the findings' recipes on a GPU: a line for each attention."""
    data = load("findings_h200")
    rows = []
    for variant, runs in by(data["runs"], "variant").items():
        gradients = [max(filter(None, run["curves"]["grad_norm"])) for run in runs]
        rows.append(
            [
                re.sub(r"lab\.findings\.|:BACKEND| block_q=\d+", "", variant),
                spread(finite(runs, "val/loss")),
                spread(finite(runs, "val/loss_exact")),
                joined(finite(runs, "max_score"), "{:.0f}"),
                joined(gradients, "{:.3g}"),
            ]
        )
    run = data["runs"][0]
    what = (
        f"{run['parameters']:,} parameters (6 layers, 6 heads of 64), {run['seq_len']:,} tokens, "
        f"{run['tokens'] // run['steps_done']:,} tokens a step, {run['steps_done']:,} steps, "
        "PyTorch's own source as text. Tiles have 64 keys where no block_kv is named. fp8 forward "
        "passes have one scale for a tensor."
    )
    head = ["attention", OWN, EXACT, "largest score", "largest norm of the gradient"]
    return section(data, what, table(head, rows))


def text() -> str:
    """The two defects beside exact attention on text: loss under their own attention and under
    exact attention.
    """
    data = load("defects_text")
    draw_text(data["runs"], FOLDER / "defects_text.png")
    # compare the runs of a dtype at the last step at which all that did not diverge were evaluated
    steps = {}
    for run in data["runs"]:
        if run["status"] != "diverged":
            steps.setdefault(run["dtype"], []).append(evaluated(run).keys())
    compared = {dtype: max(set.intersection(*map(set, each))) for dtype, each in steps.items()}
    rows = []
    for (name, dtype), runs in by(data["runs"], "attention", "dtype").items():
        bad = finite(runs, "first_bad_step")
        if bad:
            step, own, exact = joined(bad), "not finite", finite(runs, "val/loss_exact")
        else:
            step = compared[dtype]
            losses, exact = zip(*(evaluated(run)[step] for run in runs), strict=True)
            own = spread(losses)
        happened = runs[0]["diagnosis"] if bad else "trains"
        scores = joined(finite(runs, "max_score"), "{:.1f}")
        rows.append([name, dtype, step, own, spread(exact), scores, happened])
    head = ["attention", "dtype", "step", OWN, EXACT, "largest score", "what happened"]
    return section(data, table(head, rows), "![losses](defects_text.png)")


def retrieval() -> str:
    """Accuracy on last_write by tile size, and where no_max overflows."""
    data = load("defects_retrieval")
    draw_retrieval(data["runs"], FOLDER / "defects_retrieval.png")
    rows = []
    tiles = grouped(data["runs"], lambda run: (run["attention"], run["options"]["block_kv"]))
    for (name, block_kv), runs in sorted(tiles.items()):
        bad = finite(runs, "first_bad_step")
        ended = f"diverged at step {joined(bad)}" if bad else "completed"
        both = [finite(runs, column) for column in ("val/accuracy", "val/accuracy_exact")]
        accuracies = [spread(x, "{:.1%}") if x and not bad else "-" for x in both]
        scores = joined(finite(runs, "max_score"), "{:.0f}")
        rows.append([name, block_kv, *accuracies, scores, ended])
    accuracy = "accuracy, own attention"
    head = ["attention", "block_kv", accuracy, EXACT, "largest score", "ended"]
    return section(data, table(head, rows), "![accuracy](defects_retrieval.png)")


def needle() -> str:
    """Accuracy on needle at lengths beyond the training's, and the length at which it is lost."""
    what = (
        "One layer of two heads of 32, rotary positions, trained at 32 tokens to find the one "
        "write of a key among writes of seven others; chance is 12.5%. Each variant is evaluated "
        "under its own attention."
    )
    return recalled("recall_cpu", what)


def needle_of_eleven() -> str:
    what = (
        "`experiment=attentions_needle`: as above, with two layers and 300 steps. A window of 8 "
        "reaches 14 tokens back through two layers, one of 16 reaches 30. The second layer of SL "
        "sees all keys, and has not learnt to use them after 300 steps."
    )
    return recalled("attentions_needle_cpu", what)


def mqar() -> str:
    what = (
        "`experiment=mqar`: a key and its value are two tokens, and each key is queried once. "
        "There are 4 pairs at 64 tokens, 8 at 128 and 16 at 256, in Zoology's layout with a "
        "vocabulary of 64."
    )
    return recalled("mqar_cpu", what)


def recalled(name: str, what: str) -> str:
    """Accuracy by length from a JSON file of scripts.recall, and its picture."""
    data = load(name)
    recall.draw(data["rows"], FOLDER / f"{name}.png")
    lengths = sorted({row["length"] for row in data["rows"]})
    rows = []
    for variant, own in recall.variants(data["rows"]).items():
        found = recall.accuracies(own)
        cells = [spread(found[length], "{:.1%}") for length in lengths]
        rows.append([variant, *cells, recall.lost_at(own) or "-"])
    head = ["accuracy at", *lengths, "below one half at"]
    return section(data, what, table(head, rows), f"![accuracy by length]({name}.png)")


def attentions() -> str:
    """What people do to attention, beside exact attention: own and exact loss, memory, speed."""
    judged = (
        "Differential, linear and sigmoid attention are not softmax and are judged by their own "
        "loss. All others are judged by the loss of their weights under exact attention, with the "
        "same window, softcap, ALiBi or sinks."
    )
    small, again = load("attentions_h100"), load("attentions_exact_h200")
    alone = {name: runs[0] for name, runs in by_variant(load("attentions_speed_h200")).items()}
    head = ["variant", "judged by", "val/loss", "val/loss_exact", "val/bpb", "peak GiB"]
    what = (
        f"`experiment=attentions`: model=small, 2,048 tokens, 52 million tokens a run. {judged} "
        "Two runs shared a GPU. So the tokens/s are of the steps of shorter runs on an H200: 100 "
        "steps, each run alone on a GPU, with softcap in the Hopper kernels. Sigmoid attention "
        "with seeds 1 and 2 also ran on an H200, in blocks of 512 queries, which only saves "
        "memory. A dash was not measured. The runs of SSSL are newer: under torch 2.11 most "
        "layers of the former saw all keys. Exact attention in their version of this program, on "
        f"an H200: val/loss {spread(finite(again['runs'], 'val/loss'))}. "
        "[The report](../docs/attentions.html) has the curves."
    )
    rows = losses(small, "memory/peak_gib")
    for row in rows:
        row.append(f"{with_speed(alone[row[0]])['speed']:,.0f}" if row[0] in alone else "-")
    parts = [section(small, what, table([*head, "tokens/s"], rows))]
    large = load("attentions_gpt2_h100")
    what = (
        "At GPT-2's size (model=gpt2, 52 million tokens, one seed). The last column is tokens/s of "
        "the steps, one run on a GPU. SSSL's run is newer: part of its speed comes from GELU in "
        "the MLP's products."
    )
    rows = losses(large, "memory/peak_gib", "step_tokens_per_sec")
    parts.append(section(large, what, table([*head, "tokens/s"], rows)))
    tiny = load("attentions_cpu")
    what = "`experiment=attentions_cpu`: two layers of two heads of 32, 128 tokens, 819,200 tokens."
    parts.append(section(tiny, what, table(head[:-1], losses(tiny))))
    return "\n\n".join(parts)


def by_variant(data: Row) -> dict[str, list[Row]]:
    """The runs of sweeps by the names that a report gives them, without settings that change only
    what is recorded.
    """
    asked = [
        run | {"overrides": [x for x in run["overrides"] if not x.startswith(WATCHING)]}
        for run in data["runs"]
    ]
    named = zip(name_runs(asked), data["runs"], strict=True)
    groups = grouped(named, lambda pair: pair[0].variant)
    return {name: [run for _, run in pairs] for name, pairs in groups.items()}


def losses(data: Row, *figures: str) -> list[list[str]]:
    """A row for each variant, best first: what judges it, its losses, and these figures."""
    rows = []
    for variant, runs in by_variant(data).items():
        own = runs[0]["exact"] is False and not runs[0]["defect"]
        judged = "val/loss" if own else "val/loss_exact"
        columns = [spread(finite(runs, x)) for x in ("val/loss", "val/loss_exact", "val/bpb")]
        numbers = [fmean(finite(runs, figure)) for figure in figures]
        rows.append(
            [variant, judged, *columns, *(f"{x:,.0f}" if x > 99 else rounded(x) for x in numbers)]
        )
    return sorted(rows, key=lambda row: (row[1], row[2] if row[1] == "val/loss" else row[3]))


def paired() -> str:
    """Do exact attentions train the same? Differences of the training loss, step by step, between
    runs that share seed and data.
    """
    data = load("paired_curves")
    rows = []
    for seed, runs in by(data["runs"], "seed").items():
        for a, b in combinations(runs, 2):
            names = [" ".join([x["attention"], x["options"].get("backend", "")]) for x in (a, b)]
            apart = differences(a, b)
            figures = {"mean": fmean(apart), "rms": root_mean_square(apart)}
            figures |= {"largest": max(map(abs, apart)), "steps": len(apart)}
            noise = a["attention"] == b["attention"] == "sdpa"
            pair = " - ".join(name.strip() for name in names)
            rows.append({"noise": noise, "seed": seed, "pair": pair} | figures)
    columns = """
        seed             {seed}
        pair             {pair}
        mean difference  {mean:+.5f}
        rms difference   {rms:.5f}
        largest          {largest:.4f}
        steps            {steps}
    """
    rows.sort(key=lambda row: (row["noise"], row["seed"]))
    noise, ours = ([row["rms"] for row in rows if row["noise"] is kind] for kind in (True, False))
    what = (
        f"Float noise alone, PyTorch's own kernels against each other: rms {min(noise):.5f} to "
        f"{max(noise):.5f}. Pairs with naive, tiled or triton in them: rms {min(ours):.5f} to "
        f"{max(ours):.5f}."
    )
    return section(data, what, formatted(columns, rows))


def predicted() -> str:
    """The memory calculator beside the peaks that training runs measured."""
    files = [load(name) for name in ("training_h200", "paired_curves", "defects_text")]
    files = [data for data in files if data["environment"]["hardware"]["gpu"]]
    rows = []
    for run in (run for data in files for run in data["runs"]):
        if run["seed"] == 0 and run["status"] == "completed":
            settings = chosen(run, "attention", "model", "seq_len", "batch_size")
            predicted = {"settings": settings, "memory/predicted_gib": predict_run(run)}
            rows.append(with_error(run | predicted))
    columns = """
        run            {settings}
        dtype          {dtype}
        {how}
        predicted GiB  {memory/predicted_gib:.2f}
        measured GiB   {memory/peak_gib:.2f}
        error          {error:+.1%}
    """
    what = (
        "`training/plan.py` counts the predicted memory from the code, except for the libraries' "
        "64 MiB of workspaces, which come from these runs."
    )
    return section(files[0], what, formatted(columns, rows))


def with_error(run: Row) -> Row:
    """The run with the error of its predicted memory, and whether it was compiled."""
    error = run["memory/predicted_gib"] / run["memory/peak_gib"] - 1
    return run | {"error": error, "how": "compiled" if run["compiled"] else "eager"}


def training() -> str:
    data = load("training_h200")
    rows = [with_speed(run) | {"settings": " ".join(run["overrides"][:4])} for run in data["runs"]]
    columns = """
        run                    {settings}
        status                 {status}
        parameters             {parameters:,}
        tokens/s, steps alone  {speed:,.0f}
        peak GiB               {memory/peak_gib:.2f}
        val/loss               {val/loss:.3f}
    """
    return section(data, formatted(columns, rows))


def nanogpt() -> str:
    """Our training beside nanoGPT's."""
    data = load("nanogpt_h200")
    rows = []
    for found in by(data["speed"], "seq_len").values():
        found = [with_speed(row) | {"name": plain(row["who"])} for row in found]
        theirs = [row for row in found if row["who"] == "nanogpt"]
        speed, peak = fmean(finite(theirs, "speed")), max(finite(theirs, "peak_gib"))
        for row in found:
            ratios = {"faster": row["speed"] / speed, "larger": row["peak_gib"] / peak}
            rows.append(row | ratios)
    settings, curves = data["settings"], data["curves"]
    windows = finite(data["speed"], "windows")
    ours = f"`{' '.join(['python train.py', *settings['overrides']])}`"
    what = (
        f"{ours} with each attention, and the step of nanoGPT's train.py, first and last, in "
        f"processes of their own: {settings['model']}, vocabulary {settings['vocab_size']:,}, "
        f"{settings['tokens']:,} tokens a step, the same initial weights and batches. Tokens per "
        f"second of the steps alone: median of {min(windows)} to {max(windows)} times ten steps "
        "(20th to 80th percentile); the ratios are to the mean of nanoGPT's two runs."
    )
    columns = """
        training               {name}
        seq_len                {seq_len:,}
        batch                  {batch_size}
        tokens/s, steps alone  {speed:,.0f} ({p20:,.0f} to {p80:,.0f})
        peak GiB               {peak_gib:.2f}
        speed / nanoGPT's      {faster:.2f}
        memory / nanoGPT's     {larger:.2f}
    """
    noise = (
        "Noise is nanoGPT again, its weights moved by a rounding; and nanoGPT in other kernels, "
        "which round in every step, as ours do."
    )
    newer = load("nanogpt_curve_h100")
    return "\n\n".join(
        [
            section(data, what, formatted(columns, rows), noise, losses_apart(curves)),
            section(newer, "The losses again, of a newer version.", losses_apart(newer["curves"])),
        ]
    )


def losses_apart(curves: Row) -> str:
    """How far every run's losses are from nanoGPT's."""
    rms, mean = curves["rms"], curves["mean"]
    lines = [[name, f"{rms[name]:.1e}", f"{mean[name]:+.1e}"] for name in rms]
    head = f"loss of {curves['steps']} steps at {curves['seq_len']:,} tokens, minus nanoGPT's"
    return table([head, "rms", "mean"], lines)


def nanogpt_wall_table(data: Row) -> str:
    """Whole runs of our train.py beside whole runs of nanoGPT's."""
    rows, groups = [], by(data["runs"], "seq_len", "who")
    for ratio in data["ratios"]:
        whole, steps = ratio["seconds"], ratio["tokens_per_sec"]
        if len(steps["rounds"]) == 1:  # empty caches do not matter to the steps alone
            steps = dict.fromkeys(("least", "median", "most"), steps["rounds"][0])
        row = {"name": plain(ratio["who"]), "seq_len": ratio["seq_len"], "whole": whole}
        row |= {"alone": steps, "cold": whole["rounds"][0], "rounds": len(whole["rounds"])}
        for owner, who in {"theirs": "nanogpt", "ours": ratio["who"]}.items():
            first, *warm = groups[ratio["seq_len"], who]
            speed = median(finite(warm or [first], "tokens_per_sec"))
            seconds = median(finite(warm, "seconds")) if warm else None
            row[owner] = first | {"cold": first["seconds"], "seconds": seconds, "speed": speed}
        rows.append(row)
    settings = data["settings"]
    what = (
        f"Whole runs of `{' '.join(['python train.py', *settings['overrides']])}` and of nanoGPT's "
        f"own train.py, in turns: {settings['model']}, vocabulary {settings['vocab_size']:,}, "
        f"{settings['tokens']:,} tokens a step. Text and learning rates are the same, initial "
        "weights and batches are not. Seconds are those of the process: start, compilation, steps, "
        "two evaluations and a checkpoint. The first round begins with empty caches of the "
        "compilers and without bytecode of Python. Figures of the later rounds are medians. Every "
        "round has its own ratio, and brackets show the least and the most. Rows of metrics, by "
        "their time of arrival, give the speed of the steps alone."
    )
    columns = """
        seq_len                            {seq_len:,}
        attention                          {name}
        commit                             {ours[commit]:.7}
        steps                              {ours[steps]:,}
        rounds                             {rounds}
        nanoGPT's run, s                   {theirs[seconds]:.1f}
        our run, s                         {ours[seconds]:.1f}
        times as fast  {whole[median]:.2f} ({whole[least]:.2f} to {whole[most]:.2f})
        nanoGPT's, empty caches            {theirs[cold]:.1f}
        ours, empty caches                 {ours[cold]:.1f}
        times as fast, empty caches        {cold:.2f}
        nanoGPT's tokens/s, steps alone    {theirs[speed]:,.0f}
        our tokens/s, steps alone          {ours[speed]:,.0f}
        times as fast, steps alone  {alone[median]:.2f} ({alone[least]:.2f} to {alone[most]:.2f})
        held-out loss, nanoGPT's and ours  {theirs[val/loss]:.3f}, {ours[val/loss]:.3f}
        our peak GiB                       {ours[memory/peak_gib]:.2f}
    """
    return section(data, what, formatted(columns, rows))


def nanochat() -> str:
    """Our step and nanoGPT's beside nanochat's."""
    data = load("nanochat_h200")
    rows = []
    for found in by(data["speed"], "seq_len", "passes").values():
        found = [with_speed(row) for row in found]
        speed = fmean(row["speed"] for row in found if row["who"] == "nanochat")
        for row in found:
            flops = row.get("flops_per_token")
            more = {"faster": row["speed"] / speed, "name": plain(row["who"])}
            rows.append(row | more | {"gflops": flops and flops / 1e9})
    settings = data["settings"]
    what = (
        f"nanochat's GPT, Muon and step, {settings['model']} under our `train.py`, and nanoGPT's "
        f"step: {settings['tokens']:,} tokens a pass, vocabulary {settings['vocab_size']:,}. L is "
        "full attention in every layer of nanochat, SSSL its windows. Its own attention is here "
        "PyTorch's. Tokens per second of the steps alone."
    )
    columns = """
        training                 {name}
        seq_len                  {seq_len:,}
        passes of a step         {passes}
        tokens/s, steps alone    {speed:,.0f} ({p20:,.0f} to {p80:,.0f})
        peak GiB                 {peak_gib:.2f}
        GFLOP/token              {gflops:.3f}
        speed / nanochat's       {faster:.2f}
    """
    return section(data, what, formatted(columns, rows))


def beside_nanogpt() -> str:
    """Both comparisons with nanoGPT, of the steps and of whole runs; and nanochat's step."""
    walls = map(nanogpt_wall_table, (load("nanogpt_wall_h100"), load("nanogpt_wall_h200")))
    return "\n\n".join([nanogpt(), *walls, nanochat()])


def profile() -> str:
    """The parts of a training step."""
    data = load("profile_h200")
    what = (
        f"`python -m scripts.profile {' '.join(data['overrides'])}`: {data['n']} steps of "
        f"{data['batch_size'] * data['accumulation_steps']} x {data['seq_len']:,} tokens, the "
        "GPU's time."
    )
    columns = """
        part                {part}
        ms                  {ms:.2f}
        standard deviation  {stdev_ms:.2f}
        share               {share:.1%}
    """
    return section(data, what, formatted(columns, data["parts"]))


def million() -> str:
    """One step of a million tokens in one sequence, in the memory of one GPU."""
    data = load("million_h200")
    columns = """
        run                     `python train.py {settings}`
        tokens in one sequence  {seq_len:,}
        seconds                 {wall_seconds:.0f}
        peak GiB                {memory/peak_gib:.1f}
        predicted GiB           {memory/predicted_gib:.1f}
        train/loss              {curves[train/loss][0]:.3f}
    """
    what = (
        "GPT-2, one step: forward, backward, optimizer. The seconds are the whole run's, from its "
        "start to its checkpoint."
    )
    rows = [run | {"settings": chosen(run, "")} for run in data["runs"]]
    return section(data, what, formatted(columns, rows), *on_two_gpus(load("million_gpus_h100")))


def on_two_gpus(data: Row) -> list[str]:
    """Two GPUs hold a sequence twice as long as one."""
    columns = """
        settings                `{settings}`
        GPUs                    {ranks}
        commit                  {commit:.7}
        tokens in one sequence  {seq_len:,}
        peak GiB                {memory/peak_gib:.2f}
        predicted GiB           {memory/predicted_gib:.2f}
        tokens/s, second step   {step_tokens_per_sec:,.0f}
    """
    what = (
        f"The same on {data['environment']['hardware']['gpu']}, two steps, on one GPU, or by "
        "torchrun on two that share the sequence. Since commit "
        f"{data['environment']['commit'][:7]}, ranks exchange heads inside the chunks, and keep "
        "attention's output once."
    )
    rows = [run | {"settings": chosen(run, "")} for run in data["runs"]]
    return [what, formatted(columns, rows)]


def tricks() -> str:
    """What million_tokens does to fit, against the same training without it."""
    data = load("tricks_h200")
    small, large = sorted(data["runs"], key=lambda run: run["memory/peak_gib"])
    apart = differences(small, large)
    what = (
        f"GPT-2 on one sequence of {small['seq_len']:,} tokens, {len(apart)} steps, with "
        "attention's inputs and output kept and the rest computed again, norms, projections and "
        "MLP in chunks of 16,384 tokens, the blocks' inputs in the host's memory; and without all "
        f"that. The losses differ by {root_mean_square(apart):.5f} nats (rms), at most by "
        f"{max(map(abs, apart)):.5f}."
    )
    rows = [
        with_speed(run) | {"settings": " ".join(run["overrides"][:-3])} for run in (small, large)
    ]
    columns = """
        run                    `{settings}`
        tokens/s, steps alone  {speed:,.0f}
        peak GiB               {memory/peak_gib:.2f}
    """
    return section(data, what, formatted(columns, rows))


def kept() -> str:
    """Each way to keep less of a block, on the same batches."""
    data = load("kept_h200")
    rows = []
    for run in map(with_speed, data["runs"]):
        own = {"settings": chosen(run, "model."), "loss": run["curves"]["train/loss"][-1]}
        rows.append(with_error(run) | own)
    first = data["runs"][0]
    command = " ".join(x for x in first["overrides"] if not x.startswith("model."))
    what = (
        f"`python train.py {command} ...`: {first['steps_done']} steps of 262,144 tokens each, one "
        "run per row, compiled where compile=auto does so. The speed excludes the first three "
        "steps."
    )
    columns = """
        setting                {settings}
        {how}
        tokens/s, steps alone  {speed:,.0f}
        peak GiB               {memory/peak_gib:.2f}
        predicted GiB          {memory/predicted_gib:.2f}
        error                  {error:+.1%}
        train/loss at the end  {loss:.3f}
    """
    return section(data, what, formatted(columns, rows))


def wall() -> str:
    """Tokens per second by the wall clock, from outside the runs: before and after
    attention/max_score became cheap, and before and after the attention call returned it.
    """
    data = load("wall_h200")
    rows = []
    for run in data["runs"]:
        longest = run["each"][-1]
        # before, tokens_per_sec was the speed of the steps alone
        speed = longest["tokens_per_sec" if run["tree"] == "before" else "step_tokens_per_sec"]
        figures = {
            "speed": speed,
            "lost": 1 - run["by_arrival"] / speed,
            "overall": longest["tokens"] / longest["seconds"],
            "steps": joined(each["steps"] for each in run["each"]),
        }
        figures["least"], figures["most"] = run["slope"]["of_two"]
        rows.append(run | figures)
    what = (
        f"`python -m lab.wall {' '.join(data['overrides'])}`. This is GPT-2 with 32,768 tokens a "
        "step and a row of metrics every 10 steps. Each run is a separate process, n=1 per "
        "length; both checkouts take turns on one GPU. By arrival: rows are timed as they arrive "
        "in metrics.jsonl. By whole runs: the slope of wall time against steps, with the least and "
        "the most of any two runs. Start-up differs by seconds from run to run, which blurs the "
        "slope. The last column counts all, imports and compilation too. The last four rows were "
        "measured later, while the other GPU's work kept the host busy. Their steps alone are "
        "slower with the maxima by 0.5% to 0.9% at 32,768 tokens and by 1.7% to 2.3% at 8,192, "
        "although the rows arrive earlier. Their peak memory is equal to 0.01%."
    )
    columns = """
        seq_len                   {seq_len:,}
        {tree} ({commit})
        steps alone, as reported  {speed:,.0f}
        by arrival of rows        {by_arrival:,.0f}
        lost                      {lost:.1%}
        by whole runs             {slope[tokens_per_sec]:,.0f} ({least:,.0f} to {most:,.0f})
        longest run, all in all   {overall:,.0f}
        steps                     {steps}
    """
    return section(data, what, formatted(columns, rows))


def steps() -> str:
    """Tokens per second of the steps alone, before and after a run became an object and the
    attention call returned attention/max_score. Both log a row every 100 steps.
    """
    data = load("steps_h200")
    rows = []
    for run in data["runs"]:
        speeds = run["step_tokens_per_sec"]
        best = max(max(each) for each in run["by_100_steps"])
        rows.append(run | {"n": len(speeds), "speeds": joined(speeds, "{:,}"), "best": best})
    busy = data["busy"]
    what = (
        f"`python train.py {' '.join(data['overrides'])}` with 32,768 tokens a step in one pass. "
        "Each run is a separate process; both checkouts take turns on one GPU that runs nothing "
        f"else. While busy, the GPU drew {busy['watts']} W at {busy['sm_mhz']:,} MHz "
        f"({joined(busy['sm_mhz_least_most'], '{:,}')}), the mean of {busy['samples']} seconds. "
        "It runs at its power limit, below the 1,980 MHz of a GPU at rest. The second run of each "
        "checkout at 1,024 tokens was the last, because the time was over."
    )
    columns = """
        seq_len                {seq_len:,}
        {tree} ({commit:.7})
        steps alone, each run  {speeds}
        best 100 steps         {best:,}
        peak GiB               {memory/peak_gib:.3f}
    """
    return section(data, what, formatted(columns, rows))


def step_trials() -> str:
    """What was tried on GPT-2's step, and where its time goes."""
    data = load("step_trials_h200")
    columns = """
        seq_len                 {seq_len:,}
        {variant}
        tokens/s                {tokens_per_sec:,}
        least                   {least:,}
        most                    {most:,}
        n                       {n}
        of the first, in pairs  {to_first:.3f}
        peak GiB                {peak_gib:.2f}
    """
    spent = [
        f"At {each['seq_len']:,} tokens a sequence the GPU works {each['device_ms']:.1f} ms of a "
        f"step, in {each['launches']:,} launches."
        for each in data["profile"]
    ]
    kernels = section(data, f"{data['what']}.", formatted(columns, data["tokens_per_sec"]), *spent)
    later = (two_versions(load(name)) for name in ("step_trials_h100", "step_mlp_h100"))
    return "\n\n".join([kernels, *later])


def two_versions(data: Row) -> str:
    """A version's step beside an earlier one's, at one or more lengths, and the kernels that
    changed.
    """
    rows = []
    for first, last in by(data["runs"], "seq_len").values():
        pairs = zip(last["rounds"], first["rounds"], strict=True)
        ratios = joined([x / y for x, y in pairs], "{:.3f}")
        for run, ratio in ((first, ""), (last, ratios)):
            rounds, least = joined(run["rounds"], "{:,}"), f"{min(run['least']):,}"
            rows.append([f"{run['seq_len']:,}", run["variant"], rounds, ratio, least])
    columns = """
        kernel     {kernel}
        before     {before}
        ms before  {before_ms:.3f}
        now        {now}
        ms         {ms:.3f}
    """
    return section(
        data,
        f"{data['what']} The command is `{data['command']}`.",
        table(["seq_len", "", "tokens/s", "times as fast, by round", "lowest row"], rows),
        "The kernels alone, medians of 20 or more calls that take turns on several buffers.",
        formatted(columns, data["kernels"]),
    )


def looking() -> str:
    """The cost of rows of metrics, which have the largest score of every layer and head."""
    parts = []
    for data in map(load, ("looking_h200", "looking_cpu")):
        rows = [
            run | {"n": len(run["of_pairs"]), "least": min(run["of_pairs"])} for run in data["runs"]
        ]
        what = (
            f"`python -m lab.looking {' '.join(data['overrides'])}`. One run alternates "
            "between a segment with a row every 10 steps and one with a single row at its end. "
            "The figure is wall-clock tokens per second with rows, as a share of that without."
        )
        columns = """
            seq_len          {seq_len:,}
            steps a segment  {segment}
            what else ran    {host}
            geometric mean   {ratio:.3f}
            least pair       {least:.3f}
            pairs            {n}
        """
        parts.append(section(data, what, formatted(columns, rows)))
    return "\n\n".join(parts)


def start() -> str:
    """Where the seconds of a short run go, and how many one graph per block saves."""
    data = load("start_h200")
    what = (
        "Seconds of the whole process, and of the phases in summary.json, one run per row. "
        "torch.compile used to make one graph of the model. Now it makes one graph of a block, "
        "which serves all layers. Caches are those of the compilers. GPT-2's steps at 1,024 "
        "tokens are so short that the host's pauses change their speed by a tenth."
    )
    names = {name: None for run in data["runs"] for name in run["seconds_by_phase"]}
    columns = """
        `python train.py attention=triton ...`  {settings}
        one graph of                            {compiled}
        caches                                  {caches}
        whole                                   {seconds:.1f}
    """
    columns += "\n".join(f"{name}  {{{name}:.1f}}" for name in names)
    columns += """
        tokens/s, steps alone  {step_tokens_per_sec:,.0f}
        peak GiB               {peak_gib:.2f}
    """
    rows = [run | run["seconds_by_phase"] for run in data["runs"]]
    for row in rows:
        row["settings"] = row["command"].removeprefix("python train.py attention=triton ")
    return section(data, what, formatted(columns, rows))


def card() -> str:
    """A sweep of attentions with different options: its statuses, both speeds, its memory."""
    data = load("card_h200")
    prefix = "attention."
    rows = []
    for run in map(without_figures, data["runs"]):
        options = [x.removeprefix(prefix) for x in run["overrides"] if x.startswith(prefix)]
        unread = [key.removeprefix(prefix) for key in run.get("left_out") or {}]
        run = run | {"options": ", ".join(options), "unread": ", ".join(unread) or "-"}
        rows.append(run)
    what = (
        f"`{data['command']}`, whole: {data['wall_seconds']:,} s. One run a row. In runs this "
        "short, start-up and compilation dominate tokens/s, and the steps alone at 1,024 tokens "
        "last three seconds: a difference of a tenth between two of them means nothing. On a GPU "
        "no_max and no_rescale run the Triton kernels, and tiled takes 4,096 queries a tile."
    )
    columns = """
        attention              {attention}
        seq_len                {seq_len:,}
        asked for              {options}
        left out               {unread}
        status                 {status}
        val/loss               {val/loss:.3f}
        tokens/s               {tokens_per_sec:,.0f}
        tokens/s, steps alone  {step_tokens_per_sec:,.0f}
        peak GiB               {memory/peak_gib:.2f}
        seconds                {wall_seconds:.0f}
    """
    return section(data, what, formatted(columns, rows))


def without_figures(run: Row) -> Row:
    """The run without what it measured before it ran out of memory."""
    names = ("val/loss", "tokens_per_sec", "step_tokens_per_sec", "memory/peak_gib")
    return run | dict.fromkeys(names) if run["status"] == "oom" else run


def sweep() -> str:
    """Successive jobs of one process; some run out of memory, some diverge."""
    data = load("sweep_h200")
    rows = []
    for run in map(without_figures, data["runs"]):
        rows.append(with_speed(run) | {"name": run["overrides"][0].partition("=")[2]})
    command = " ".join(["python", *data["environment"]["command"][1:]])
    what = (
        f"`{command}`, where DIR holds no_max on the kernels (`impl: triton`) as a separate "
        f"choice: {data['wall_seconds']} s from start to table. Memory at a job's start is what "
        "earlier jobs left behind: the first computation leaves some, and later ones add none. "
        "The learning rate is high so that no_max breaks soon, so losses cannot be compared. Those "
        "of exact attentions diverge from each other, at 32,768 tokens after a jump to 6.84 at "
        "step 5. Until then they differ by 0.001."
    )
    columns = """
        attention              {name}
        seq_len                {seq_len:,}
        status                 {status}
        val/loss               {val/loss:.3f}
        tokens/s, steps alone  {speed:,.0f}
        GiB at start           {memory/at_start_gib:.4f}
        peak GiB               {memory/peak_gib:.2f}
        seconds                {wall_seconds:.0f}
    """
    return section(data, what, formatted(columns, rows))


def survival() -> str:
    """Runs that were killed or harmed and resumed, against an undisturbed run."""
    data = load("kills")
    killed = {False: "killed (SIGKILL) while it trains", True: "killed (SIGKILL) while it saves"}
    named = {
        "disk full": "disk full (a limit on file sizes: a write fails half way)",
        "latest damaged": "latest checkpoint damaged",
        "all damaged": "all checkpoints damaged",
        "record damaged": "metrics.jsonl, overrides.yaml or config.yaml damaged",
    }
    ended = grouped(data["kills"], lambda each: killed[each["in_a_save"]])
    ended |= grouped(data["harms"], lambda each: named.get(each["harm"]))
    rows = []
    for case in (*killed.values(), *named.values()):
        outcomes = [each["outcome"] for each in ended.get(case, ())]
        same, refused = outcomes.count("identical"), outcomes.count("refused")
        rows.append([case, len(outcomes), same, refused, len(outcomes) - same - refused])
    what = (
        "Each is a separate training run on one CPU core, disturbed at a random moment and "
        "resumed. Identical: weights, optimizer, random state and every computed row of "
        "metrics.jsonl equal those of an undisturbed run, to the bit. Refused: one line says why, "
        "and no file of the run has changed."
    )
    head = ["what happened", "n", "identical", "refused", "anything else"]
    return section(data, what, table(head, rows))


def laptop() -> str:
    data = load("laptop")
    return section(data, table(["what", "figure"], data["figures"].items()))


def beside_one_gpu(rows: list[Row]) -> list[Row]:
    """Rows of lab.steps_on_ranks in order, with their speed over one GPU's in the same start."""
    alone = {
        (row["commit"], row["seq_len"], row["batch"]): row["seconds"]
        for row in rows
        if row["who"] == "ours:alone"
    }
    found = []
    for row in sorted(rows, key=lambda row: (row["seq_len"], row["batch"], row["who"])):
        found.append(
            in_ms(row)
            | {"times": alone[row["commit"], row["seq_len"], row["batch"]] / row["seconds"]}
            | {"of": row["commit"][:7]}
            | {"graph": {True: "yes", False: "no", None: "-"}[row["graph"]]}
        )
    return found


def in_ms(row: Row) -> Row:
    """A row of lab.steps_on_ranks with milliseconds and its largest error."""
    least, most = (1000 * seconds for seconds in row["least_and_most"])
    times = {"ms": 1000 * row["seconds"], "least": least, "most": most}
    return row | times | {"error": max(row["errors"].values(), default=None)}


def several_gpus() -> str:
    """Two GPUs against one GPU and against PyTorch's methods: a shared sequence, shared batches, a
    profile of both, and whole runs of train.py.
    """
    data, whole = load("steps_on_ranks_h100"), load("many_gpus_h100")
    rows = beside_one_gpu(data["rows"])
    newest = {(row["who"], row["batch"]): row["tokens_per_sec"] for row in data["rows"]}
    more = newest["ours:data", 64] / newest["ours:alone", 32]
    what = (
        "`torchrun --standalone --nproc-per-node=2 -m lab.steps_on_ranks`. Two GPUs share GPT-2's "
        "sequences. They do so by heads, on a ring, or by PyTorch's context_parallel around its "
        "cuDNN or flash kernel. At 1,024 tokens each takes half of the sequences, and "
        "DistributedDataParallel stands beside ours. Alone: each GPU has all of it, and the slower "
        "one counts. The median, least and most of five times a few steps, three at commit "
        f"c1672c7. Two GPUs with 64 sequences train {more:.2f} times the tokens per second of one "
        "with 32. Ratios are to one GPU in the same start. Error: one layer's out, dq, dk and dv "
        "against one GPU's, norm over norm. The host was slow: it needs about 80 ms to launch a "
        "step kernel by kernel, and GPUs wait. A graph: the step is one CUDA graph."
    )
    columns = """
        seq_len            {seq_len:,}
        sequences          {batch}
        who                {who}
        commit             {of}
        a graph            {graph}
        ms a step          {ms:,.0f} ({least:,.0f} to {most:,.0f})
        times one GPU      {times:.2f}
        peak GiB           {peak_gib:.1f}
        error              {error:.1e}
    """
    ratios = [
        [name, way, joined(found, "{:.2f}"), len(found)]
        for name, case in whole["cases"].items()
        if name != "losses"
        for way, found in case["times_one_gpu"].items()
    ]
    by_run = (
        f"`python -m lab.many_gpus {' '.join(whole['overrides'])}`: whole runs of train.py, by the "
        "wall clock with metrics, over the slower of two runs alone. Commit "
        f"{whole['environment']['commit'][:7]}, before a ring and the exchange of heads were made "
        "faster."
    )
    ratios = table(["case", "way", "times one GPU", "n"], ratios)
    tables = (formatted(columns, rows), *profiles(data["profiles"]), by_run, ratios)
    losses = losses_on_ranks(whole["cases"]["losses"])
    return section(data, what, *tables, *losses, *sweep_on_gpus(load("sweep_gpus_h100")))


def four_gpus() -> str:
    """Four GPUs against one, beside the predictions made before the runs; a profile; a sweep."""
    data = load("four_gpus_h200")
    predicted = {(row["who"], row["batch"]): row for row in data["predicted"]}
    alone = {
        row["seq_len"]: row["tokens_per_sec"] for row in data["rows"] if row["who"] == "ours:alone"
    }
    rows = []
    for row in data["rows"]:
        expected = predicted.get((row["who"], row["batch"]), {"times": None, "gib": None})
        times = row["tokens_per_sec"] / alone[row["seq_len"]]
        rows.append(in_ms(row) | {"times": times, "expected": expected})
    runs, sweep = data["whole_runs"], data["sweep"]
    busy = sum(sweep["jobs"]) / sweep["seconds"]
    what = (
        "`torchrun --standalone --nproc-per-node=4 -m lab.steps_on_ranks`, as above. Times one GPU "
        "are tokens per second over those of one GPU with one sequence of 131,072 tokens or 32 of "
        "1,024. `python -m scripts.plan` made the predictions before the runs. Whole runs of "
        "train.py, metrics included, are compared with the slowest of four runs alone (n=1). By "
        f"the wall clock they reach {runs['data']['more tokens'][0]:.2f} with 128 sequences, "
        f"{runs['context_131072']['heads'][0]:.2f} by heads and "
        f"{runs['context_131072']['ring'][0]:.2f} on a ring."
    )
    columns = """
        seq_len            {seq_len:,}
        sequences          {batch}
        who                {who}
        ms a step          {ms:,.0f} ({least:,.0f} to {most:,.0f})
        times one GPU      {times:.2f}
        predicted          {expected[times]:.2f}
        peak GiB           {peak_gib:.1f}
        predicted GiB      {expected[gib]:.1f}
        error              {error:.1e}
    """
    of_sweep = (
        f"A sweep of {len(sweep['jobs'])} jobs on four GPUs (`experiment=stabilisers` at GPT-2's "
        f"size) took {sweep['seconds']} seconds. The jobs took {sum(sweep['jobs'])} seconds "
        f"together, so {busy:.1f} ran at a time."
    )
    more = two_by_two(data["two_by_two"], alone), *longest_on_four(data["longest"])
    parts = (*profiles(data["profiles"]), *more, of_sweep)
    return section(data, what, formatted(columns, rows), *parts)


def two_by_two(square: Row, alone: dict[int, float]) -> str:
    """Two ranks for each of two sequences. alone: one GPU's tokens per second at each length."""
    times = joined([x / alone[square["seq_len"]] for x in square["tokens_per_sec"]], "{:.2f}")
    return (
        f"2 x 2 ranks (`{square['command']}`, commit {square['commit'][:7]}) share "
        f"{square['batch']} sequences of {square['seq_len']:,} tokens. Four rows of two steps had "
        f"{times} times one GPU's tokens/s; {square['predicted_times']:.2f} was predicted. The "
        "first rows include the capture of the step's graph. A GPU held "
        f"{square['peak_gib']:.1f} GiB, {square['predicted_gib']:.1f} predicted. One GPU's "
        "speed is the one above, of another "
        "day. Eight GPUs are not measured."
    )


def longest_on_four(runs: list[Row]) -> tuple[str, str]:
    """The longest sequences, beside the predictions made before the runs."""
    what = (
        f"The longest sequences that four GPUs trained on: `{runs[0]['command']}`, and the same "
        "with model=small seq_len=4194304 data.val_fraction=0.15. Commit "
        f"{runs[0]['commit'][:7]}, one step each, n=1. Tokens/s count the compilation of Triton's "
        "kernels. The prediction leaves out what chunks and inputs on the host cost."
    )
    columns = """
        model          {model}
        seq_len        {seq_len:,}
        s compiling    {seconds_by_phase[compiling]:.0f}
        s training     {seconds_by_phase[training]:.0f}
        s whole run    {seconds:.0f}
        tokens/s       {tokens_per_sec:,.0f}
        predicted      {predicted_tokens_per_sec:,}
        peak GiB       {peak_gib:.1f}
        predicted GiB  {predicted_gib:.1f}
    """
    return what, formatted(columns, runs)


def profiles(found: list[Row]) -> tuple[str, str]:
    """The parts of a step by scripts.profile, a column for each profile."""
    what = "`python -m scripts.profile` by torchrun, of rank 0, in ms. Recording slows a host."
    parts = dict.fromkeys(name for each in found for name in each["parts_ms"])
    head = "{who} at {seq_len:,}"
    if any("commit" in each for each in found):
        head += ", commit {commit:.7}"
    lines = [[name, *(f"{each['parts_ms'].get(name, 0):,.1f}" for each in found)] for name in parts]
    lines.append(["step, not recorded", *(f"{each['unrecorded_ms']:,.1f}" for each in found)])
    return what, table(["part", *(head.format_map(each) for each in found)], lines)


def losses_on_ranks(case: Row) -> tuple[str, str]:
    """What several GPUs change in the losses of a run, beside what a second run alone changes."""
    (first, again), *_ = case["runs"]["alone"]
    others = {"alone, again": again} | {
        way: rounds[0][0] for way, rounds in case["runs"].items() if way != "alone"
    }
    rows = []
    for way, run in others.items():
        apart = [run["losses"][step] - loss for step, loss in first["losses"].items()]
        rows.append([way, f"{root_mean_square(apart):.1e}", f"{max(map(abs, apart)):.1e}"])
    what = (
        f"`{case['settings']}`, commit {case['commit'][:7]}. This is how far the losses of every "
        "tenth step are from those of a run alone. Two runs alone run the same kernels. On ranks "
        "the shapes are others, and so is the rounding. Ranks that share the sequences equal one "
        "GPU in two passes to the bit (tests/test_two_gpus.py)."
    )
    return what, table(["way", "rms", "largest"], rows)


def sweep_on_gpus(data: Row) -> tuple[str, str]:
    """The wall time of a sweep on two GPUs and on one."""
    sweeps = data["sweeps"]
    rows = [[each["gpus"], each["seconds"], joined(each["jobs"], "{}")] for each in sweeps]
    by_gpus = [min(each["seconds"] for each in sweeps if each["gpus"] == gpus) for gpus in (2, 1)]
    what = (
        f"`{data['command']}`, commit {data['environment']['commit'][:7]}. {data['says']}. The "
        f"losses of all jobs that end are the same to the bit. Two GPUs take "
        f"{by_gpus[0] / by_gpus[1]:.2f} of one GPU's time: most of a job is its start, which is "
        "slower beside another, and the last job runs alone."
    )
    return what, table(["GPUs", "seconds", "seconds of each job"], rows)
