"""Run directories as training leaves them, without training."""

import json
import math
from pathlib import Path
from typing import Any

DEFECTS = ("no_max", "no_rescale")
ENV = {
    "commit": "c0ffee",
    "dirty": False,
    "data_fingerprint": "corpus-1",
    "versions": {"torch": "2.13"},
    "hardware": {"cpu": "some CPU", "gpu": None},
    "command": ["python", "/home/me/train.py"],
}
STEPS = {
    "completed": 600,
    "interrupted": 300,
    "unfinished": 300,
    "diverged": 260,
    "oom": 0,
    "failed": 0,
}


def write_lines(path: Path, rows: list) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_run(
    folder: Path,
    attention: str,
    *,
    seed: int = 0,
    seq_len: int = 256,
    status: str = "completed",
    loss: float = 1.6,
    gap: float = 0.0,
    env: dict[str, Any] | None = None,
    eval_sequences: int = 64,
    extra: tuple[str, ...] = (),
    **summary: Any,
) -> Path:
    """A run whose loss falls to `loss`, and to `loss + gap` under exact attention."""
    folder.mkdir(parents=True)
    steps = range(0, STEPS[status] + 1, 20) if STEPS[status] else ()
    rows = []
    for step in steps:
        now = loss + 4 * math.exp(-step / 60) - 4 * math.exp(-10)
        row = {"step": step, "tokens": step * 16 * seq_len, "train/loss": now}
        row["attention/max_score"] = 0.05 * (step + 1)
        if step % 40 == 0 and (status != "diverged" or step < 240):
            row |= {"val/loss": now, "val/loss_exact": now + gap}
        rows.append(row)
    write_lines(folder / "metrics.jsonl", rows)
    found = {
        "status": status,
        "attention": attention,
        "seq_len": seq_len,
        "seed": seed,
        "steps_done": STEPS[status],
        "tokens": STEPS[status] * 16 * seq_len,
        "defect": attention in DEFECTS,
        "exact": attention not in DEFECTS,
        "overrides": [f"attention={attention}", f"seq_len={seq_len}", f"seed={seed}", *extra],
    }
    if status not in ("oom", "failed"):
        found |= {"tokens_per_sec": 400.0 + seed, "step_tokens_per_sec": 1000.0 + seed}
        found |= {"memory/peak_gib": (seq_len / 1024) ** 2}
        evaluated = [row for row in rows if "val/loss" in row][-1]
        found |= {name: evaluated[name] for name in ("val/loss", "val/loss_exact")}
    (folder / "summary.json").write_text(json.dumps(found | summary))
    (folder / "env.json").write_text(json.dumps(ENV | (env or {})))
    config = {"attention": {"name": attention}, "seq_len": seq_len, "seed": seed}
    config |= {"log_every": 20, "eval_sequences": eval_sequences}
    (folder / "config.yaml").write_text(json.dumps(config))
    return folder


def write_seeds(folder: Path, attention: str, *losses: float, **settings: Any) -> None:
    """A completed run for each loss, its seed counted from 0, in folders of a free number."""
    for seed, loss in enumerate(losses):
        number = len(list(folder.glob("*")))
        write_run(folder / str(number), attention, seed=seed, loss=loss, **settings)
