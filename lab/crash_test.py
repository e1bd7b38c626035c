"""Kill a training at random moments, damage its files, and check that the resumed run ends as if
nothing had happened.

    python -m lab.crash_test out=outputs/kills.json

    kills  runs to kill (20)
    harms  runs whose files are damaged after they were killed (30)
    seed   of the random moments (0)
    out    the result (outputs/kills.json)

Every training is a separate process, `python train.py` on one CPU core. kills= runs are killed
(SIGKILL), every other one while it saves, and resumed. harms= more runs are killed. Then a file of
their latest checkpoint, of every checkpoint, or metrics.jsonl, env.json or config.yaml is
truncated, altered or removed.

Weights, optimizer, random state and every computed row of metrics.jsonl must then equal, bit for
bit, those of an undisturbed run. If no whole checkpoint is left, the run must end with a one-line
error and leave its files unchanged. The exit code is 1 otherwise.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_flatten

from scripts.arguments import Json, Natural, command
from scripts.tables import Row
from training.record.environment import ROOT, measured_on
from training.record.files import (
    FRESH,
    LATEST,
    meta_of,
    newest_first,
    read_metrics,
    write_json,
)

STEPS, EVERY = 200, 10
# everything that has state: dropout, two passes a step, rows, evaluations and checkpoints at
# different steps, and in between steps that are queued before the results of the previous step are
# read
RUN = (
    "device=cpu model.num_layers=2 model.num_heads=2 model.hidden_size=64 model.dropout=0.1 "
    "seq_len=32 batch_size=4 tokens_per_step=256 "
    f"steps={STEPS} log_every=3 eval_every=15 eval_sequences=8 checkpoint_every={EVERY} "
    "sample_tokens=0 logger=none"
).split()
# prefixes of the columns that differ between two otherwise equal runs
MEASURED = ("seconds", "tokens_per_sec", "step_tokens_per_sec", "mfu", "memory/")
IDENTICAL, REFUSED = "identical", "refused"


@dataclass
class Options:
    kills: Natural = 20
    harms: Natural = 30
    seed: int = 0
    out: Json = Json("outputs/kills.json")


def start(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "train.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    """Exit code and everything that was printed."""
    output = process.communicate(timeout=600)[0]
    return process.returncode, output


def wait_for(process: subprocess.Popen, happened: Callable[[], bool]) -> None:
    while process.poll() is None and not happened():
        time.sleep(0.0002)


def reached(run_dir: Path) -> int:
    """The step of the last complete row of metrics; -1 before the first."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else -1


