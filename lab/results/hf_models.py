"""The section of results/README.md about models of transformers with our attention."""

from statistics import fmean

from lab.results.tables import load, section, table
from scripts.tables import Row, by, mean_and_deviation, values

FILES = ("hf_models_cpu", "hf_models_h200")
FIGURES = ("logits", "gradients")


def both_parts() -> str:
    """Errors of whole models beside those of eager attention, and equal tokens of generate()."""
    return "\n\n".join(
        section(data, *errors(data), refusals(data["errors"]), *tokens(data["tokens"]))
        for data in map(load, FILES)
    )


def errors(data: Row) -> tuple[str, str]:
    eager, *names = by(data["errors"], "attention")
    lines = []
    for (model, dtype), rows in by(data["errors"], "model", "dtype").items():
        of = by(rows, "attention")
        own = [f"{fmean(values(of[eager], x)):.1e}" for x in FIGURES]
        ratios = [
            mean_and_deviation(values(of[name], f"{x}_ratio"), "{:.2f}")
            for name in names
            for x in FIGURES
        ]
        lines.append([model, dtype, *own, *ratios])
    size = data["models"]["mistral"]
    seeds = max(row["seed"] for row in data["errors"]) + 1
    what = (
        f"Random models of {size['num_hidden_layers']} layers and width {size['hidden_size']}, "
        f"with {size['num_attention_heads']} heads and, but for GPT-2, "
        f"{size['num_key_value_heads']} key/value heads. They read {data['batch']} sequences of "
        f"{data['length']}. Mistral and every second layer of gpt-oss have windows of "
        f"{size['sliding_window']}; gpt-oss also has sinks. The whole model is in the dtype. "
        "Errors are against the same weights in float64. Eager attention has two: the largest of "
        "a logit, and the largest of a gradient relative to that gradient's largest entry. The "
        "others' errors are divided by eager's: mean ± standard deviation, "
        f"n={seeds}."
    )
    head = ["model", "dtype", *(f"{name} {x}" for name in (eager, *names) for x in FIGURES)]
    return what, table(head, lines)


def refusals(rows: list[Row]) -> str:
    """The reasons behind the dashes."""
    refused = by((row for row in rows if "refused" in row), "model", "attention", "refused")
    return "\n".join(
        f"- {name} does not run in {model}. It says: {why}." for model, name, why in refused
    )


def tokens(rows: list[Row]) -> tuple[str, str]:
    lines = []
    for (model, cache), each in by(rows, "model", "cache").items():
        gap = values(each, "least_gap")[0]
        lines.append([model, cache, f"{gap:.1e}", *map(equal, each)])
    what = (
        "Then generate() in float32, greedy, from three prompts with different padding on the "
        "left. The table counts the tokens before the first that differs from eager attention's. "
        "The gap is the least between eager's two largest logits."
    )
    return what, table(["model", "cache", "gap", *by(rows, "attention")], lines)


def equal(row: Row) -> str:
    if "refused" in row:
        return "-"
    gaps = ", ".join(f"{x['gap']:.1e}" for x in row["differences"])
    return f"{row['equal']} of {row['tokens']}" + f" (gap {gaps})" * bool(gaps)
