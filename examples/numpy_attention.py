"""Flash attention for one head in NumPy, as tutorials write it: functions of three matrices.

    from examples.numpy_attention import flash_attention
    O = flash_attention(Q, K, V, block_size=64)

They have the usual names and argument order, and compute in float64. There is the softmax of a
stream, its update, the tile loops, and the backward. The backward recomputes the probabilities from
two numbers per row. No line is shared with the rest of the project, so the tests use them as a
second oracle. To train with an attention, start from another example: models call a Backend on
tensors. Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al.,
"FlashAttention" (2022), algorithms 1 and 4.

Dimensions: Q (N, d), K (M, d), V (M, d_v). The papers' letters: m (N,) is the largest score of a
row, l or ell (N,) the sum of exp(score - m), S a tile of scores. Scores are Q K^T / sqrt(d). causal
is aligned bottom-right: query i sees key j iff j <= i + (M - N). A Mask hides more. A row that
sees no key gives O = 0, m = -inf, l = 0 and no gradient.
"""
# ruff: noqa: E741  O and l are the papers' names

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


class Mask(NamedTuple):
    """Limits besides causal to the keys that a query sees. Query i is at p = i + (M - N)."""

    left: int = -1  # keys before p - left are hidden; -1: no limit
    right: int = -1  # keys after p + right are hidden; -1: no limit
    num_keys: int | None = None  # keys from there on are padding; None: no padding


ALL = Mask()


class OnlineSoftmaxResult(NamedTuple):
    softmax: Array  # (N,)
    m: float  # the largest entry
    ell: float  # sum of exp(x - m)
    num_chunks: int


def online_softmax(x: ArrayLike, chunk_size: int = 0) -> OnlineSoftmaxResult:
    """Softmax of a vector x (N,); one pass over chunks computes its maximum and sum. chunk_size=0
    makes x one chunk.
    """
    x = np.asarray(x, dtype=np.float64)
    chunks = list(_tiles(len(x), chunk_size if chunk_size > 0 else max(len(x), 1)))
    m, ell = -np.inf, 0.0
    for entries in chunks:
        chunk = x[entries]
        m_new = max(m, chunk.max())
        if m_new == -np.inf:
            continue  # all entries so far are masked
        ell = ell * np.exp(m - m_new) + np.exp(chunk - m_new).sum()
        m = m_new
    softmax = np.exp(x - m) / ell if ell > 0 else np.zeros_like(x)
    return OnlineSoftmaxResult(softmax, float(m), float(ell), len(chunks))


def online_softmax_update(
    m: Array, l: Array, O: Array, S: Array, V: Array
) -> tuple[Array, Array, Array]:
    """Update m, l (R,) and the unnormalised O (R, d) with a tile: scores S (R, T), -inf where
    masked, and values V (T, d).
    """
    m_new = np.maximum(m, S.max(axis=1))
    shift = np.where(
        m_new == -np.inf, 0.0, m_new
    )  # -inf - -inf is NaN, in a row that has seen no key
    alpha = np.exp(m - shift)
    P = np.exp(S - shift[:, None])
    return m_new, alpha * l + P.sum(axis=1), alpha[:, None] * O + P @ V


def standard_attention(
    Q: ArrayLike, K: ArrayLike, V: ArrayLike, causal: bool = False, mask: Mask = ALL
) -> Array:
    """softmax(Q K^T / sqrt(d)) V (N, d_v), with the whole score matrix in memory."""
    Q, K, V = _float64(Q, K, V)
    S = _scores(Q, K, slice(0, len(Q)), slice(0, len(K)), causal, mask)
    m = S.max(axis=1, keepdims=True)
    P = np.exp(S - np.where(m == -np.inf, 0.0, m))
    l = P.sum(axis=1, keepdims=True)
    return P / np.where(l == 0, 1.0, l) @ V


def flash_attention(
    Q: ArrayLike, K: ArrayLike, V: ArrayLike, block_size: int, causal: bool = False
) -> Array:
    """The same output (N, d_v), computed from block_size >= 1 keys at a time."""
    O, _ = flash_attention_forward(Q, K, V, block_size, causal)
    return O


def flash_attention_forward(
    Q: ArrayLike,
    K: ArrayLike,
    V: ArrayLike,
    block_size: int = 256,
    causal: bool = False,
    mask: Mask = ALL,
) -> tuple[Array, tuple[Array, Array]]:
    """O (N, d_v) and (m, l), from which the backward recomputes the probabilities."""
    Q, K, V = _float64(Q, K, V)
    m, l, O = np.full(len(Q), -np.inf), np.zeros(len(Q)), np.zeros((len(Q), V.shape[1]))
    for keys in _tiles(len(K), block_size):
        S = _scores(Q, K, slice(0, len(Q)), keys, causal, mask)
        m, l, O = online_softmax_update(m, l, O, S, V[keys])
    return O / np.where(l == 0, 1.0, l)[:, None], (m, l)


