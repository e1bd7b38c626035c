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
    average. Under a window, the first queries see 1, 2, ..., window keys, the others see window
    keys. Recomputation never counts, and documents packed into one sequence count as one.
    """
    multiplied = count_parameters(model)
    if model.position_embedding is not None:
        multiplied -= model.position_embedding.weight.numel()
    if model.output_layer is not None:  # otherwise the token embedding is also the output layer
        multiplied -= model.token_embedding.weight.numel()
    keys = seq_len * model.config.num_layers
    if causal:
        windows = (block.attention.function.get("window", seq_len) for block in model.blocks)
        widths = [min(window, seq_len) for window in windows]
        keys = sum(width * (2 * seq_len - width + 1) / (2 * seq_len) for width in widths)
    return round(6 * multiplied + 12 * model.config.hidden_size * keys)


def count_parameters(model: nn.Module) -> int:
    """The number of parameters; a shared one counts once."""
    return sum(parameter.numel() for parameter in model.parameters())
