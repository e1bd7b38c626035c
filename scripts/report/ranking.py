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
    # the seeds follow: see common_seeds()
    alike = grouped(judged, lambda run: (run.seq_len, run.tokens, run.eval_sequences, run.data))
    return [_ranking(group, baseline) for _, group in sorted(alike.items())]


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
    ranked = {
        variant: {seed: own[seed] for seed in seeds}
        for variant, own in losses.items()
        if seeds <= own.keys()
    }
    ranked = dict(sorted(ranked.items(), key=lambda item: (fmean(item[1].values()), item[0])))
    if baseline not in ranked:
        exact = [run for run in runs if run.is_softmax and not run.is_defect]
        usual = [run for run in exact if run.variant in ranked]
        others = len(BASELINES)
        usual.sort(key=lambda run: (BASELINES.get(run.attention, others), in_order(run.variant)))
        baseline = usual[0].variant if usual else None
    return Ranking(
        runs[0].seq_len,
        runs[0].tokens,
        ranked,
        judged_by,
        baseline,
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


def verdict(ranking: Ranking, *, at_length: bool) -> tuple[str, str]:
    """The result as a headline and a sentence. at_length: whether to name the length."""
    head, text = _result(ranking)
    where = f" at {ranking.seq_len:,} tokens of context" if at_length else ""
    after = f"After {ranking.tokens:,.0f} tokens, " if ranking.tokens else ""
    lacking = ", ".join(ranking.unranked)
    unranked = f" Not ranked, for want of the same seeds: {lacking}." if lacking else ""
    return head + where, f"{after}{text}.{unranked}"


def _result(ranking: Ranking) -> tuple[str, str]:
    """Who is best, and by how much."""
    losses = ranking.losses
    best, *others = losses
    seeds = len(losses[best])
    means = {
        name: f"{ranking.judged_by[name]} {fmean(own.values()):.3f}" for name, own in losses.items()
    }
    if seeds == 1:
        order = ", ".join(f"{mean} of {name}" for name, mean in means.items())
        return "One seed: no winner" if others else best, f"one seed has {order}"
    spread = f"{means[best]} ± {stdev(losses[best].values()):.3f}"
    text = f"{seeds} seeds of {best} have {spread}"
    if not others:
        return best, text
    head = f"{best} is best"
    if level := [name for name in others if not ranking.difference(name, best).is_clear]:
        head, names = "No winner", ", ".join(level)
        text = f"{seeds} seeds do not tell {best} from {names}. {best} has {spread}"
    whose, other = "the baseline", ranking.baseline
    if other in (None, best):
        whose, other = "the next", others[0]
    mean, half = ranking.difference(other, best)
    interval = f"{mean - half:+z.3f} to {mean + half:+z.3f}"
    return head, f"{text}, {mean:.3f} below {whose}, {other} (paired by seed, 95%: {interval})"
