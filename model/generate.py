"""Sampling from a GPT, token by token.

The context never exceeds `model.config.max_seq_len` tokens, the longest the model was made for.
If the next token would exceed it, the context restarts at position 0 with its most recent half:

    max_seq_len = 6:   a b c d e f   ->   e f g   ->   e f g h   ->   e f g h i   ->   e f g h i j
                       ->   i j k

One pass refills the cache with that half, so sampling reads the same context with and without one.

Dimensions: B batch, N tokens.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attention import dtype_name
from model.decoding import has_steps, keep_step, predict, take_step
from model.gpt import GPT
from model.kv_cache import KVCache

if TYPE_CHECKING:
    from data import Tokenizer


@torch.no_grad()
def generate(
    model: GPT,
    tokens: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
) -> Tensor:
    """The prompt `tokens` (B, N) int64, N >= 1, with its continuation: (B, N + max_new_tokens).
    Dropout is off.

    temperature divides the logits; 0 takes the likeliest token. top_k draws only among the k
    likeliest. generator must be on the model's device; None draws from PyTorch's own.
    use_cache=False reads the whole context again for every token. That is slow, but tests the
    cache, and works for an attention without the `cross_length` feature.

    With a cache, an attention that can decode (see Backend.decode) reads single tokens in steps of
    fixed shape. On a GPU a step is a CUDA graph, so module hooks see only the prompt. The graph and
    the memory of its cache are kept for the next call of the same shape; see keep_step().

    Raises ValueError for an invalid prompt or setting, FloatingPointError for logits that are not
    finite (with temperature 0, only at the end).
    """
    if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise ValueError(f"{max_new_tokens=} must be a whole number, at least 0")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"{temperature=} must be at least 0, and finite")
    if top_k is not None and (not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"{top_k=} must be at least 1, and a whole number")
    check_prompt(model, tokens)
    max_seq_len = model.config.max_seq_len
    cache = step = None
    if use_cache:
        max_len = min(max_seq_len, tokens.shape[1] + max_new_tokens)
        step = take_step(model, len(tokens), max_len) if has_steps(model) else None
        cache = KVCache(model.config.num_layers, max_len=max_len) if step is None else step.cache
    finite = torch.ones((), dtype=torch.bool, device=tokens.device)
    training = model.training
    model.eval()
    try:
        start = 0  # the context is tokens[:, start:]
        for _ in range(max_new_tokens):
            if tokens.shape[1] - start > max_seq_len:
                start = tokens.shape[1] - max(max_seq_len // 2, 1)
                if cache is not None:
                    cache.reset()
            unread = start if cache is None else start + cache.length
            if step is not None and 0 < unread - start == tokens.shape[1] - start - 1:
                prediction = step(tokens[:, -1:])
            else:
                prediction = predict(model(tokens[:, unread:], cache=cache).logits[:, -1].float())
            if temperature == 0:  # checked at the end: here a GPU would wait for the host
                finite &= prediction.finite
                next_token = prediction.likeliest
            else:
                next_token = sample_token(
                    prediction.logits, temperature=temperature, top_k=top_k, generator=generator
                )
            tokens = torch.cat((tokens, next_token), dim=1)
    finally:
        model.train(training)
    if step is not None:
        keep_step(model, step)
    check_finite(finite)
    return tokens


def check_prompt(model: GPT, tokens: Tensor) -> None:
    """Raise ValueError for tokens that the model cannot read. On a GPU an id outside the vocabulary
    would end the process.
    """
    shape, dtype = tuple(tokens.shape), dtype_name(tokens.dtype)
    if len(shape) != 2 or not shape[0] or dtype not in ("int64", "int32"):
        raise ValueError(
            f"the prompt must be token ids (B, N) in int64, as tokens[None] of one sequence; got "
            f"{shape} in {dtype}"
        )
    if not shape[1]:
        raise ValueError(f"the prompt needs at least one token, got tokens of shape {shape}")
    if (device := next(model.parameters()).device) != tokens.device:
        raise ValueError(f"the prompt is on {tokens.device}: move it to the model's, {device}")
    least, most = map(int, tokens.aminmax())
    if least < 0 or most >= model.vocab_size:
        raise ValueError(
            f"the prompt has token {least if least < 0 else most}, and the model knows 0 to "
            f"{model.vocab_size - 1}: encode the text with the model's own tokenizer"
        )


def sample_token(
    logits: Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """One token (B, 1), drawn for each row of logits (B, vocab_size)."""
    # on a GPU, drawing from NaN or inf fails an assertion in the kernel, which ends the process
    check_finite(logits.isfinite().all())
    limits = torch.finfo(logits.dtype)
    temperature = min(max(temperature, limits.tiny), limits.max)
    # the likeliest becomes 0, which stays finite even when divided by the smallest temperature
    logits = logits - logits.amax(-1, keepdim=True)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)


def check_finite(finite: Tensor) -> None:
    if not finite:
        raise FloatingPointError(
            "the model's logits are not finite: there is nothing to sample from"
        )


def sample_text(
    model: GPT,
    tokenizer: "Tokenizer",
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    use_cache: bool | None = None,
) -> str:
    """The prompt with its continuation; an empty prompt starts a document. use_cache=None uses a
    cache if the attention can.
    """
    device = next(model.parameters()).device
    encoded = tokenizer.encode(prompt).tolist()
    # in the data, an end-of-text token precedes each document
    context = encoded or [tokenizer.end_of_text]
    tokens = generate(
        model,
        torch.tensor([context], device=device),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        generator=torch.Generator(device).manual_seed(seed),
        # decoding with a cache is one query against many keys
        use_cache="cross_length" in model.backend.features if use_cache is None else use_cache,
    )
    written = tokens[0, len(context) :].tolist()
    return tokenizer.decode(encoded + written)