def state(run_dir: Path) -> Row:
    """Everything that must be equal at the end of two equal runs."""
    folder = run_dir / LATEST
    rows = read_metrics(run_dir / "metrics.jsonl")
    training = torch.load(folder / "training.pt", weights_only=True)
    # a run uses only PyTorch's generators; those of Python and NumPy are not seeded and differ
    # between processes
    training["random"] = {name: training["random"][name] for name in ("torch", "cuda")}
    return {
        "weights": load_file(folder / "model.safetensors"),
        "training": training,
        "metrics": [
            {key: value for key, value in row.items() if not key.startswith(MEASURED)}
            for row in rows
        ],
        "rows": (run_dir / "metrics.jsonl").read_bytes().count(b"\n"),
    }


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, through dictionaries, lists and tensors."""
    (own, form), (others, other_form) = tree_flatten(a), tree_flatten(b)
    return form == other_form and all(map(equal, own, others))


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


def contents(run_dir: Path) -> dict[Path, bytes]:
    """Every file of a run except the log of its output."""
    files = (path for path in run_dir.rglob("*") if path.is_file() and path.name != "train.log")
    return {path: path.read_bytes() for path in files}


def is_one_line(output: str) -> bool:
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    return "Traceback" not in output and len(errors) == 1


def killed(
    run_dir: Path, moment: random.Random, *, saving: bool = False, earliest: int = 3 * EVERY
) -> Row:
    """Start a run and kill it after a random row of metrics, or in the save after that row. Returns
    where it was killed.
    """
    process = start(*RUN, f"hydra.run.dir={run_dir}")
    step = moment.randint(earliest, STEPS - 2 * EVERY)
    wait_for(process, lambda: reached(run_dir) >= step)
    if saving:
        wait_for(process, (run_dir / FRESH).exists)
    time.sleep(moment.uniform(0, 0.01))
    process.kill()
    code, output = finish(process)
    if code != -signal.SIGKILL:
        raise RuntimeError(f"the run ended with {code} before it was killed: {output}")
    last = next(iter(newest_first(run_dir)), None)
    # an interrupted save leaves these traces
    moved = last is not None and not (run_dir / LATEST).exists()
    return {
        "step": reached(run_dir),
        "checkpoint": meta_of(last)["step"] if last else None,
        "in_a_save": moved or (run_dir / FRESH).exists(),
    }


def judged(run_dir: Path, straight: Row, *, said: str = "") -> str:
    """Resume to the end and compare with the undisturbed run."""
    before = contents(run_dir)
    code, output = finish(start(f"resume={run_dir}"))
    if code != 0:
        unharmed = is_one_line(output) and before.items() <= contents(run_dir).items()
        return REFUSED if unharmed else f"ended with {code}: {output.strip().splitlines()[-1]}"
    if said not in output:
        return f"does not say: {said}"
    return IDENTICAL if same(state(run_dir), straight) else "another run"


def kill(run_dir: Path, straight: Row, moment: random.Random, *, saving: bool) -> Row:
    found = killed(run_dir, moment, saving=saving, earliest=1)
    outcome = judged(run_dir, straight)
    # before the first save there is nothing to resume
    expected = IDENTICAL if found["checkpoint"] is not None else REFUSED
    return found | {"outcome": outcome if outcome == expected else f"resumed: {outcome}"}


def harm(run_dir: Path, straight: Row, moment: random.Random, name: str) -> Row:
    """Kill a run and damage some of its files."""
    damaging, said, expected = HARMS[name]
    found = killed(run_dir, moment) | {"harm": name, "what": damaging(run_dir, moment)}
    outcome = judged(run_dir, straight, said=said)
    return found | {"outcome": outcome if outcome in expected else f"resumed: {outcome}"}


def damage(files: Iterable[Path], moment: random.Random) -> str:
    """Truncate, alter or remove one of these files. Returns what was done."""
    path = moment.choice(sorted(files))
    size = path.stat().st_size
    how = moment.choice(["truncated", "altered", "removed"])
    if how == "removed":
        path.unlink()
        return f"{path.name} removed"
    position = moment.randrange(size)
    with path.open("r+b") as file:
        if how == "truncated":
            file.truncate(position)
        else:
            file.seek(position)
            (byte,) = file.read(1)
            file.seek(position)
            file.write(bytes([byte ^ 1 << moment.randrange(8)]))
    return f"{path.name} {how} at byte {position}"


def damage_latest(run_dir: Path, moment: random.Random) -> str:
    return damage(newest_first(run_dir)[0].iterdir(), moment)


def damage_all(run_dir: Path, moment: random.Random) -> list[str]:
    return [damage(folder.iterdir(), moment) for folder in newest_first(run_dir)]


def damage_record(run_dir: Path, moment: random.Random) -> str:
    names = ("metrics.jsonl", "env.json", "config.yaml")
    return damage([run_dir / name for name in names], moment)


# the harm, what the resumed run must print, and how it may end
HARMS = {
    "latest damaged": (damage_latest, "going on from step", (IDENTICAL,)),
    "all damaged": (damage_all, "", (REFUSED,)),
    "record damaged": (damage_record, "", (IDENTICAL,)),
}


def measure(folder: Path, options: Options) -> Row:
    kills, runs, seed = options.kills, options.kills + options.harms, options.seed
    straight_dir = folder / "straight"
    code, output = finish(start(*RUN, f"hydra.run.dir={straight_dir}"))
    if code != 0:
        raise RuntimeError(f"the run that nothing disturbs ended with {code}: {output}")
    straight = state(straight_dir)
    result = {"run": RUN, "seed": seed, "kills": [], "harms": []}
    for index in range(runs):
        moment, run_dir = random.Random(f"{seed}-{index}"), folder / str(index)
        if index < kills:
            found = kill(run_dir, straight, moment, saving=index % 2 == 1)
        else:
            name = list(HARMS)[(index - kills) % len(HARMS)]
            found = harm(run_dir, straight, moment, name)
        result["kills" if index < kills else "harms"].append(found)
        print(f"{index + 1} of {runs}: {json.dumps(found)}", flush=True)
        if found["outcome"] in (IDENTICAL, REFUSED):
            shutil.rmtree(run_dir)
    return result


@command
def main(options: Options) -> None:
    folder = Path(tempfile.mkdtemp(prefix="tilegpt-kills-"))
    result = measure(folder, options)
    outcomes = {
        name: dict(Counter(each["outcome"] for each in result[name])) for name in ("kills", "harms")
    }
    write_json(options.out, {"environment": measured_on("cpu"), **result, "outcomes": outcomes})
    print(f"{options.out}: kills {outcomes['kills']}, harms {outcomes['harms']}")
    # keep the folder of an unexpected outcome for inspection
    if any(counts.keys() - {IDENTICAL, REFUSED} for counts in outcomes.values()):
        sys.exit(f"crash_test: a run did not survive; its folder is below {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
