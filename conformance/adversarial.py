"""How the inputs of a case differ from normal numbers: functions of q, k and v, by name.

The script of a failing call repeats the source of one, so they name nothing but torch.

Dimensions: q (B, H, N, D); k and v (B, H_kv, M, D).
"""

import torch


def normal(q, k, v):
    return q, k, v


def large(q, k, v):
    return 4 * q, 2 * k, v


def growing(q, k, v):
    """Each key scores higher than the one before: the maximum changes in every tile."""
    ramp = torch.linspace(0, 3, k.shape[2], dtype=k.dtype)
    return q.abs(), 0.1 * k.abs() + ramp[:, None], v


def spike(q, k, v):
    """One key near the end outweighs everything seen before it."""
    k[:, :, -3] = 8 * q[:, : k.shape[1], -1]
    return q, k, v


def tower(q, k, v):
    """For every query, one key near the end scores 200 above all others."""
    q[..., 0], k[..., 0], k[:, :, -3, 0] = 4, 0, 50 * q.shape[-1] ** 0.5
    return q, k, v


def huge(q, k, v):
    """Each row's own key scores in the hundreds, different in each row and beyond the largest
    exponent of every dtype.
    """
    return 40 * q, 0.3 * k + q[:, : k.shape[1]], v


def steep(q, k, v):
    """Scores in the tens, and of one query and one key in the thousands."""
    q, k = 4 * q, 4 * k
    q[:, :, q.shape[2] // 2] *= 8
    k[:, :, k.shape[2] // 2] *= 8
    return q, k, v


def negative(q, k, v):
    """Every score is far below zero: if the maximum started at 0, every exp would be 0."""
    return q.abs() + 3, -(k.abs() + 3) * (40 / q.shape[-1] ** 0.5), v


def up(q, k, v):
    """Every score 100 higher, which does not change a softmax."""
    q[..., 0], k[..., 0] = 4, 25 * q.shape[-1] ** 0.5
    return q, k, v


def down(q, k, v):
    """Every score 120 lower, which does not change a softmax."""
    q[..., 0], k[..., 0] = 4, -30 * q.shape[-1] ** 0.5
    return q, k, v


def up_and_down(q, k, v):
    """Both, as the heads take turns."""
    q[..., 0] = 4
    k[:, ::2, :, 0] = 25 * q.shape[-1] ** 0.5
    k[:, 1::2, :, 0] = -30 * q.shape[-1] ** 0.5
    return q, k, v


def ties(q, k, v):
    """Keys repeat, so that maxima are tied within and across tiles."""
    return q, k[:, :, torch.arange(k.shape[2]) % 4], v


def ones(q, k, v):
    return q, k, torch.ones_like(v)


ADVERSARIAL = {
    change.__name__.replace("_", " "): change
    for change in (
        *(normal, large, growing, spike, tower, huge, steep),
        *(negative, up, down, up_and_down, ties, ones),
    )
}
