"""Run JAX's attention on the inputs that `attn-conform export` wrote.

attn-conform export inputs.npz
python lab/jax_outputs.py inputs.npz outputs.npz      # where jax is installed; needs no torch
attn-conform judge inputs.npz outputs.npz
"""

import json
import sys

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np


def attend(q, k, v, *, causal, scale, window=None, document_ids=None, key_lengths=None):
    """jax.nn.dot_product_attention, which takes (B, N, H, D), with one mask for everything."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    offset = num_keys - num_queries  # JAX's own causal mask is aligned top-left
    i, j = jnp.arange(num_queries)[:, None] + offset, jnp.arange(num_keys)
    seen = jnp.ones((1, num_queries, num_keys), bool)
    if causal:
        seen &= j <= i
    if window is not None:
        # one number counts the query's own position
        left, right = window if isinstance(window, list) else (window - 1, 0)
        seen &= (left < 0) | (j >= i - left)
        seen &= (right < 0) | (j <= i + right)
    if document_ids is not None:
        number = np.cumsum(np.diff(document_ids, axis=1, prepend=document_ids[:, :1]) != 0, 1)
        seen &= number[:, :, None] == number[:, None, :]
    if key_lengths is not None:
        seen &= j < key_lengths[:, None, None]
    heads_last = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.dot_product_attention(*heads_last, mask=seen[:, None], scale=scale).swapaxes(1, 2)


def main(inputs_file: str, outputs_file: str) -> None:
    inputs, outputs = np.load(inputs_file), {}
    for case in inputs["cases"]:
        names = [name for name in inputs.files if name.startswith(f"{case}/")]
        given = {name.rpartition("/")[2]: inputs[name] for name in names}
        arguments = json.loads(str(given.pop("arguments")))
        q, k, v, d_out = (given.pop(name) for name in ("q", "k", "v", "d_out"))
        if {"softcap", "alibi_slopes", "sinks"} & {*arguments, *given}:
            continue  # JAX has none of these
        out, backward = jax.vjp(lambda *x: attend(*x, **arguments, **given), q, k, v)  # noqa: B023
        outputs[f"{case}/out"] = out
        for name, x in zip(("dq", "dk", "dv"), backward(jnp.asarray(d_out)), strict=True):
            outputs[f"{case}/{name}"] = x
    np.savez(outputs_file, **outputs)
    print(f"jax {jax.__version__}: {len(outputs) // 4} of {len(inputs['cases'])} cases")


if __name__ == "__main__":
    main(*sys.argv[1:])
