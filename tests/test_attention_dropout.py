"""Dropout of attention weights: what is dropped in the forward is dropped in the backward."""

import pytest
import torch
from torch import Tensor

from lightning_cp import attend
from lightning_cp.errors import RefusedError

LENGTH = 9
P = 0.4


def inputs() -> list[Tensor]:
    """q, k, v of which v shows the weights of every query, and the gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    shape = (2, 4, LENGTH, 5)
    q, k = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    v = torch.eye(LENGTH, dtype=torch.float64).expand(2, 4, -1, -1)
    grad = torch.randn(2, 4, LENGTH, LENGTH, generator=generator, dtype=torch.float64)
    return [*(x.clone().requires_grad_() for x in (q, k, v)), grad]


def test_gradients_are_those_of_the_weights_that_were_kept() -> None:
    q, k, v, grad = inputs()
    torch.manual_seed(5)
    out = attend(q, k, v, is_causal=True, scale=0.4, dropout_p=P)
    found = torch.autograd.grad(out, (q, k, v), grad)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    weights = (q @ k.mT * 0.4).masked_fill(hidden, float("-inf")).softmax(-1)
    kept = (out.detach() > 0) / (1 - P)
    torch.testing.assert_close(out, weights * kept)
    assert abs((out[..., ~hidden] > 0).double().mean().item() - (1 - P)) < 0.1
    expected = torch.autograd.grad((weights * kept) @ v, (q, k, v), grad)
    torch.testing.assert_close(found, expected)


def test_every_call_draws_anew_and_a_seed_repeats_it() -> None:
    q, k, v, _ = inputs()
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        drawn += [attend(q, k, v, dropout_p=P) for _ in range(2)]
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[4])


def test_what_is_no_probability_is_refused() -> None:
    q, k, v, _ = inputs()
    with pytest.raises(RefusedError, match=r"dropout_p=1.5 is no probability"):
        attend(q, k, v, dropout_p=1.5)
    assert not attend(q, k, v, dropout_p=1.0).any()