def flash_attention_backward(
    grad_O: ArrayLike,
    Q: ArrayLike,
    K: ArrayLike,
    V: ArrayLike,
    O: ArrayLike,
    m: ArrayLike,
    l: ArrayLike,
    block_size: int = 256,
    causal: bool = False,
    mask: Mask = ALL,
) -> tuple[Array, Array, Array]:
    """dQ (N, d), dK (M, d) and dV (M, d_v) from the forward's O, m and l. P = exp(S - m) / l is
    recomputed tile by tile.
    """
    grad_O, Q, K, V, O, m, l = _float64(grad_O, Q, K, V, O, m, l)
    scale = Q.shape[1] ** -0.5
    m, l = (
        np.where(l == 0, 0.0, m),
        np.where(l == 0, 1.0, l),
    )  # a row without keys: every exp(-inf) is 0
    delta = (grad_O * O).sum(axis=1)  # sum_j P_ij dP_ij, without P
    dQ, dK, dV = np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V)
    for keys in _tiles(len(K), block_size):
        S = _scores(Q, K, slice(0, len(Q)), keys, causal, mask)
        P = np.exp(S - m[:, None]) / l[:, None]
        dS = P * (grad_O @ V[keys].T - delta[:, None]) * scale
        dQ += dS @ K[keys]
        dK[keys] = dS.T @ Q
        dV[keys] = P.T @ grad_O
    return dQ, dK, dV


def tiled_attention(
    Q: ArrayLike,
    K: ArrayLike,
    V: ArrayLike,
    block_size_q: int = 32,
    block_size_kv: int = 32,
    causal: bool = False,
) -> Array:
    """The algorithm of the first paper: the outer loop runs over keys, each tile subtracts its own
    maximum, and O stays normalised.
    """
    Q, K, V = _float64(Q, K, V)
    O, m, ell = np.zeros((len(Q), V.shape[1])), np.full(len(Q), -np.inf), np.zeros(len(Q))
    for keys in _tiles(len(K), block_size_kv):
        for rows in _tiles(len(Q), block_size_q):
            S = _scores(Q, K, rows, keys, causal)
            m_block = S.max(axis=1)
            if (m_block == -np.inf).all():
                continue  # no row sees a key of this tile
            P = np.exp(S - np.where(m_block == -np.inf, 0.0, m_block)[:, None])
            m_new = np.maximum(m[rows], m_block)
            shift = np.where(m_new == -np.inf, 0.0, m_new)
            alpha, beta = np.exp(m[rows] - shift), np.exp(m_block - shift)
            ell_new = alpha * ell[rows] + beta * P.sum(axis=1)
            past = (alpha * ell[rows])[:, None] * O[rows]
            O[rows] = (past + beta[:, None] * (P @ V[keys])) / np.where(ell_new == 0, 1.0, ell_new)[
                :, None
            ]
            m[rows], ell[rows] = m_new, ell_new
    return O


def _float64(*arrays: ArrayLike) -> list[Array]:
    return [np.asarray(x, dtype=np.float64) for x in arrays]


def _tiles(length: int, block_size: int) -> Iterator[slice]:
    """Slices of block_size; the last may be shorter. Raises ValueError for a block_size below 1."""
    if block_size < 1:
        raise ValueError(f"{block_size=} must be at least 1")
    for start in range(0, length, block_size):
        yield slice(start, min(start + block_size, length))


def _scores(Q: Array, K: Array, rows: slice, keys: slice, causal: bool, mask: Mask = ALL) -> Array:
    """One tile of scores, -inf where the query does not see the key."""
    S = Q[rows] @ K[keys].T / np.sqrt(Q.shape[1])
    p = np.arange(rows.start, rows.stop)[:, None] + len(K) - len(Q)
    j = np.arange(keys.start, keys.stop)[None]
    hidden = np.zeros(S.shape, dtype=bool)
    if causal:
        hidden |= j > p
    if mask.left >= 0:
        hidden |= j < p - mask.left
    if mask.right >= 0:
        hidden |= j > p + mask.right
    if mask.num_keys is not None:
        hidden |= j >= mask.num_keys
    return np.where(hidden, -np.inf, S)
