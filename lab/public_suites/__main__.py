"""Which of our mistakes do the published tests of attention pass, and what would catch them?

    python -m lab.public_suites

Measures on a CPU, in about 12 minutes on one core, and writes results/public_suites.json, its
figure and docs/public-suites.md. These files are tracked by git and then hold the numbers of this
machine. The mistakes are in tests/conformance/mutants.py; lab/public_suites/suites.py restates the
tests. Takes no arguments. `python -m lab.results` draws the figure and the page without measuring.

A suite passes a mistake if it accepts the mistake on all its calls. A mistake is in its reach if
the suite catches it, or if a case of conformance/ catches it that the suite could express. Such a
case has the suite's arguments, dtype and results, but any lengths and numbers.
"""

from typing import Any

from scripts.arguments import NoOptions, command


@command
def main(options: NoOptions) -> None:
    from lab.public_suites import page
    from lab.public_suites.suites import SUITES
    from training.environment import measured_on
    from training.files import check_writable, write_json

    check_writable(page.RECORD)
    measured = {name: measure(name) for name in SUITES}
    write_json(page.RECORD, {"environment": measured_on("cpu"), "suites": measured})
    page.write()


def measure(name: str) -> dict[str, Any]:
    import torch

    from lab.public_suites.reach import additions, smallest_cover
    from lab.public_suites.suites import MEAN, SUITES
    from tests.conformance.mutants import MUTANTS
    from tests.conformance.shipped import CALLS, MEMORY, STRIDES

    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    suite = SUITES[name]
    mistakes = [mutant for mutant in MUTANTS if mutant.survives is None]
    caught_by = {}
    for mutant in mistakes:
        with mutant.installed() as backend:
            if suite.passes(backend):
                caught_by[mutant.name] = additions(backend, suite)
    reach = [mutant for mutant, cases in caught_by.items() if cases]
    in_reach = len(mistakes) - len(caught_by) + len(reach)
    print(f"{suite.title}: passes {len(caught_by)} of {len(mistakes)} mistakes, of the", end=" ")
    print(f"{in_reach} in its reach {len(reach)}: {', '.join(reach)}", flush=True)
    around = {mutant.name for mutant in (*CALLS, *MEMORY, *STRIDES)}
    return {
        "title": suite.title,
        **suite.source._asdict(),
        "inputs": suite.inputs,
        "accepts": suite.accepts,
        "left_out": suite.left_out,
        "mistakes": len(mistakes),
        "passes": list(caught_by),
        "reach": in_reach,
        "passes_in_reach": reach,
        # of those, mistakes about calls, memory and views; the others compute wrong numbers
        "around_the_call": [name for name in reach if name in around],
        "passes_the_mean_of_v": suite.passes(MEAN),
        "add": smallest_cover(caught_by),
    }


if __name__ == "__main__":
    main()
