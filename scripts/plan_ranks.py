"""The table of `python -m scripts.plan ranks=...`: one step on many GPUs, from measured links.

The speed of one GPU and of the links comes from results/; training/scaling.py calculates the rest.
"""

import json
from collections.abc import Sequence

import torch

from attention import Backend, dtype_name
from config import ModelConfig, RunConfig
from scripts.tables import Row, text_table
from training.hardware import CARD_SIZES, CONTEXT_GIB
from training.memory import GIB
from training.own_modules import ROOT
from training.plan import parameter_count
from training.scaling import Hosts, Link, RanksPlan, Speed, fit_speed, plan_ranks

RESULTS = ROOT / "results"
LINKS, STEPS, PARTS = "links_h200.json", "nanogpt_h200.json", "profile_h200.json"
TWO_GPUS = "steps_on_ranks_h100.json"
MIB = 2**20


def read(name: str) -> Row:
    path = RESULTS / name
    if not path.exists():
        raise ValueError(f"{path} is missing: ranks= plans from the results of the repository")
    return json.loads(path.read_text())


def read_link(key: str, text: str, *, gpus: int = 1) -> Link:
    """Read a Link from `text`: its name, or the GB/s that each GPU reaches. gpus: how many share a
    host's port. Raises ValueError for any other text.
    """
    links = read(LINKS)["links"]
    if text in links:
        link = links[text]
        if calls := link.get("calls"):
            return Link(text, measured={name: points(**call) for name, call in calls.items()})
        return Link(text, link["gb_per_s"] / (gpus if link["port_of"] == "host" else 1))
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ValueError(
            f"{key}={text} is neither one of {', '.join(links)} nor a number of GB/s that a GPU "
            f"reaches, such as {key}=45"
        )
    return Link(f"{rate:g} GB/s", rate)


def points(latency_us: float, rows: list[dict[str, float]]) -> tuple[tuple[float, float], ...]:
    """Pairs of bytes sent and seconds, starting with an empty message."""
    sizes = [row["sent_mib"] * MIB for row in rows]
    seconds = [size / row["gb_per_s"] / 1e9 for size, row in zip(sizes, rows, strict=True)]
    return (0.0, min(latency_us / 1e6, seconds[0])), *zip(sizes, seconds, strict=True)


def measured_speed() -> Speed:
    """The speed of one H200, from measured steps of GPT-2 at three lengths, by attention=triton."""
    file, profile = read(STEPS), read(PARTS)
    rows = [row for row in file["speed"] if row["who"] == "triton"]
    fields = {key: value for key, value in profile["model"].items() if key != "max_seq_len"}
    (optimizer,) = (part["ms"] for part in profile["parts"] if part["part"] == "optimizer")
    return fit_speed(
        ModelConfig(**fields),
        file["settings"]["vocab_size"],
        [(row["seq_len"], row["tokens_per_sec"]) for row in rows],
        tokens=file["settings"]["tokens"],
        optimizer=optimizer / 1000,
    )


def merging_seconds() -> float:
    """What a ring takes to merge, per layer, hop and feature of a token's queries: by a profile of
    two H100s, its elementwise kernels without those that exchanging heads needs too.
    """
    profiles = {(each["who"], each["seq_len"]): each for each in read(TWO_GPUS)["profiles"]}
    longest = max(length for who, length in profiles if who == "ours:ring")
    ring, heads = (
        profiles[who, longest]["parts_ms"]["norms, elementwise"]
        for who in ("ours:ring", "ours:heads")
    )
    model = read(PARTS)["model"]  # GPT-2, as there
    features = longest / 2 * model["hidden_size"]
    return (ring - heads) / 1000 / (features * 2 * model["num_layers"])


def reached() -> dict[str, float]:
    """How much faster two GPUs trained GPT-2 on a sequence of 131,072 tokens than one GPU did, with
    the same code. The last row of a kind is the newest.
    """
    rows = [row for row in read(TWO_GPUS)["rows"] if row["seq_len"] == 131_072]
    alone = {row["commit"]: row["seconds"] for row in rows if row["who"] == "ours:alone"}
    newest = {row["who"]: row for row in rows}
    both = {how: newest[f"ours:{how}"] for how in ("heads", "ring")}
    return {how: alone[row["commit"]] / row["seconds"] for how, row in both.items()}


def plan_table(
    config: RunConfig,
    vocab_size: int,
    backend: Backend,
    dtype: torch.dtype,
    *,
    ranks: Sequence[int],
    link: str,
    network: str,
    per_host: int,
) -> list[RanksPlan]:
    """Print the table for one GPU and each number in `ranks`, and the sources of its figures."""
    check_measured(backend, dtype)
    hosts = Hosts(read_link("link", link), read_link("network", network, gpus=per_host), per_host)
    speed, merging = measured_speed(), merging_seconds()
    plans = [
        plan_ranks(
            config,
            vocab_size,
            backend,
            dtype,
            world=world,
            speed=speed,
            merging=merging,
            hosts=hosts,
        )
        for world in sorted({1, *ranks})
    ]
    count = parameter_count(config.model, vocab_size)
    tokens = config.sequences_per_step * config.seq_len
    print(f"model={config.model.name}: {count:,} parameters, vocabulary {vocab_size:,}")
    print(
        f"{config.sequences_per_step:,} x {config.seq_len:,} = {tokens:,} tokens a step on any "
        f"number of GPUs, {dtype_name(dtype)}, attention={backend.name}\n"
    )
    print(text_table(table(plans)))
    print("\n" + "\n".join(sources(config, vocab_size, plans, speed, hosts)))
    return plans


