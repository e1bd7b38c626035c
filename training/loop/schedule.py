"""Which attention a run trains with, and from which step on."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch

from attention import (
    BACKENDS,
    Backend,
    get_backend,
    get_score_mod,
    is_operator,
    is_shipped,
    kernel_choice,
)
from attention.kernels.select import SOFTCAP
from attention.look.try_out import check_score_mod, try_out
from config import AttentionConfig, RunConfig, parse_attention
from model.fast import FastGPT
from model.gpt import GPT, CausalSelfAttention
from model.layer_function import layer_functions, own_module
from model.rope import rope_tables
from model.seam import Seam
from training.loop.compiler import keep_compiled
from training.loop.device import autocast_to
from training.record.clock import count_compiling
from training.record.names import as_typed

log = logging.getLogger("tilegpt")

# block_q of an exact tile loop on a GPU: the Python loop launches 32 times fewer kernels than with
# the 128 that suit a CPU, and memory stays linear in the length
GPU_BLOCK_Q = 4096
# operators that never wait for the GPU; traceable attention does not either
ASKS_NOTHING = ("triton",)


def asked_attention(chosen: AttentionConfig) -> dict[int, tuple[str, dict[str, Any]]]:
    """Name and options by the step after which the attention is used."""
    asked = {0: (chosen.name, chosen.backend_options())}
    if chosen.switch_at is not None:
        asked[chosen.switch_at] = parse_attention(chosen.switch_to)
    return asked


def needed_features(config: RunConfig) -> dict[str, str]:
    """The features that a run's attention must have, each with the setting that needs it."""
    needed = {
        "lse" if key == "sinks" else key: f"attention.{key}={as_typed(value)}"
        for key, value in config.attention.function().items()
        if key != "pattern"
    }
    if config.data.documents:
        needed["document_ids"] = "data.documents=true"
    if config.model.positions == "alibi":
        needed["alibi_slopes"] = "model.positions=alibi"
    return needed


def chosen_attention(config: RunConfig) -> dict[int, Backend]:
    """The attention by the step after which it is used: {0: first, switch_at: second}.

    Raises ValueError for an unknown name or option, and for an attention that lacks what the data
    or the layers need. The device does not matter yet; see check_model().
    """
    chosen, needed, schedule = config.attention, needed_features(config), {}
    for step, (name, options) in asked_attention(chosen).items():
        try:
            backend = schedule[step] = get_backend(name, **options)
        except ValueError as error:
            if not step:
                raise
            raise ValueError(f"attention.switch_to={chosen.switch_to}: {error}") from error
        for feature, setting in needed.items():
            if feature not in backend.features:
                raise ValueError(
                    f"{setting} needs {feature}, which attention={name} does not support; these "
                    f"do: {', '.join(able(needed))}"
                )
        if backend.module is not None and chosen.switch_at is not None:
            raise ValueError(
                f"attention.switch_at={chosen.switch_at}: attention={name} has parameters of its "
                "own, which the other attention would not train; leave the switch out"
            )
    return schedule


def able(features: Collection[str]) -> list[str]:
    """The exact attentions with all of these features."""
    return [
        name
        for name, backend in BACKENDS.items()
        if backend.exact and backend.features.issuperset(features)
    ]


def suit_gpu(config: RunConfig, backend: Backend, options: Mapping[str, Any]) -> Backend:
    """The attention of a run as a GPU runs it best, without changing `options`, which the user set.

    A defect that also exists as Triton kernels runs those, if they have the needed features and the
    options that are set. An exact tile loop takes larger tiles.
    """
    kernels = backend.on_gpu
    if kernels is not None:
        able = kernels.features.issuperset(needed_features(config))
        able &= kernels.options.keys() >= options.keys()
        return kernels.configured(**options) if able else backend
    # a loop that recomputes keeps a whole row of tiles, so it takes smaller ones
    recomputes = options.get("softmax_dtype") == "input"
    if is_operator(backend) and backend.exact and not recomputes and "block_q" not in options:
        return backend.configured(block_q=GPU_BLOCK_Q)
    return backend


