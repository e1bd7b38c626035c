"""Which variant is best, by how much, and how clear the difference is.

Softmax attention, exact or deliberately broken, is ranked by val/loss_exact: a defect's own loss
can be the lowest and mean nothing. A function that does not claim softmax is ranked by its own
loss. Runs are compared only if length, trained tokens, held-out data and seeds are equal.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from scripts.report.runs import Run, ended, measured
from scripts.tables import grouped
from training.record.runs import in_order

# Student's t for 95% intervals, from one degree of freedom on; the last one is used for all above
T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
# the baseline is the first of these with runs, else any exact attention
BASELINES = ("naive", "sdpa", "tiled")

Losses = dict[str, dict[str, float]]  # loss by variant and seed


def student(count: int) -> float:
    """Student's t of a 95% interval from `count` values, two or more."""
    return T95[min(count - 1, len(T95)) - 1]


class Difference(NamedTuple):
    """The mean of differences paired by seed, and half of its 95% interval (None for one seed)."""

    mean: float
    half: float | None

    @property
    def is_clear(self) -> bool:
        return self.half is not None and abs(self.mean) > self.half

    def interval(self, *, sign: int = 1) -> str:
        if self.half is None:
            return "one seed"
        ends = sorted(sign * self.mean + end for end in (-self.half, self.half))
        return " to ".join(f"{end:+.3f}" for end in ends)


@dataclass
class Ranking:
    """Comparable variants, best first, each with the same seeds."""

    metric: str
    seq_len: int
    tokens: float
    losses: Losses
    baseline: str | None
    unranked: list[str]  # variants that lack some of the seeds

    @property
    def best(self) -> str:
        return next(iter(self.losses))

    @property
    def seeds(self) -> int:
        return len(self.losses[self.best])

    @property
    def level(self) -> list[str]:
        """Variants that these seeds cannot distinguish from the best one."""
        others = list(self.losses)[1:]
        return [name for name in others if not self.difference(name, self.best).is_clear]

    def difference(self, variant: str, other: str) -> Difference:
        """How much higher the loss of `variant` is than that of `other`."""
        seeds = self.losses[other]
        values = [self.losses[variant][seed] - seeds[seed] for seed in seeds]
        if len(values) == 1:
            return Difference(values[0], None)
        return Difference(fmean(values), student(len(values)) * stdev(values) / sqrt(len(values)))


def rank(runs: Iterable[Run], baseline: str | None = None) -> list[Ranking]:
    """One ranking for each set of comparable runs: short lengths first, and for each length softmax
    attention first.
    """
    judged = [run for run in ended(runs, "completed") if run.figure(run.judged_by) is not None]
    rankings = []
    for _, group in sorted(grouped(judged, lambda run: run.compares_by).items()):
        softmax = [run for run in group if run.is_softmax]
        others = [run for run in group if not run.is_softmax]
        first = softmax and _ranking("val/loss_exact", softmax, softmax, baseline)
        if first:
            rankings.append(first)
        if others:
            # for exact attention, the own loss is the exact loss
            reference = [run for run in softmax if first and run.variant == first.baseline]
            rankings.append(_ranking("val/loss", others + reference, reference, baseline))
    return rankings


def best_first(runs: list[Run], rankings: list[Ranking], order: list[str]) -> list[Run]:
    """The runs sorted by length, then by the rank of their variant. Unranked variants follow, in
    `order`.
    """
    places: dict[tuple[int, str], int] = {}
    for ranking in rankings:
        for variant in ranking.losses:
            places.setdefault((ranking.seq_len, variant), len(places))

    def place(run: Run) -> tuple[int, int, int]:
        own = places.get((run.seq_len, run.variant), len(places))
        return run.seq_len, own, order.index(run.variant)

    return sorted(runs, key=place)


def _ranking(metric: str, runs: list[Run], exact: list[Run], baseline: str | None) -> Ranking:
    runs = [run for run in runs if run.figure(metric) is not None]
    losses = {}
    for variant, own in grouped(runs, lambda run: run.variant).items():
        by_seed = grouped(own, lambda run: str(run.summary.get("seed")))
        losses[variant] = {seed: fmean(measured(each, metric)) for seed, each in by_seed.items()}
    seeds = common_seeds(losses)
    ranked = [
        (variant, {seed: own[seed] for seed in seeds})
        for variant, own in losses.items()
        if seeds <= own.keys()
    ]
    ranked = dict(sorted(ranked, key=lambda item: (fmean(item[1].values()), item[0])))
    exact = [run for run in exact if run.claims_exact and run.variant in ranked]
    return Ranking(
        metric,
        runs[0].seq_len,
        runs[0].tokens,
        ranked,
        baseline if baseline in ranked else pick_baseline(exact),
        [variant for variant in losses if variant not in ranked],
    )


def common_seeds(losses: Losses) -> set[str]:
    """The seeds that maximise variants times seeds, for variants that have all of these seeds."""
    candidates = [set(own) for own in losses.values()]
    candidates.append(set.intersection(*candidates))

    def worth(seeds: set[str]) -> tuple[bool, int]:
        variants = sum(seeds <= own.keys() for own in losses.values())
        return bool(seeds) and variants > 1, variants * len(seeds)

    return max(candidates, key=worth)


def pick_baseline(exact: list[Run]) -> str | None:
    for name in BASELINES:
        if own := [run.variant for run in exact if run.summary.get("attention") == name]:
            return min(own, key=in_order)
    return min((run.variant for run in exact), key=in_order, default=None)


def answer(ranking: Ranking, *, where: str) -> str:
    """The result in one or two sentences. where: the length, if there are several."""
    names = ", ".join(ranking.unranked)
    left_out = f" Not ranked, for want of the same seeds: {names}." if names else ""
    return _result(ranking, where) + left_out


def _result(ranking: Ranking, where: str) -> str:
    losses, metric = ranking.losses, ranking.metric
    best, baseline = ranking.best, ranking.baseline
    where += f" after {ranking.tokens:,.0f} tokens" if ranking.tokens else ""
    means = {name: fmean(own.values()) for name, own in losses.items()}
    if ranking.seeds == 1:
        order = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
        if len(losses) == 1:
            return f"One seed of one variant{where}: {metric} of {order}."
        return f"One seed: no winner{where}. The order by {metric} as it stands: {order}."
    spread = f"{metric} {means[best]:.3f} ± {stdev(losses[best].values()):.3f}"
    seeds = f"{ranking.seeds} seeds"
    if len(losses) == 1:
        return f"One variant{where}: {best}, {spread} over {seeds}."
    if level := ranking.level:
        others = ", ".join(level)
        text = f"No winner{where}: {seeds} do not tell {best} from {others}. {best} has {spread}"
    else:
        text = f"Best{where}: {best}, {spread} over {seeds}"
    if baseline in (None, best):
        second = list(losses)[1]
        found = ranking.difference(second, best)
        known = "the baseline; " if baseline else ""
        text += f", {known}the next, {second}, is {found.mean:.3f} above it"
        interval = found.interval()
    else:
        found = ranking.difference(best, baseline)
        text += f", {-found.mean:.3f} below the baseline {baseline}"
        interval = found.interval(sign=-1)
    return f"{text} (paired by seed, 95%: {interval})."
