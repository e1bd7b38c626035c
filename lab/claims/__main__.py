"""Measure every claim the five documents make about attention, and write down what holds.

    python -m lab.claims run=causal_as_printed

Without arguments it measures all claims a CPU can (about two minutes on one core), writes
results/claims.json, docs/claims.md and docs/questions.md: files that git tracks, whose figures are
then this machine's. Claims about GPUs and trainings are read from the other files of results/.
Arguments are key=value:

    run     names of claims with commas between: measure these, print what was found, write nothing
    render  true: measure nothing, write the two pages from results/
"""

import sys
import time
from pathlib import Path

from training.interrupt import one_line
from training.metrics import environment, write_json


@one_line("claims")
def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    options = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    unknown = set(options) - {"run", "render"}
    if unknown or options.get("render", "true") not in ("true", "false"):
        sys.exit(
            f"claims: {' '.join(sys.argv[1:])!r} is not understood; valid: run=NAME,NAME "
            "or render=true"
        )

    import torch

    from lab.claims import CLAIMS
    from lab.claims.claim import RESULTS
    from lab.claims.render import DOCS, PAGES, found, write_pages

    names = options["run"].split(",") if "run" in options else list(CLAIMS)
    for name in names:
        if name not in CLAIMS:
            sys.exit(f"claims: run={name} is not a claim; valid: {', '.join(CLAIMS)}")
    torch.set_num_threads(1)
    figures = {}
    for name in names if options.get("render") != "true" else []:
        claim = CLAIMS[name]
        start = time.perf_counter()
        try:
            own = claim.measure()
        except FileNotFoundError:
            own = None
        if claim.reads is None:
            figures[name] = own
        measured, verdict = found(claim, own)
        if "run" in options:
            print(
                f"{name}: {verdict}\n  the {claim.documents.replace(', ', ', the ')}: {claim.says}"
            )
            print(f"  holds if {claim.criterion}\n  {measured}")
        else:
            print(f"{name}: {verdict} ({time.perf_counter() - start:.1f} s)", flush=True)
    if "run" in options:
        return
    pages = [RESULTS / "claims.json", *(DOCS / page for page in PAGES)]
    before = {path: path.read_text() if path.is_file() else None for path in pages}
    if figures:
        # without the path of this file
        where = environment("", "cpu") | {"command": ["python", "-m", "lab.claims"]}
        write_json(RESULTS / "claims.json", {"environment": where, "claims": figures})
    try:
        write_pages()
    except FileNotFoundError as error:
        sys.exit(
            f"claims: {Path(error.filename).name} is missing; measure first: python -m lab.claims"
        )
    changed = [
        str(path.relative_to(RESULTS.parent))
        for path, text in before.items()
        if path.read_text() != text
    ]
    print(
        f"changed: {' '.join(changed)}; git restore brings the committed ones back"
        if changed
        else "no file has changed"
    )


if __name__ == "__main__":
    main()
