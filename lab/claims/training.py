"""Claims about training, read from the recorded runs of results/: on text, naive against tiled, and
the two broken attentions.
"""

from collections.abc import Callable, Iterable
from itertools import combinations
from statistics import fmean

from lab.claims.claim import FAILS, HOLDS, Figures, claim, only_if, recorded, spread, verdict


def rms(a: Figures, b: Figures) -> float:
    """Root mean square of the difference of two runs' training losses, step by step."""
    pairs = zip(a["curves"]["train/loss"], b["curves"]["train/loss"], strict=True)
    return fmean((x - y) ** 2 for x, y in pairs if x is not None and y is not None) ** 0.5


@claim(
    "chapter",
    says="Two hundred steps of a GPT from one seed give loss curves that cannot be told apart, "
    "naive or tiled.",
    criterion="the difference of the curves (rms) is no larger than that between two of "
    "PyTorch's own kernels",
    measured="rms difference in nats: naive and tiled {ours:.5f}, PyTorch's kernels "
    "among themselves "
    "{theirs:.5f} ({steps} steps, {seeds} "
    "seeds, H200)",
    verdict=lambda f: verdict(f["ours"]["max"] <= f["theirs"]["max"]),
    reads="paired_curves",
)
def two_hundred_steps() -> Figures:
    ours, theirs = [], []
    runs = recorded("paired_curves")["runs"]
    for seed in {run["seed"] for run in runs}:
        for a, b in combinations([run for run in runs if run["seed"] == seed], 2):
            if {a["attention"], b["attention"]} == {"naive", "tiled"}:
                ours.append(rms(a, b))
            elif a["attention"] == b["attention"] == "sdpa":
                theirs.append(rms(a, b))
    steps = max(runs[0]["curves"]["step"])
    return {
        "ours": spread(ours),
        "theirs": spread(theirs),
        "steps": steps,
        "seeds": len({run["seed"] for run in runs}),
    }


def text_runs(keep: Callable[[Figures], bool], name: str = "defects_text") -> list[Figures]:
    return [run for run in recorded(name)["runs"] if keep(run)]


def headline_runs(attention: str) -> list[Figures]:
    """The GPT-2-sized runs in bfloat16 under that attention."""
    return text_runs(
        lambda run: run["dtype"] == "bfloat16" and run["attention"] == attention, "headline_h200"
    )


def losses(runs: Iterable[Figures], column: str) -> dict[int, float]:
    """Step to the mean of the runs' losses, at the steps that all of them evaluated."""
    curves = [
        {
            step: loss
            for step, loss in zip(run["curves"]["step"], run["curves"][column], strict=True)
            if loss is not None and step
        }
        for run in runs
    ]
    shared = sorted(set.intersection(*({*curve} for curve in curves)))
    return {step: fmean(curve[step] for curve in curves) for step in shared}


@claim(
    "chapter",
    says="A GPT trained without the rescaling converges to a clearly worse loss.",
    criterion="its own held-out loss is higher than exact attention's, by more than 0.05 nats, at "
    "every evaluation",
    measured="a GPT-2-sized model, no_rescale minus exact, nats by step: {gap:+.3f} (means of "
    "{seeds} seeds, H200)",
    because="The broken attention can be trained like any other. How its curve lies "
    "against the exact "
    "one depends on the length of the "
    "run, so one look at a curve tells nothing.",
    verdict=lambda f: (
        HOLDS
        if min(f["gap"].values()) > 0.05
        else only_if("the run is long enough")
        if list(f["gap"].values())[-1] > 0.05
        else FAILS
    ),
    reads="headline_h200",
    also="python train.py experiment=break_it",
)
def no_rescale_converges_worse() -> Figures:
    runs = [headline_runs(name) for name in ("triton", "no_rescale")]
    exact, broken = (losses(each, "val/loss") for each in runs)
    # every fourth evaluation shows it
    shared = [step for step in broken if step in exact][1::4]
    return {
        "gap": {str(step): broken[step] - exact[step] for step in shared},
        "seeds": len(runs[1]),
    }


@claim(
    "chapter",
    says="Such a model looks trained, and only a comparison with the reference shows "
    "what is wrong.",
    criterion="the same weights under exact attention are more than 1 nat worse than "
    "under their own",
    measured="held-out loss at step {step}: {own:.3f} under its own attention, "
    "{exact:.3f} under exact "
    "attention; a model trained with "
    "exact attention {reference:.3f}",
    because="The weights are fitted to the broken kernel and to its tile size. Evaluate "
    "under another "
    "kernel, always.",
    verdict=lambda f: verdict(f["exact"] - f["own"] > 1),
    reads="headline_h200",
    also="python -m scripts.cross_eval multirun/DAY/TIME",
)
def no_rescale_under_exact_attention() -> Figures:
    broken = headline_runs("no_rescale")
    reference = losses(headline_runs("triton"), "val/loss")
    own, exact = (losses(broken, column) for column in ("val/loss", "val/loss_exact"))
    step = max(set(own) & set(reference))
    return {"step": step, "own": own[step], "exact": exact[step], "reference": reference[step]}


@claim(
    "chapter",
    says="Without the maximum, float16 training dies almost at once and float32 a little later.",
    criterion="every float16 run and every float32 run leaves the finite range within 1,000 steps",
    measured="float16: {float16} of {float16_runs} runs died, at steps {float16_steps}; float32: "
    "{float32} of {float32_runs}, largest "
    "score {float32_score:.0f} of 88.72; its held-out loss is {difference:+.4f} nats from "
    "exact attention's",
    because="Scores of a small model pass 11.09 in the first hundreds of steps and stay "
    "below 88.72. "
    "In a GPT-2-sized one bfloat16, whose "
    "exponential ends where float32's does, died at steps {large}; on a sharper task float32 dies "
    "in a small one too: last_write at steps "
    "{last_write}.",
    verdict=lambda f: (
        HOLDS
        if f["float16"] == f["float16_runs"] and f["float32"] == f["float32_runs"]
        else only_if("it is float16, or the scores grow to 88")
        if f["float16"] == f["float16_runs"] and f["float32"] == 0
        else FAILS
    ),
    reads="defects_text",
    also="python train.py experiment=break_it",
)
def no_max_in_training() -> Figures:
    found: Figures = {}
    for dtype in ("float16", "float32"):
        runs = text_runs(
            lambda run, dtype=dtype: run["attention"] == "no_max" and run["dtype"] == dtype
        )
        dead = [run for run in runs if run["status"] == "diverged"]
        found |= {
            dtype: len(dead),
            f"{dtype}_runs": len(runs),
            f"{dtype}_steps": ", ".join(str(run["first_bad_step"]) for run in dead),
        }
    float32 = text_runs(
        lambda run: run["attention"] == "no_max" and run["dtype"] == "float32" and run["seed"] == 0
    )
    reference = text_runs(
        lambda run: run["attention"] == "triton" and run["dtype"] == "float32" and run["seed"] == 0
    )
    ours, exact = (losses(runs, "val/loss") for runs in (float32, reference))
    last_write = [
        run for run in recorded("defects_retrieval")["runs"] if run["attention"] == "no_max"
    ]
    return found | {
        "large": ", ".join(str(run["first_bad_step"]) for run in headline_runs("no_max")),
        "float32_score": float32[0]["max_score"],
        "difference": ours[max(ours)] - exact[max(ours)],
        "last_write": ", ".join(
            str(run["first_bad_step"]) for run in last_write if run.get("first_bad_step")
        ),
    }