def check_measured(backend: Backend, dtype: torch.dtype) -> None:
    """Raise ValueError for a run whose speed on one GPU was not measured."""
    options = "".join(f", {key}={value}" for key, value in backend.options.items())
    if backend.name != "triton" or backend.options.get("kernel") == "portable":
        raise ValueError(
            f"attention={backend.name}{options}: ranks= plans by the measured speed of "
            "attention=triton on an H200; take that, or leave ranks= out for the memory alone"
        )
    if dtype.itemsize != 2:
        raise ValueError(
            f"ranks= plans by speeds measured in bfloat16, not in {dtype_name(dtype)}; add "
            "dtype=bf16 and leave device=cpu out"
        )


def table(plans: Sequence[RanksPlan]) -> list[list[str]]:
    rows = [
        ["GPUs", "data x context", "tokens/s", "speed-up", "efficiency", "step ms"]
        + ["exchange ms", "gradients ms", "GB sent", "GiB a GPU"]
    ]
    for plan in plans:
        shared = f"{plan.data} x {plan.context}"
        if 1 < plan.heads < plan.context:
            shared += f" ({plan.heads} heads x {plan.context // plan.heads} ring)"
        rows.append(
            [
                f"{plan.world:,}",
                shared,
                f"{plan.tokens_per_sec:,.0f}",
                f"{plan.speedup:,.2f}",
                f"{plan.efficiency:.1%}",
                f"{1000 * plan.step_seconds:,.1f}",
                f"{1000 * plan.exchange_seconds:,.1f}",
                f"{1000 * plan.gradient_seconds:,.1f}",
                f"{plan.sent_bytes / 1e9:,.3f}",
                f"{plan.peak_bytes / GIB:,.2f}",
            ]
        )
    return rows


def sources(
    config: RunConfig,
    vocab_size: int,
    plans: Sequence[RanksPlan],
    speed: Speed,
    hosts: Hosts,
) -> list[str]:
    """Sentences that say what was measured, what is calculated, and what is left out."""
    largest = plans[-1]
    measured = [
        f"Measured: steps of GPT-2 124M on one H200 (results/{STEPS}), which the fit behind this "
        f"table misses by at most {speed.error:.1%}"
    ]
    links = [hosts.link] + ([hosts.network] if largest.world > hosts.per_host else [])
    figures = []
    for link in links:
        if link.measured:
            measured.append(f"{link.name} between two H200s (results/{LINKS})")
        else:
            figures.append(f"{link.name} ({link.gb_per_s:g} GB/s a GPU, no latency)")
    said = ["; ".join(measured) + "."]
    said += [f"Assumed: {', '.join(figures)}."] if figures else []
    said.append(
        "Calculated: every row, by FLOPs and bytes. The all-reduce of the gradients counts as if "
        "the backward pass hid none of it."
    )
    said.append("Left out: data, evaluation, and the time that ranks wait for the slowest.")
    if largest.world > hosts.per_host:
        said.append(
            f"Hosts have {hosts.per_host} GPUs: gradients are summed inside each host, then each "
            "GPU's share between hosts."
        )
    keys = largest.context // largest.heads
    if keys > 1 and config.parallel.how != "gather":
        said.append(
            "The ring's messages are taken to travel beside attention. The time to merge was "
            "measured on two H100s."
        )
    if largest.context > 1:
        said.append(
            "Two H100s trained GPT-2 on 131,072 tokens {heads:.2f} times as fast as one with heads "
            "and {ring:.2f} times on a ring (results/{file}).".format(file=TWO_GPUS, **reached())
        )
    small = [f"{plan.world:,}" for plan in plans if plan.pass_tokens < speed.tokens / 4]
    if small:
        said.append(
            f"Measured at {speed.tokens:,} tokens a pass, and less than a quarter of that keeps a "
            f"GPU waiting for its host: slower than this where GPUs = {', '.join(small)}."
        )
    if parameter_count(config.model, vocab_size) < speed.parameters / 4:
        said.append("So small a model keeps a GPU waiting for its host: slower than this.")
    if config.model.chunk_tokens or config.model.offload:
        said.append("model.chunk_tokens and model.offload cost time that is not counted.")
    usable = CARD_SIZES[141] - CONTEXT_GIB
    if too_large := [f"{plan.world:,}" for plan in plans if plan.peak_bytes / GIB > usable]:
        said.append(f"More than an H200's {usable:.1f} GiB: GPUs = {', '.join(too_large)}.")
    return said
