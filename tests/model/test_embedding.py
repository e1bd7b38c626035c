"""The kernels of the token embedding against PyTorch's operators, in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model import embedding, embedding_kernel
from model.embedding import TiedEmbedding

FP32, BF16 = torch.float32, torch.bfloat16
# sorted, 32 of them are a piece
TOKENS = {
    "all different": torch.randperm(70, generator=torch.Generator().manual_seed(0)),
    "one token": torch.full((200,), 7),
    "over several pieces": torch.tensor([3] * 20 + [5] * 100 + [6] * 3 + [9] * 41),
    "ends with a piece": torch.tensor([1] * 32 + [2] * 64 + [4] * 32),
    "one piece": torch.tensor([4, 4, 2]),
    "any": torch.randint(30, (500,), generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, (FP32, BF16)[i % 2]) for i, name in enumerate(TOKENS)]
)
def test_rows_are_added_to_those_of_their_tokens(name, dtype):
    tokens = TOKENS[name]
    generator = torch.Generator().manual_seed(0)
    tokens = tokens[torch.randperm(len(tokens), generator=generator)]
    total = torch.randn(80, 300, generator=generator).to(dtype)  # two blocks of columns
    d_x = torch.randn(len(tokens), 300, generator=generator).to(dtype)
    expected = total.double().index_add(0, tokens, d_x.double())
    embedding_kernel.add_gradient(total, tokens, d_x)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(total.double(), expected, rtol=2 * eps, atol=100 * FP32_EPS + eps)


FP32_EPS = torch.finfo(FP32).eps


def test_tokens_outside_the_vocabulary_touch_no_memory():
    memory = torch.zeros(6, 8)  # the vocabulary is rows 1 to 4
    tokens, d_x = torch.tensor([-1, 4, 0, 4, 10**6]), torch.ones(5, 8)
    embedding_kernel.add_gradient(memory[1:5], tokens, d_x)
    assert memory[:, 0].tolist() == [0, 1, 0, 0, 0, 0]
    looked_up = embedding_kernel.lookup(tokens[None], memory[1:5], None, None)
    assert looked_up.isnan().all(-1).tolist() == [[True, True, False, True, True]]


@pytest.mark.parametrize("learned", [True, False], ids=["learned positions", "none"])
def test_gradients_of_both_uses_of_the_weight(learned):
    torch.manual_seed(0)
    weight, position_weight = torch.randn(40, 24), torch.randn(20, 24)
    tokens, positions = torch.randint(40, (3, 16)), torch.arange(16)
    d_x, d_logits = torch.randn(3, 16, 24), torch.randn(3, 16, 40)

    def gradients(dtype: torch.dtype, *, tied: bool) -> list[Tensor]:
        leaves = [each.to(dtype).requires_grad_() for each in (weight, position_weight)]
        given = leaves[1] if learned else None
        if tied:
            x, output = TiedEmbedding.apply(tokens, leaves[0], positions, given)
        else:
            x, output = F.embedding(tokens, leaves[0]), leaves[0]
            x = x if given is None else x + given[positions]
        loss = (x * d_x.to(dtype)).sum() + (F.linear(x, output) * d_logits.to(dtype)).sum()
        return [x.detach(), *torch.autograd.grad(loss, leaves[: 1 + learned])]

    found, reference = gradients(FP32, tied=True), gradients(torch.float64, tied=False)
    for ours, exact in zip(found, reference, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-4)


def test_lawful_operators():
    weight, d_x = torch.randn(20, 8), torch.randn(6, 8)
    tokens = torch.tensor([[1, 4, 4], [0, 1, 19]])
    torch.library.opcheck(embedding.lookup, (tokens, weight, torch.arange(3), weight))
    torch.library.opcheck(embedding.add_gradient, (weight, tokens.flatten(), d_x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_on_a_gpu(dtype):
    """Half of the tokens are one; twice, with the same bits."""
    torch.manual_seed(0)
    tokens = torch.randint(50_257, (4, 8192), device="cuda")
    tokens[:, ::2] = 198
    weight, d_x = torch.randn(50_304, 768), torch.randn(4, 8192, 768)
    weight, d_x = (x.to("cuda", dtype) for x in (weight, d_x))
    assert embedding.has_kernel(weight.clone().requires_grad_())
    assert torch.equal(embedding.lookup(tokens, weight, None, None), weight[tokens])
    totals = [weight.clone() for _ in range(2)]
    for total in totals:
        embedding.add_gradient(total, tokens.flatten(), d_x.flatten(0, 1))
    expected = weight.double().index_add(0, tokens.flatten(), d_x.flatten(0, 1).double())
    torch.testing.assert_close(totals[0].double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-3)
    assert torch.equal(*totals)
