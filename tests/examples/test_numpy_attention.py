"""The NumPy forms, compared with the specification in another package and results by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import attention, attention_varlen
from examples.numpy_attention import (
    Mask,
    flash_attention,
    flash_attention_backward,
    flash_attention_forward,
    online_softmax,
    online_softmax_update,
    standard_attention,
    tiled_attention,
)
from tests.test_imports import imports

# head dim 4, scores of the first query already divided by sqrt(4)
WORKED_SCORES = np.array([0.8, 0.3, -0.1, 0.5, 1.2, -0.4, 0.6, 0.1])


def random_inputs(num_queries, num_keys, head_dim=5, *, gain=1.0, seed=0):
    generator = np.random.default_rng(seed)
    Q, K, V = (generator.standard_normal((n, head_dim)) for n in (num_queries, num_keys, num_keys))
    return gain * Q, gain * K, V


def naive(Q, K, V, causal=False):
    """The specification in float64, by another package."""
    tensors = [torch.from_numpy(x)[None, None] for x in (Q, K, V)]
    return attention(*tensors, backend="naive", causal=causal).out[0, 0].numpy()


def close(found, expected, tolerance=1e-12):
    assert found.shape == expected.shape
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max(initial=0.0))
    )


shapes = st.tuples(st.integers(1, 23), st.integers(1, 23), st.integers(1, 9))


@given(
    shapes,
    st.integers(1, 30),
    st.integers(1, 30),
    st.booleans(),
    st.sampled_from([0.1, 1.0, 8.0]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=150)
def test_every_form_is_softmax_attention(shape, block_size, block_size_q, causal, gain, seed):
    """Any tile size, more or fewer keys than queries (rows without keys, masked first tiles), small
    and large scores.
    """
    Q, K, V = random_inputs(*shape, gain=gain, seed=seed)
    expected = naive(Q, K, V, causal)
    close(standard_attention(Q, K, V, causal), expected)
    close(flash_attention(Q, K, V, block_size, causal), expected)
    close(tiled_attention(Q, K, V, block_size_q, block_size, causal), expected)


def differentiated(Q, K, V, grad_O, causal, mask):
    """O, the log-sum-exp, dQ, dK, dV of one sequence and one head, from the NumPy forms."""
    if len(Q) == 0 or len(K) == 0:
        return np.zeros_like(grad_O), np.full(len(Q), -np.inf), *map(np.zeros_like, (Q, K, V))
    O, (m, l) = flash_attention_forward(Q, K, V, 4, causal, mask)  # noqa: E741
    close(O, standard_attention(Q, K, V, causal, mask))
    with np.errstate(divide="ignore"):
        lse = m + np.log(l)
    return O, lse, *flash_attention_backward(grad_O, Q, K, V, O, m, l, 5, causal, mask)


def agree(results, expected):
    for found, right in zip(results, expected, strict=True):
        np.testing.assert_allclose(found.detach().numpy(), right, rtol=0, atol=1e-11)


WINDOWS = [
    *((False, (-1, -1)), (True, (-1, -1)), (True, (3, 2))),
    *((True, (0, -1)), (False, (-1, 4))),
]


@pytest.mark.parametrize(("causal", "window"), WINDOWS)
def test_windows_lengths_and_narrow_values(causal, window):
    """Two sequences, one head, values narrower than keys: attention() against the loop by hand."""
    for num_queries, num_keys in ((13, 13), (6, 13), (13, 6)):
        lengths = [num_keys - 2, 0]
        Q, K, V = random_inputs(2 * num_queries, 2 * num_keys, 5)
        V, grad_O = V[:, :3], random_inputs(2 * num_queries, 1, 3, seed=1)[0]
        tensors = [torch.from_numpy(x).unflatten(0, (2, 1, -1)) for x in (Q, K, V)]
        inputs = [x.detach().requires_grad_() for x in tensors]
        arguments = {"causal": causal, "window": window, "key_lengths": torch.tensor(lengths)}
        out, lse = attention(*inputs, backend="naive", **arguments)
        gradient = torch.from_numpy(grad_O).unflatten(0, (2, 1, -1))
        found = out, lse, *torch.autograd.grad(out, inputs, gradient)
        for b, length in enumerate(lengths):
            one = [x[b, 0].numpy() for x in (*tensors, gradient)]
            expected = differentiated(*one, causal, Mask(*window, length))
            agree([x[b, 0] for x in found], expected)


@pytest.mark.parametrize(("causal", "window"), WINDOWS)
def test_packed_sequences(causal, window):
    """attention_varlen() against a loop over sequences of unequal lengths, some of them zero."""
    of_queries, of_keys = [0, 7, 7, 9, 14, 15], [0, 3, 5, 5, 14, 15]
    Q, K, V = random_inputs(15, 15, 5)
    V, grad_O = V[:, :3], random_inputs(15, 1, 3, seed=1)[0]
    inputs = [torch.from_numpy(x)[:, None].requires_grad_() for x in (Q, K, V)]
    ends = torch.tensor(of_queries), torch.tensor(of_keys)
    out, lse = attention_varlen(*inputs, *ends, backend="naive", causal=causal, window=window)
    gradients = torch.autograd.grad(out, inputs, torch.from_numpy(grad_O)[:, None])
    assert out.shape == (15, 1, 3) and lse.shape == (1, 15)
    for s in range(5):
        rows, keys = (slice(*ends[s : s + 2]) for ends in (of_queries, of_keys))
        expected = differentiated(Q[rows], K[keys], V[keys], grad_O[rows], causal, Mask(*window))
        found = out[rows, 0], lse[0, rows], gradients[0][rows, 0]
        agree((*found, *(x[keys, 0] for x in gradients[1:])), expected)


@given(st.lists(st.floats(-700, 700), min_size=1, max_size=40), st.integers(0, 50))
def test_online_softmax(values, chunk_size):
    x = np.array(values)
    softmax, m, ell, num_chunks = online_softmax(x, chunk_size)
    p = np.exp(x - x.max())
    close(softmax, p / p.sum())
    assert m == x.max()
    assert ell == pytest.approx(p.sum(), rel=1e-12)
    assert num_chunks == (1 if chunk_size == 0 else -(-len(x) // chunk_size))


def test_online_softmax_of_masked_entries():
    """A chunk of -inf gives no NaN in any place; a vector of only -inf gets no weight."""
    x = np.array([-np.inf, -np.inf, 1.0, 2.0])
    close(online_softmax(x, 2).softmax, np.array([0, 0, 1, np.e]) / (1 + np.e))
    softmax, m, ell, _ = online_softmax(x[:2], 1)
    assert (softmax == 0).all() and m == -np.inf and ell == 0


def test_update_by_hand():
    """If the maximum moves from 0.8 to 1.2, the past is scaled by exp(-0.4) = 0.670: 0.670 * 2.755
    + 2.084 = 3.930.
    """
    m, l, O = np.array([-np.inf]), np.zeros(1), np.zeros((1, 4))  # noqa: E741
    V = np.eye(8)[:, :4]
    m, l, O = online_softmax_update(m, l, O, WORKED_SCORES[None, :4], V[:4])  # noqa: E741
    assert m == 0.8 and round(l.item(), 3) == 2.754  # 2.755 where each addend is rounded first
    close(O, np.exp(WORKED_SCORES[None, :4] - 0.8))
    m, l, O = online_softmax_update(m, l, O, WORKED_SCORES[None, 4:], V[4:])  # noqa: E741
    assert m == 1.2 and round(l.item(), 3) == 3.930
    close(O, np.exp(WORKED_SCORES[None, :4] - 1.2))
    assert online_softmax(WORKED_SCORES, 4).ell == pytest.approx(3.930, abs=5e-4)


def test_worked_example_of_two_keys():
    """Scores [1, 0] / sqrt(2), weights 0.670 and 0.330."""
    Q, K, V = [[1, 0]], [[1, 0], [0, 1]], [[1, 2], [3, 4]]
    for block_size in (1, 2, 3):
        assert np.round(flash_attention(Q, K, V, block_size), 5).tolist() == [[1.66048, 2.66048]]


@pytest.mark.parametrize("function", [flash_attention, flash_attention_forward, tiled_attention])
def test_a_block_holds_at_least_one_key(function):
    with pytest.raises(ValueError, match="block_size=0"):
        function(*random_inputs(2, 2), 0)


def test_shares_nothing_with_what_it_judges():
    own = [x for x in imports("examples") if x.importer == "examples.numpy_attention"]
    assert {x.top for x in own} == {"numpy", "collections", "typing"}
