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
from model.decoding import DecodingStep, has_steps
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
    fixed shape. On a GPU a step is a CUDA graph, so module hooks see only the prompt. Compile the
    blocks first for the fastest steps: `for block in model.blocks: block.compile()`.

    Raises ValueError for an invalid prompt or setting, and at the end FloatingPointError for logits
    that are not finite.
    """
    check_settings(max_new_tokens, temperature, top_k)
    check_prompt(model, tokens)
    max_seq_len = model.config.max_seq_len
    cache = step = None
    if use_cache:
        max_len = min(max_seq_len, tokens.shape[1] + max_new_tokens)
        cache = KVCache(model.config.num_layers, max_len=max_len)
        step = DecodingStep(model, cache, len(tokens)) if has_steps(model) else None
    context = unread = tokens  # what the next token depends on; what the cache does not hold of it
    written, finite = [], torch.ones((), dtype=torch.bool, device=tokens.device)
    training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            if context.shape[1] > max_seq_len:
                context = unread = context[:, -max(max_seq_len // 2, 1) :]
                if cache is not None:
                    cache.length = 0
            if step is not None and step.cache.length:
                logits = step(unread)
            else:
                logits = model(unread, cache=cache).logits
            logits = logits[:, -1].float()  # (B, vocab_size)
            # checked at the end: here a GPU would wait for the host. The norm is NaN if a logit is
            finite &= torch.linalg.vector_norm(logits, torch.inf) < torch.inf
            next_token = pick_token(logits, temperature, top_k, generator)
            written.append(next_token)
            context = torch.cat((context, next_token), dim=1)
            unread = context if cache is None else next_token
    finally:
        model.train(training)
    if not finite:
        raise FloatingPointError("the logits are not finite: there is nothing to sample from")
    return torch.cat((tokens, *written), dim=1)


def check_settings(max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise ValueError(f"{max_new_tokens=} must be a whole number, at least 0")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"{temperature=} must be at least 0, and finite")
    if top_k is not None and (not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"{top_k=} must be at least 1, and a whole number")


def check_prompt(model: GPT, tokens: Tensor) -> None:
    """Raise ValueError for tokens that the model cannot read. On a GPU an id outside the vocabulary
    would end the process.
    """
    shape, dtype = tuple(tokens.shape), dtype_name(tokens.dtype)
    if len(shape) != 2 or not all(shape) or dtype not in ("int64", "int32"):
        raise ValueError(
            f"the prompt must be token ids (B, N) in int64, B and N at least 1, as tokens[None] of "
            f"one sequence; got {shape} in {dtype}"
        )
    if (device := next(model.parameters()).device) != tokens.device:
        raise ValueError(f"the prompt is on {tokens.device}: move it to the model's, {device}")
    least, most = map(int, tokens.aminmax())
    if least < 0 or most >= model.vocab_size:
        raise ValueError(
            f"the prompt has token {least if least < 0 else most}, and the model knows 0 to "
            f"{model.vocab_size - 1}: encode the text with the model's own tokenizer"
        )


def pick_token(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """One token (B, 1) for each row of logits (B, vocab_size): the likeliest at temperature 0, else
    a draw. A row that is not finite gives any token.
    """
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    limits = torch.finfo(logits.dtype)
    temperature = min(max(temperature, limits.tiny), limits.max)
    # the likeliest becomes 0, which stays finite even when divided by the smallest temperature
    logits = logits - logits.amax(-1, keepdim=True)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    p = (logits / temperature).softmax(-1)
    # on a GPU, drawing from NaN fails an assertion in the kernel, which ends the process
    return torch.multinomial(p.nan_to_num(1.0), 1, generator=generator)


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
