"""The charts of a report, as Vega-Lite specifications by Altair, and how each variant looks.

The page draws them in its own colours. It sets two signals in each: `hidden`, the variants that are
hidden, and `focus`, the variant under the pointer. A curve is one row with lists of values,
which the page spreads out: a variant is named once for each curve.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from statistics import fmean, median
from typing import Any

import altair as alt

from attention import LIMITS
from scripts.report.runs import Curve, Run
from scripts.tables import Row, grouped
from training.record.palette import HUES, variant_places
from training.record.runs import in_order

PEAK, SPEED = "memory/peak_gib", "step_tokens_per_sec"
COSTS = {PEAK: "Peak memory, GiB", SPEED: "Tokens per second, the steps alone"}
OVERFLOWS = [
    {"name": "exp overflows float16", "value": min(LIMITS.values())},
    {"name": "exp overflows float32 and bfloat16", "value": max(LIMITS.values())},
]
# charts of a kind share their values when they zoom; how a tooltip writes these
KINDS = {"loss": ".4f", "accuracy": ".1%", "score": ".2f"}
SAME = 1e-3  # a panel of smaller differences would show rounding
MARKERS = 8  # about so many on a curve
BUCKETS = 150  # at most so many points of what is logged every few steps

# SVG paths in a box from -1 to 1, for Vega and for the page's own lines
SHAPES = (
    "M-.8,0A.8,.8,0,1,1,.8,0A.8,.8,0,1,1,-.8,0Z",  # circle
    "M-.75,-.75H.75V.75H-.75Z",  # square
    "M0,-.95L.95,.75H-.95Z",  # triangle up
    "M0,-1.05L.85,0L0,1.05L-.85,0Z",  # diamond
    "M0,.95L.95,-.75H-.95Z",  # triangle down
    "M-.3,-1H.3V-.3H1V.3H.3V1H-.3V.3H-1V-.3H-.3Z",  # plus
    "M0,-1L.27,-.33L.95,-.31L.42,.13L.59,.81L0,.42L-.59,.81L-.42,.13L-.95,-.31L-.27,-.33Z",  # star
)
CROSS = "M-1,-.7L-.7,-1L0,-.3L.7,-1L1,-.7L.3,0L1,.7L.7,1L0,.3L-.7,1L-1,.7L-.3,0Z"
# dashed for attention that is broken on purpose
DASHES = {False: [1, 0], True: [6, 4]}

# the wheel alone scrolls the page, and so does a finger
ZOOM = alt.selection_interval(
    name="zoom",
    bind="scales",
    zoom="wheel![event.ctrlKey || event.metaKey || event.shiftKey]",
    translate="[pointerdown[event.pointerType !== 'touch'], window:pointerup]"
    " > window:pointermove!",
)
VALUE = alt.Tooltip("value:Q", title="value", format=",.4~r")
HIDDEN, FOCUS = alt.param(name="hidden", value=[]), alt.param(name="focus", value=None)


@dataclass
class Look:
    """How a variant is drawn. hue: its place in palette.HUES."""

    hue: int
    dash: list[int]
    shape: str
    is_defect: bool


Looks = dict[str, Look]  # by variant
Curves = dict[Run, Curve]


def looks_of(runs: list[Run]) -> Looks:
    """The looks of all variants, in the order of `runs`."""
    attentions = {x.variant: x.attention for x in sorted(runs, key=lambda x: in_order(x.variant))}
    places = variant_places(attentions)
    # a run that failed at once does not record this, but another of that attention does
    defects = {run.attention for run in runs if run.is_defect}
    looks = {}
    for variant in dict.fromkeys(run.variant for run in runs):
        place, is_defect = places[variant], attentions[variant] in defects
        # where a colour comes twice, the shapes differ
        hue, shape = place % len(HUES), SHAPES[place % len(SHAPES)]
        looks[variant] = Look(hue, DASHES[is_defect], shape, is_defect)
    return looks


def loss_charts(runs: list[Run], looks: Looks) -> tuple[list[dict], str]:
    """Of the runs of one length, and a word on what the charts leave out."""
    own, exact, train, accuracy = (
        {run: run.curve(name) for run in runs}
        for name in ("val/loss", "val/loss_exact", "train/loss", "val/accuracy")
    )
    domain, note = _losses(own, exact, train)
    charts = curve_chart(own, looks, "Loss under its own attention", domain)
    apart = [abs(y - exact[run][x]) for run in runs for x, y in own[run].items() if x in exact[run]]
    if apart and max(apart) < SAME:
        note += f" Under exact attention every loss is the same to {SAME}: it is drawn once."
    else:
        charts += curve_chart(exact, looks, "Loss under exact attention", domain)
    charts += curve_chart(_thinned(train, fmean), looks, "Training loss", domain)
    charts += curve_chart(accuracy, looks, "Accuracy", [-0.02, 1.02], "accuracy")
    return charts, note


def score_chart(runs: list[Run], looks: Looks, title: str) -> list[dict]:
    """The largest scores of the runs of one length, on a logarithmic axis."""
    curves = {
        run: {x: y for x, y in run.curve("attention/max_score").items() if y > 0} for run in runs
    }
    found = _values(curves) or [1]
    # far above the limits, how far is of no interest
    top = min(1000, 1.7 * max(*found, *LIMITS.values()))
    domain = [max(0.1, 0.9 * min(found)), top]
    return curve_chart(_thinned(curves, max), looks, title, domain, "score")


def _values(*curves: Curves) -> list[float]:
    return [value for each in curves for curve in each.values() for value in curve.values()]


def _thinned(curves: Curves, choose: Callable[[list[float]], float]) -> Curves:
    """Chooses one value of several where a run has very many."""
    thinned = {}
    for run, curve in curves.items():
        points, size = list(curve.items()), ceil(len(curve) / BUCKETS) or 1
        parts = (points[start : start + size] for start in range(0, len(points), size))
        thinned[run] = {part[-1][0]: choose([value for _, value in part]) for part in parts}
    return thinned


def _losses(own: Curves, *others: Curves) -> tuple[list[float], str]:
    """One axis for all losses. It leaves out losses far above that of a model which has not learned
    yet, and says so.
    """
    losses = _values(own, *others) or [1]
    first = [next(iter(curve.values())) for curve in own.values() if curve]
    most, usual = max(losses), 1.2 * median(first or losses)
    note = f"Losses above {usual:.1f} lie outside, up to {most:.3g}." if most > usual else ""
    low, high = min(losses), min(most, usual)
    margin = 0.04 * (high - low) or 0.1
    return [low - margin, high + margin], note


def _curve_data(curves: Curves, looks: Looks, highest: float) -> dict[str, list[Row]]:
    """The curves, the means of variants, and where runs ended early: crosses, `highest` at most."""
    points, means, ends = [], [], []
    # broken ones last: dashes over a solid line show both
    for number, variant in enumerate(sorted(looks, key=lambda name: looks[name].is_defect)):
        own = {run: curve for run, curve in curves.items() if run.variant == variant and curve}
        if not own:
            continue
        for run, curve in own.items():
            row = {"variant": variant, "seed": run.seed}
            points.append(row | _columns(curve))
            if run.status != "completed":
                tokens, value = list(curve.items())[-1]
                row |= {"tokens": tokens, "value": value, "ended": run.ending}
                ends.append(row | {"at": min(value, highest)})
        # the mean of the seeds that are left would jump where one ends
        common = sorted(set.intersection(*map(set, own.values())))
        values = {tokens: [curve[tokens] for curve in own.values()] for tokens in common}
        row = {"variant": variant} | _columns({x: fmean(ys) for x, ys in values.items()})
        row |= {"low": [*map(min, values.values())], "high": [*map(max, values.values())]}
        # curves that coincide have their markers at different places
        every = ceil(len(common) / MARKERS)
        marked = [(i + number % 2) % every == 0 for i in range(len(common))]
        means.append(row | {"marked": marked})
    return {"points": points, "means": means, "ends": ends}


def _columns(curve: Curve) -> Row:
    return {"tokens": list(curve), "value": [float(f"{value:.6g}") for value in curve.values()]}


def curve_chart(
    curves: Curves, looks: Looks, title: str, domain: list[float], kind: str = "loss"
) -> list[dict]:
    """A chart against tokens, or none where no run has values. kind: one of KINDS."""
    is_log = kind == "score"
    # whole crosses have room below it
    highest = domain[1] / 1.4 if is_log else 0.95 * domain[1] + 0.05 * domain[0]
    data = _curve_data(curves, looks, highest)
    if not data["points"]:
        return []
    last = max(row["tokens"][-1] for row in data["points"]) or 1
    x = alt.X("tokens:Q", title="tokens").axis(format=".3~s")
    x = x.scale(domain=[-0.02 * last, 1.02 * last], nice=False)
    y = alt.Y("value:Q").axis(format="%" if kind == "accuracy" else "~r", grid=not is_log)
    # without clamp: a clamped axis prints the names of ticks that lie beyond it at its edge
    y = y.scale(domain=domain, nice=False, **{"type": "log"} if is_log else {"zero": False})
    near = alt.selection_point(
        name="near", on="pointerover", clear="pointerout", nearest=True, empty=False
    )
    nearest = alt.when(near, alt.datum.variant == FOCUS).then(alt.value(1)).otherwise(alt.value(0))
    # near a point, `datum` is the mark and datum.datum its row; a plain list of fields would read
    # "undefined" there for all that are no numbers
    row = "(datum.datum || datum)"
    words = f"variant: {row}.variant, seed: {row}.seed, tokens: format({row}.tokens, ','), "
    words += f"value: format({row}.value, '{KINDS[kind]}'), ended: {row}.ended"
    tooltip = alt.value(alt.expr(f"{{{words}}}"))

    seeds = _shown("points", looks).encode(x, y, detail="seed:N")
    means = _shown("means", looks).encode(x, y)
    marked = means.transform_filter("datum.marked").mark_point(size=34, filled=True, clip=True)
    dots = seeds.mark_point(size=90, filled=True, clip=True).add_params(near, ZOOM)
    dash, shape = _dash_and_shape(looks)
    layers = [
        means.mark_area(fillOpacity=0.13, clip=True).encode(y="low:Q", y2="high:Q"),
        seeds.mark_line(strokeWidth=1, strokeOpacity=0.35, clip=True),
        means.mark_line(strokeWidth=2.2, strokeJoin="round", clip=True).encode(dash),
        marked.encode(shape),
        dots.encode(shape, opacity=nearest, tooltip=tooltip),
    ]
    if data["ends"]:
        crosses = _shown("ends", looks).mark_point(shape=CROSS, size=200, filled=True)
        layers.append(crosses.encode(x, y="at:Q", tooltip=tooltip))
    if is_log:
        data["limits"] = OVERFLOWS
        limits = alt.Chart(alt.NamedData("limits")).encode(y)
        names = limits.mark_text(align="left", dy=-7).encode(x=alt.value(4), text="name:N")
        layers = [limits.mark_rule(strokeDash=[2, 3]), *layers, names]
    return [_spec(layers, data, title, kind=kind, seq_len=next(iter(curves)).seq_len)]


def cost_charts(runs: list[Run], looks: Looks) -> list[dict]:
    """Memory and speed against the length, on logarithmic axes. There is a dot for each seed, and a
    line joins the means. A cross at the upper edge: memory was not measured. Runs of one length get
    no chart, because the page's table has their figures.
    """
    runs = [run for run in runs if run.seq_len]  # one that died at once may not tell
    lengths = sorted({run.seq_len for run in runs})
    if len(lengths) < 2:
        return []
    scale = alt.Scale(type="log", padding=20, nice=False)
    x = alt.X("seq_len:Q", scale=scale).axis(values=lengths, format=",")
    dash, shape = _dash_and_shape(looks)
    charts = []
    for metric, title in COSTS.items():
        dots, ends = [], []
        for (variant, seq_len), own in grouped(runs, lambda x: (x.variant, x.seq_len)).items():
            row = {"variant": variant, "seq_len": seq_len}
            found = [
                row | {"seed": run.seed, "value": value}
                for run in own
                if (value := run.figure(metric)) is not None
            ]
            dots += found
            if not found and metric == PEAK:
                statuses = dict.fromkeys(run.status for run in own)
                ends.append(row | {"ended": ", ".join(statuses)})
        y = alt.Y("value:Q", scale=scale)
        y = y.axis(format=".3~s" if metric == SPEED else "~r", tickCount=4)
        shown = _shown("dots", looks).encode(x)
        points = shown.mark_point(size=60, filled=True, fillOpacity=0.8)
        tooltip = ["variant:N", "seq_len:Q", "seed:N", VALUE]
        layers = [
            shown.mark_line(strokeWidth=2.2).encode(dash, y="mean(value):Q"),
            points.encode(y, shape, tooltip=tooltip),
        ]
        if ends:  # without rows, their layer has no axis
            crosses = _shown("ends", looks).mark_point(shape=CROSS, size=200, filled=True)
            tooltip = ["variant:N", "ended:N"]
            layers.append(crosses.encode(x, y=alt.value(0), tooltip=tooltip))
        if dots:
            charts.append(_spec(layers, {"dots": dots, "ends": ends}, title))
    return charts


def _shown(data: str, looks: Looks) -> alt.Chart:
    """The variants that are not hidden; those beside the one under the pointer are faint."""
    near = alt.when("focus === null || focus === datum.variant").then(alt.value(1))
    # the page puts its colours in the order of the variants
    color = _look(alt.Color, looks, alt.Undefined)
    visible = alt.Chart(alt.NamedData(data)).transform_filter("indexof(hidden, datum.variant) < 0")
    return visible.encode(color, opacity=near.otherwise(alt.value(0.15)))


def _dash_and_shape(looks: Looks) -> tuple[alt.StrokeDash, alt.Shape]:
    dashes, shapes = zip(*((look.dash, look.shape) for look in looks.values()), strict=True)
    return _look(alt.StrokeDash, looks, dashes), _look(alt.Shape, looks, shapes)


def _look(channel: type, looks: Looks, values: Any) -> Any:
    """A channel with a value for each variant, in their order."""
    return channel("variant:N", legend=None).scale(domain=list(looks), range=values)


def _spec(layers: list[alt.Chart], data: dict[str, list], title: str, **meta: Any) -> dict:
    chart = alt.layer(*layers).add_params(HIDDEN, FOCUS)
    chart = chart.properties(width="container", height=300, description=title, usermeta=meta)
    # a check against Vega-Lite's schema takes as long as all else; the page itself shows faults
    return chart.to_dict(validate=False) | {"datasets": data}
