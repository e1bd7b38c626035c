"""Measure what five documents claim about attention, and write down what holds.

    python -m lab.claims run=causal_as_printed

Without arguments it measures all claims that a CPU can (about two minutes on one core) and writes
results/claims.json and docs/claims.md. These files are tracked by git and then hold the numbers of
this machine. Figures about GPUs and trainings come from other files of results/. The one argument:

    run  names of claims with commas between: measure and print these, write nothing

`python -m lab.results` writes docs/claims.md and measures nothing.
"""

from dataclasses import dataclass

from scripts.arguments import command, default


@dataclass
class Options:
    run: list[str] = default()


@command
def main(options: Options) -> None:
    import torch

    from lab.claims.render import describe
    from lab.claims.topics import CLAIMS

    for name in options.run:
        if name not in CLAIMS:
            raise ValueError(f"run={name} is not a claim; valid: {', '.join(CLAIMS)}")
    torch.set_num_threads(1)
    for name in options.run:
        print(describe(CLAIMS[name], CLAIMS[name].measure()) + "\n", flush=True)
    if not options.run:
        measure_all()


def measure_all() -> None:
    from lab.claims import render
    from lab.claims.topics import CLAIMS
    from lab.results.tables import FOLDER
    from training.environment import environment
    from training.files import check_writable, write_json

    record = FOLDER / "claims.json"
    check_writable(record)
    check_writable(render.PAGE, ".md")
    # without the path of this file
    where = environment("", "cpu") | {"command": ["python", "-m", "lab.claims"]}
    figures = {}
    for name, claim in CLAIMS.items():
        if not claim.reads:
            figures[name] = claim.measure()
            print(f"{name}: {claim.verdict(figures[name])}", flush=True)
    write_json(record, {"environment": where, "claims": figures})
    render.write_page()
    print(f"{render.PAGE} is written from {record}; git diff shows what has changed")


if __name__ == "__main__":
    main()