def check_model(
    config: RunConfig, backend: Backend, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError for an attention that cannot train this model on this device, or not in the
    way that compile and cuda_graph ask for.

    A user's own attention or score_mod is run to find out.
    """
    if name := config.attention.score_mod:
        check_score_mod(get_score_mod(name), name, config.model.num_heads, device)
    backend.check_model(**config.model.attention_sizes, dtype=dtype, device=device)
    will_graph(config, backend, dtype=dtype, device=device)
    if ":" in backend.name or config.attention.score_mod is not None:  # pkg.module:NAME
        functions = layer_functions(config.attention, config.model)
        for function in {each.get("window"): each for each in functions}.values():
            layer = CausalSelfAttention(config.model, Seam(backend), function)
            layer.own = own_module(backend, config.model, layer=0)
            try_in_layer(layer.to(device), config, dtype)


def try_in_layer(layer: CausalSelfAttention, config: RunConfig, dtype: torch.dtype) -> None:
    """try_out() with what this layer hands to its attention in the first step. Two sequences are
    enough: more have the same strides.
    """
    shape, device = config.model, layer.qkv.weight.device
    sizes = min(config.batch_size, 2), config.seq_len, layer.qkv.out_features
    qkv = torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    qkv, rope = qkv.to(device, dtype).requires_grad_(), None
    if shape.positions == "rope":
        positions = torch.arange(config.seq_len, device=device)
        rope = rope_tables(positions, head_dim=shape.head_dim, theta=shape.rope_theta)
    with autocast_to(dtype, device):
        heads = layer.heads(qkv, rope)
    try_out(layer.seam.backend, *heads, module=layer.own, **layer.function)


def attention_schedule(
    config: RunConfig, *, dtype: torch.dtype, device: torch.device
) -> dict[int, Backend]:
    """chosen_attention() as its device runs it best, checked. Warns of an attention that is broken
    on purpose.
    """
    where, schedule = {"dtype": dtype, "device": device}, chosen_attention(config)
    for step, (name, options) in asked_attention(config.attention).items():
        backend = as_chosen = schedule[step]
        if device.type == "cuda":
            backend = suit_gpu(config, as_chosen, options)
        try:
            check_model(config, backend, **where)
        except ValueError as error:  # tiles that are too small for a kernel, say
            if backend is as_chosen:
                raise
            log.info(f"attention={name} runs as on a CPU: {error}")
            check_model(config, backend := as_chosen, **where)
        schedule[step] = backend
        if backend.defect is not None:
            log.warning(f"attention={name} is broken on purpose: {backend.defect}")
        tile = backend.options.get("block_kv", 0)
        if name == "no_rescale" and tile >= config.seq_len:
            log.warning(
                f"one tile of block_kv={tile} covers seq_len={config.seq_len}: no_rescale is exact "
                "here"
            )
    return schedule


def backend_after(schedule: dict[int, Backend], step: int) -> Backend:
    """The attention that is used after `step` steps."""
    return schedule[max(start for start in schedule if start <= step)]


def prepare_model(model: GPT, backend: Backend, *, compiled: bool) -> GPT:
    """Give the model this attention; returns its form for training."""
    model.backend = backend
    if compiled or next(model.parameters()).is_cuda:
        count_compiling()
    if compiled:
        keep_compiled()
    return FastGPT(model, compiled=compiled)


def run_compiles(config: RunConfig, backend: Backend, device: str) -> bool:
    """Whether a run uses torch.compile. compile=auto does so on a GPU, unless the attention does
    not fit into a graph; compile=true raises ValueError where it cannot.
    """
    fits = backend.traceable or is_operator(backend)
    if config.attention.score_mod is not None:
        # an operator takes no function as an argument, nor does the search for the largest score
        fits = backend.traceable and "max_score" in backend.features
        if not fits and config.compile == "true":
            raise ValueError(
                f"attention={backend.name} takes no attention.score_mod into a compiled graph; add "
                "compile=false"
            )
    return config.compile == "true" or (config.compile == "auto" and device == "cuda" and fits)


def will_graph(
    config: RunConfig, backend: Backend, *, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether to launch steps as CUDA graphs. Raises ValueError for cuda_graph=true where there can
    be no graph, and as run_compiles() does.

    A replay runs no Python: not that of uncompiled code, and not a user's that torch.compile would
    trace again after a change. The user may say that it need not.
    """
    reason, asked = None, config.cuda_graph
    compiled = run_compiles(config, backend, device.type)
    if device.type != "cuda":
        reason = f"it needs a GPU, and device={device.type}"
    elif not compiled:
        reason = "the model is not compiled"
    elif dtype == torch.float16:
        reason = "dtype=fp16 scales the loss from step to step"
    elif not backend.traceable and backend.name not in ASKS_NOTHING:
        reason = f"attention={backend.name} may ask the GPU what to do next"
    if reason is not None and asked == "true":
        raise ValueError(f"cuda_graph=true: {reason}; leave it at auto")
    ours = is_shipped(backend) and config.attention.score_mod is None
    return reason is None and (asked == "true" or (asked == "auto" and ours))


def schedule_summary(
    config: RunConfig, schedule: dict[int, Backend], *, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """The schedule for summary.json: attention, defect, exact, options; for a switch also
    switch_at, ...; function, what the layers compute under any attention.

    defect: whether an attention of it is broken on purpose; exact: whether all claim softmax. If
    the first attention has several kernels, also the one that runs.
    """
    chosen, first, every = config.attention, schedule[0], schedule.values()
    row = {
        "attention": first.name,
        "defect": any(backend.defect is not None for backend in every),
        "exact": all(backend.exact for backend in every),
        "options": dict(first.options),
    }
    mod = SOFTCAP if chosen.softcap is not None else ""
    if chosen.score_mod is not None:
        mod = get_score_mod(chosen.score_mod).kernel or ""
    sizes = {"head_dim": config.model.head_dim, "score_mod": mod}
    if choice := kernel_choice(first, dtype=dtype, device=device, **sizes):
        row |= {"kernel": choice.kernel, "kernel_reason": choice.reason}
        if device.type == "cuda":
            log.info(f"attention={first.name} runs the {choice.kernel} kernels: {choice.reason}")
    if chosen.switch_at is not None:
        second = schedule[chosen.switch_at]
        row |= {"switch_at": chosen.switch_at, "switch_to": second.name}
        row["switch_options"] = dict(second.options)
    if function := chosen.function():
        row["function"] = function
    return row
