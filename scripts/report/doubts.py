"""What a reader must know before the figures: doubts about variants and comparisons."""

from scripts.report.runs import Run
from training.record.names import belies_exact
from training.record.starts import changes_in_words


def doubts(runs: list[Run], left_out: int) -> list[str]:
    """A sentence for each. left_out: the number of jobs that never started."""
    texts = []
    belied = {run.variant: run for run in runs if belies_exact(run.summary)}
    for variant, run in belied.items():
        own, exact = run.figure("val/loss"), run.figure("val/loss_exact")
        texts.append(
            f"{variant} is labelled exact and is not: its own val/loss is {own:.3f}, that of the "
            f"same weights under exact attention {exact:.3f}."
        )
    if left_out:
        texts.append(
            f"Of the sweep's jobs, {left_out} never started: the same command with "
            "hydra.sweep.dir=FOLDER goes on with what is left."
        )
    if len({run.data for run in runs} - {"None"}) > 1:
        # the fingerprint includes the tokenizer
        texts.append(
            "These runs read different data or tokenizers: curves compare only where the data "
            "fingerprint is the same. Of one corpus under several tokenizers, val/bpb compares."
        )
    machines = {run.machine for run in runs if run.figure("tokens_per_sec")} - {None}
    if len(machines) > 1:
        texts.append(f"The speeds were measured on different machines: {'; '.join(machines)}.")
    changes = ((run.name, changes_in_words(run.summary)) for run in runs)
    return texts + [f"{name} was {change}." for name, change in changes if change]
