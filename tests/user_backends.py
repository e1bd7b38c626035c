"""Backends that a user might write: one that is right, and one for each way to be wrong."""

import torch
from torch import Tensor

from attention import AttentionOutput, Backend, ScoreMod, get_backend

naive = get_backend("naive").fn


def right(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> AttentionOutput:
    return naive(q, k, v, causal=causal, scale=scale)


def wrong_shape(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    return AttentionOutput(right(q, k, v, **arguments).out[:, :, 1:])


def wrong_dtype(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    return AttentionOutput(right(q, k, v, **arguments).out.double())


def nan(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    return AttentionOutput(right(q, k, v, **arguments).out * torch.nan)


def wrong(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> AttentionOutput:
    return naive(q, k, v, causal=causal, scale=1.01 * scale)


def raises(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    raise KeyError("my kernel's table")


def exits(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    raise SystemExit(3)


def presses_ctrl_c(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    raise KeyboardInterrupt


def with_an_option(q: Tensor, k: Tensor, v: Tensor, *, a: float, **arguments) -> AttentionOutput:
    return right(q, k, v, **arguments)


def asks_the_gpu(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    if q.abs().max().item() > 1e9:
        raise ValueError("q is too large")
    return right(q, k, v, **arguments)


RIGHT = Backend("right", right)
ASKS_THE_GPU = Backend("asks_the_gpu", asks_the_gpu)
WITH_AN_OPTION = Backend("with_an_option", with_an_option, options={"a": 1.0})
RIGHT_IN_FP32 = Backend("right_in_fp32", right, dtypes=(torch.float32,))
WRONG_SHAPE = Backend("wrong_shape", wrong_shape)
WRONG_DTYPE = Backend("wrong_dtype", wrong_dtype)
NAN = Backend("nan", nan)
WRONG = Backend("wrong", wrong)
RAISES = Backend("raises", raises)
EXITS = Backend("exits", exits)
PRESSES_CTRL_C = Backend("presses_ctrl_c", presses_ctrl_c)


def deaf(q: Tensor, k: Tensor, v: Tensor, *, window: int | None, **arguments) -> AttentionOutput:
    return right(q, k, v, **arguments)


DEAF = Backend("deaf", deaf, features=frozenset({"gqa", "window"}))

calls = 0


def drifts(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> AttentionOutput:
    """Exact in its first 30 calls, and in the checks before a run."""
    global calls
    calls += 1
    output = right(q, k, v, causal=causal, scale=scale)
    return output if calls <= 30 else AttentionOutput(output.out * 1.5)


DRIFTS = Backend("drifts", drifts)


# changes of the scores: two that are right, and one for each way to be wrong


def halved(score, b, h, i, j, params):
    return score / 2, torch.full_like(score, 0.5)


def hides_a_diagonal(score, b, h, i, j, params):
    return torch.where(i - j == 3, -torch.inf, score), torch.ones(1)


HALVED = ScoreMod(halved)
HALVED_WITH_KERNEL = ScoreMod(halved, kernel="conformance.every_index_kernel:every_index")
HIDES_A_DIAGONAL = ScoreMod(hides_a_diagonal)
WRONG_DERIVATIVE = ScoreMod(lambda score, *_: (score / 2, torch.ones_like(score)))
MIXES_SCORES = ScoreMod(lambda score, *_: (score.cumsum(-1), torch.ones_like(score)))
NO_DERIVATIVE = ScoreMod(lambda score, *_: score / 2)
FEW_ARGUMENTS = ScoreMod(lambda score: (score, torch.ones(1)))
FEWER_SCORES = ScoreMod(lambda score, *_: (score[..., :2], torch.ones(1)))
RANDOM_SCORES = ScoreMod(lambda score, *_: (score + torch.rand_like(score), torch.ones(1)))
NAN_SCORES = ScoreMod(lambda score, *_: (score.log(), 1 / score))
