"""Models of transformers with our attention: their errors, and the tokens that they generate.

    python -m lab.hf_models device=cuda out=results/hf_models_h200.json

Arguments are key=value, lists with commas; all have a default:

    attention   names in transformers, or backends with options such as triton:kernel=portable
                (tilegpt_naive,tilegpt_tiled,sdpa, on a GPU tilegpt_triton too); sdpa is that of
                transformers
    dtype       (fp32,bf16,fp16)
    length      tokens of a sequence (512); a window has a quarter of them
    new_tokens  tokens that continue each prompt (64)
    seeds       random models and sequences of each kind (3)
    device, out    as in scripts.benchmark

Errors: a model in one dtype against the same weights in float64, where attention is eager. `logits`
is the largest difference. `gradients` is the largest of any parameter's gradient, relative to the
largest entry of that gradient. A ratio is an error divided by that of eager attention in the same
dtype.

Tokens: generate() in float32, greedy, for prompts with different padding on the left. A prompt's
tokens count as equal before the first that differs from eager's. There, `gap` is the distance
between eager's two largest logits; `least_gap` is the least of all steps.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from attention import dtype_name
from scripts.arguments import Count, Device, Dtype, Json, command, default, parse_backend
from scripts.tables import Row
from training.device import pick_device, pick_dtype
from training.environment import measured_on
from training.files import write_json

BATCH, HIDDEN, HEADS, KV_HEADS, LAYERS, VOCAB_SIZE = 2, 256, 4, 2, 2, 1000


@dataclass
class Options:
    attention: list[str] = default()
    dtype: list[Dtype] = default("fp32", "bf16", "fp16")
    length: Count = 512
    new_tokens: Count = 64
    seeds: Count = 3
    device: Device = "auto"
    out: Json | None = None


def models(options: Options) -> dict[str, Row]:
    """The settings of each model_type."""
    ends = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    size = {"hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS}
    llama = ends | size | {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    mistral = llama | {"sliding_window": max(options.length // 4, 1)}
    # each token takes all experts: a choice that rounding changes would hide attention's error
    experts = {"num_local_experts": 4, "num_experts_per_tok": 4, "experts_implementation": "eager"}
    positions = {"n_positions": options.length + options.new_tokens}
    return {
        "llama": llama,
        "mistral": mistral,
        "gpt_oss": mistral | experts | {"head_dim": HIDDEN // HEADS},
        "gpt2": ends | positions | {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS},
    }


def build(kind: str, settings: Row, seed: int) -> Any:
    """A random model whose gains and biases are not 1 and 0, with eager attention. Tokens that are
    drawn next depend on the seed too.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def rounded(model: Any, dtype: torch.dtype) -> Any:
    """A copy with parameters of this dtype. Buffers stay, as where weights are loaded in it."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def results(model: Any, tokens: Tensor) -> list[Tensor]:
    """In float64: the logits, and each parameter's gradient of the sum of losses. A mean's would
    underflow in float16.
    """
    logits = model(tokens, use_cache=False).logits
    predicted, targets = logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten()
    loss = cross_entropy(predicted, targets, reduction="sum")
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return [x.detach().double() for x in (logits, *gradients)]


def exact(model: Any, tokens: Tensor) -> list[Tensor]:
    """The results of the same weights in float64."""
    # norms and softmax convert to torch.float32, in any dtype
    with patch.object(torch, "float32", torch.float64):
        return results(rounded(model, torch.float64), tokens)


def errors(model: Any, tokens: Tensor, truth: list[Tensor]) -> Row:
    pairs = zip(results(model, tokens), truth, strict=True)
    logits, *gradients = (torch.stack(((x - y).abs().max(), y.abs().max())) for x, y in pairs)
    differences, largest = torch.stack(gradients).unbind(-1)
    return {"logits": logits[0].item(), "gradients": (differences / largest).max().item()}


def generated(model: Any, tokens: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """The new tokens (B, T), and the gap between the two largest logits before each."""
    settings |= {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    found = model.generate(tokens, disable_compile=True, **settings)
    first, second = torch.stack(found.logits, dim=1).topk(2).values.unbind(-1)
    return found.sequences[:, tokens.shape[1] :], first - second


def compared(eager: Tensor, gaps: Tensor, model: Any, tokens: Tensor, **settings: Any) -> Row:
    ours, _ = generated(model, tokens, **settings)
    equal = (ours == eager).long().cumprod(1).sum(1).tolist()
    differences = [
        {"prompt": prompt, "step": step, "gap": gaps[prompt, step].item()}
        for prompt, step in enumerate(equal)
        if step < eager.shape[1]
    ]
    counts = {"tokens": eager.numel(), "equal": sum(equal)}
    return counts | {"least_gap": gaps.min().item(), "differences": differences}


def answers(model: Any, names: Iterable[str], measure: Callable[[], Row]) -> Iterator[Row]:
    """A row for each attention: what `measure` finds, or why the attention is refused."""
    for name in names:
        try:
            model.set_attn_implementation(name)
            yield {"attention": name} | measure()
        except ValueError as error:
            yield {"attention": name, "refused": str(error).partition(". ")[0]}


def error_rows(names: list[str], options: Options, device: torch.device) -> Iterator[Row]:
    seeds = range(options.seeds)
    for (kind, settings), text, seed in product(models(options).items(), options.dtype, seeds):
        dtype = pick_dtype(text, device)
        model = rounded(build(kind, settings, seed), dtype).to(device)
        tokens = torch.randint(VOCAB_SIZE, (BATCH, options.length)).to(device)
        measure = partial(errors, model, tokens, exact(model, tokens))
        eager, *rows = answers(model, ["eager", *names], measure)
        for row in (eager, *rows):
            ratios = {f"{x}_ratio": row[x] / eager[x] for x in ("logits", "gradients") if x in row}
            yield {"model": kind, "dtype": dtype_name(dtype), "seed": seed} | row | ratios


def token_rows(names: list[str], options: Options, device: torch.device) -> Iterator[Row]:
    paddings = torch.tensor((0, options.length // 8, options.length // 3))
    mask = (torch.arange(options.length) >= paddings[:, None]).long().to(device)
    how = {"attention_mask": mask, "max_new_tokens": options.new_tokens}
    for (kind, settings), cache in product(models(options).items(), ("dynamic", "static")):
        model = build(kind, settings, seed=0).to(device)
        tokens = torch.randint(VOCAB_SIZE, mask.shape).to(device)
        how["cache_implementation"] = cache
        eager = generated(model, tokens, **how)
        for row in answers(model, names, partial(compared, *eager, model, tokens, **how)):
            yield {"model": kind, "cache": cache} | row


@command
def main(options: Options) -> None:
    import transformers

    from attention.hf import expose

    device = pick_device(options.device)
    torch.set_float32_matmul_precision("highest")
    gpu = ["tilegpt_triton"] * (device.type == "cuda")
    names = options.attention or ["tilegpt_naive", "tilegpt_tiled", *gpu, "sdpa"]
    for name in names:
        if name not in transformers.AttentionInterface():
            expose(parse_backend(name), name)
    where = measured_on(device)
    where["versions"]["transformers"] = transformers.__version__
    sizes = {"batch": BATCH, "length": options.length, "models": models(options)}
    result: Row = {"environment": where, **sizes}
    for part, rows in {"errors": error_rows, "tokens": token_rows}.items():
        result[part] = []
        for row in rows(names, options, device):
            result[part].append(row)
            print(*(f"{name}={value}" for name, value in row.items()), flush=True)
            if options.out:
                write_json(options.out, result)


if __name__ == "__main__":
    main()
