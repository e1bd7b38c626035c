"""The section of results/README.md about models of transformers with our attention."""

from statistics import fmean

from lab.results.tables import load, section, table
from scripts.tables import Row, by, mean_and_deviation, values

FILES = ("hf_models_cpu", "hf_models_h100")
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
        f"Random models of {size['num_hidden_layers']} layers, width {size['hidden_size']}, "
        f"{size['num_attention_heads']} heads, {size['num_key_value_heads']} key/value heads (not "
        f"GPT-2); {data['batch']} sequences of {data['length']}; windows of "
        f"{size['sliding_window']} in Mistral and in every second layer of gpt-oss, which has "
        "sinks too. The whole model is in the dtype. For eager attention: the largest error of a "
        "logit, and the largest of any parameter's gradient relative to its largest entry, both "
        "against the same weights in float64. For the others: their errors divided by eager's, "
        f"mean ± standard deviation, n={seeds}."
    )
    head = ["model", "dtype", *(f"{name} {x}" for name in (eager, *names) for x in FIGURES)]
    return what, table(head, lines)


def refusals(rows: list[Row]) -> str:
    """The reasons behind the dashes."""
    refused = by((row for row in rows if "refused" in row), "model", "attention", "refused")
    return "\n".join(f"- {model} refuses {name}: {why}" for model, name, why in refused)


def tokens(rows: list[Row]) -> tuple[str, str]:
    lines = []
    for (model, cache), each in by(rows, "model", "cache").items():
        gap = values(each, "least_gap")[0]
        lines.append([model, cache, f"{gap:.1e}", *map(equal, each)])
    what = (
        "generate() in float32, greedy, three prompts with different padding on the left: how many "
        "tokens come before the first that differs from eager attention's. The gap is the least "
        "between eager's two largest logits."
    )
    return what, table(["model", "cache", "gap", *by(rows, "attention")], lines)


def equal(row: Row) -> str:
    if "refused" in row:
        return "-"
    gaps = ", ".join(f"{x['gap']:.1e}" for x in row["differences"])
    return f"{row['equal']} of {row['tokens']}" + f" (gap {gaps})" * bool(gaps)
