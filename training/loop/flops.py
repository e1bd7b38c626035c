"""Counts the parameters of a model, and the FLOPs of a token."""

from torch import nn

from model.gpt import GPT


def flops_per_token(model: GPT, seq_len: int, *, causal: bool = False) -> int:
    """Matrix-product FLOPs of one token's forward and backward pass: 6 N + 12 L H Q T (PaLM,
    arXiv:2204.02311, appendix B).

    N counts every parameter except the position and token embeddings, which are looked up, not
    multiplied. The output layer's vocab_size * C counts, even if it is tied to the token embedding.
    L, H and Q are num_layers, num_heads and head_dim, T is seq_len: each query meets T keys, though
    a causal mask hides half of them. With causal=True only the visible keys count, (T + 1) / 2 on
    average, or fewer under a window. Recomputation never counts, and documents packed into one
    sequence count as one.
    """
    multiplied = count_parameters(model)
    if model.position_embedding is not None:
        multiplied -= model.position_embedding.weight.numel()
    if model.output_layer is not None:  # otherwise the token embedding is also the output layer
        multiplied -= model.token_embedding.weight.numel()
    keys_twice = 2 * seq_len * model.config.num_layers
    if causal:
        windows = (block.attention.function.get("window") for block in model.blocks)
        keys_twice = sum(visible_keys_twice(seq_len, window) for window in windows)
    return round(6 * multiplied + 6 * model.config.hidden_size * keys_twice)


def visible_keys_twice(seq_len: int, window: int | None) -> float:
    """Twice the mean number of keys that a query sees under a causal mask: T + 1, or fewer in a
    window.

    The first `window` queries see 1, 2, ..., window keys, the others see window keys.
    """
    width = min(window or seq_len, seq_len)
    return width * (2 * seq_len - width + 1) / seq_len


def count_parameters(model: nn.Module) -> int:
    """The number of parameters; a shared one counts once."""
    return sum(parameter.numel() for parameter in model.parameters())
