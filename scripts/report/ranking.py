"""Which variant is best, by how much, and how clear the difference is.

Softmax attention, exact or deliberately broken, is judged by val/loss_exact: a defect's own loss
can be the lowest and mean nothing. A function that does not claim softmax is judged by its own
loss. Runs are compared only if length, trained tokens, held-out data and seeds are equal.
"""

from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from scripts.report.runs import Run, completed, measured
from scripts.tables import grouped
from training.record.runs import in_order

# Student's t for 95% intervals, from one degree of freedom on; the last one is used for all above
T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
# the baseline is the first of these with runs, else any exact attention
BASELINES = {"naive": 0, "sdpa": 1, "tiled": 2}

Losses = dict[str, dict[str, float]]  # loss by variant and seed


class Difference(NamedTuple):
    """The mean of differences paired by seed, and half of its 95% interval (None for one seed)."""

    mean: float
    half: float | None

    @property
    def is_clear(self) -> bool:
        return self.half is not None and abs(self.mean) > self.half


@dataclass
class Ranking:
    """Comparable variants, best first, each with the same seeds."""

    seq_len: int
    tokens: float
    losses: Losses
    judged_by: dict[str, str]  # the metric that a variant's losses are
    baseline: str | None
    unranked: list[str]  # variants that lack some of the seeds

    @property
    def best(self) -> str:
        return next(iter(self.losses))

    @property
    def seeds(self) -> int:
        return len(self.losses[self.best])

    def difference(self, variant: str, other: str) -> Difference:
        """How much higher the loss of `variant` is than that of `other`."""
        seeds = self.losses[other]
        values = [self.losses[variant][seed] - seeds[seed] for seed in seeds]
        if len(values) == 1:
            return Difference(values[0], None)
        student = T95[min(len(values) - 1, len(T95)) - 1]
        return Difference(fmean(values), student * stdev(values) / sqrt(len(values)))


def rank(runs: list[Run], baseline: str | None = None) -> list[Ranking]:
    """One ranking for each set of comparable runs, short lengths first.

    Raises ValueError if no variant has the baseline's name.
    """
    variants = dict.fromkeys(run.variant for run in runs)
    if baseline is not None and baseline not in variants:
        raise ValueError(f"baseline={baseline} is none of the variants: {', '.join(variants)}")
    judged = [run for run in completed(runs) if run.figure(run.judged_by) is not None]
    groups = sorted(grouped(judged, lambda run: run.compares_by).items())
    return [_ranking(group, baseline) for _, group in groups]


def best_first(runs: list[Run], rankings: list[Ranking]) -> list[Run]:
    """The runs sorted by length, then by the rank of their variant. Unranked variants follow."""
    pairs = [(ranking.seq_len, variant) for ranking in rankings for variant in ranking.losses]

    def place(run: Run) -> tuple:
        pair = run.seq_len, run.variant
        own = pairs.index(pair) if pair in pairs else len(pairs)
        return run.seq_len, own, run.is_defect, in_order(run.variant)

    return sorted(runs, key=place)


def _ranking(runs: list[Run], baseline: str | None) -> Ranking:
    losses, judged_by = {}, {run.variant: run.judged_by for run in runs}
    for variant, own in grouped(runs, lambda run: run.variant).items():
        metric, by_seed = judged_by[variant], grouped(own, lambda run: run.seed)
        losses[variant] = {seed: fmean(measured(each, metric)) for seed, each in by_seed.items()}
    seeds = common_seeds(losses)
    ranked = [
        (variant, {seed: own[seed] for seed in seeds})
        for variant, own in losses.items()
        if seeds <= own.keys()
    ]
    ranked = dict(sorted(ranked, key=lambda item: (fmean(item[1].values()), item[0])))
    exact = [run for run in runs if run.is_softmax and not run.is_defect and run.variant in ranked]
    return Ranking(
        runs[0].seq_len,
        runs[0].tokens,
        ranked,
        judged_by,
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
    def place(run: Run) -> tuple:
        return BASELINES.get(run.attention, len(BASELINES)), in_order(run.variant)

    return min(exact, key=place).variant if exact else None


def verdict(ranking: Ranking, *, at_length: bool) -> tuple[str, str]:
    """The result as a headline and a sentence. at_length: whether to name the length."""
    losses, best = ranking.losses, ranking.best
    means = {
        name: f"{ranking.judged_by[name]} {fmean(own.values()):.3f}" for name, own in losses.items()
    }
    where = f" at {ranking.seq_len:,} tokens of context" if at_length else ""
    after = f"After {ranking.tokens:,.0f} tokens, " if ranking.tokens else ""
    lacking = ", ".join(ranking.unranked)
    unranked = f" Not ranked, for want of the same seeds: {lacking}." if lacking else ""
    if ranking.seeds == 1:
        head = f"One seed: no winner{where}" if len(losses) > 1 else f"{best}{where}"
        order = ", ".join(f"{mean} of {name}" for name, mean in means.items())
        return head, f"{after}one seed has {order}.{unranked}"
    spread = f"{means[best]} ± {stdev(losses[best].values()):.3f}"
    text = f"{after}{ranking.seeds} seeds of {best} have {spread}"
    if len(losses) == 1:
        return f"{best}{where}", f"{text}.{unranked}"
    head = f"{best} is best{where}"
    others = list(losses)[1:]
    if level := [name for name in others if not ranking.difference(name, best).is_clear]:
        head = f"No winner{where}"
        text = f"{after}{ranking.seeds} seeds do not tell {best} from {', '.join(level)}."
        text += f" {best} has {spread}"
    whose, other = "the baseline", ranking.baseline
    if other in (None, best):
        whose, other = "the next", others[0]
    mean, half = ranking.difference(other, best)
    interval = f"{mean - half:+z.3f} to {mean + half:+z.3f}"
    text += f", {mean:.3f} below {whose}, {other} (paired by seed, 95%: {interval})"
    return head, f"{text}.{unranked}"
