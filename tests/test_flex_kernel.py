"""The kernel of flex attention: blocks and their gradients, by a stand-in that has some on CPUs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cp.attention import attend
from lightning_cp.context import SLOT
from lightning_cp.kernels import KERNELS
from lightning_cp.kernels.flex import Attend, Flex
from lightning_cp.kernels.reference import Reference
from lightning_cp.kernels.scores import Scores
from lightning_cp.mask import MaskMod
from lightning_cp.plan import Tile
from tests._harness.asked import every_third
from tests._harness.multihead import context

TABLE = torch.arange(40) % 3


def by_table(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return TABLE[q] != TABLE[k + b]


def dense(
    q: Tensor, k: Tensor, v: Tensor, mask_mod: MaskMod, scale: float
) -> tuple[Tensor, Tensor]:
    """Through masks of all pairs; refuses what is recorded by nobody."""
    b, h, i, j = (torch.arange(n) for n in (*q.shape[:3], k.shape[2]))
    seen = mask_mod(b.view(-1, 1, 1, 1), h.view(-1, 1, 1), i.view(-1, 1), j)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~seen, -1e300)
    blind = ~seen.expand_as(scores).any(-1)
    lse = scores.logsumexp(-1).masked_fill(blind, float("-inf"))
    out = scores.softmax(-1) @ v
    return out.masked_fill(blind.unsqueeze(-1), 0), lse


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the kernel take CPU tensors of any dtype and size, in small blocks."""
    for name in ("unfit", "too_old"):
        monkeypatch.setattr(f"lightning_cp.kernels.flex.{name}", lambda *_: None)
    monkeypatch.setattr("lightning_cp.kernels.flex.ROWS", 3)
    monkeypatch.setattr("lightning_cp.kernels.flex.SMALLEST", 1)

    def use(attend: Any) -> None:
        monkeypatch.setitem(KERNELS, "flex", Flex(attend))

    return use


def _attended(kernel: str, **options: Any) -> list[Tensor]:
    """Output and gradients of a call in a context."""
    generator = torch.Generator().manual_seed(1)
    leaves = [
        torch.randn(2, heads, 5, size, generator=generator, dtype=torch.float64).requires_grad_()
        for heads, size in ((4, 6), (2, 6), (2, 3))
    ]
    with SLOT.activate(replace(context(), kernel=kernel)):
        out = attend(*leaves, **options)
        return [out, *torch.autograd.grad(out.sin().sum(), leaves)]


@pytest.mark.parametrize("mod", [every_third, by_table])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"window": (1, 2)}, {"sinks": torch.tensor([0.5] * 4)}]
)
def test_calls_like_those_of_the_reference(
    on_cpu: Callable[..., None], options: dict[str, Any], mod: MaskMod
) -> None:
    """Blocks whose rows see no key among them, whose gradients are merged."""
    on_cpu(dense)
    found = _attended("flex", mask_mod=mod, **options)
    for one, other in zip(found, _attended("reference", mask_mod=mod, **options), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_blocks_by_flex_attention_itself(backend: str | None) -> None:
    """Forward alone, which is all it has on CPUs."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, heads, 9, 16, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2)
    )
    scores = Scores(mask_mod=every_third, first_head=3).at(((7, 12), (20, 24)), ((0, 9),))
    flex = Flex(Attend(backend)).bound(scores)
    for tile in (
        Tile((0, 9), (0, 9)),
        Tile((2, 7), (1, 9), causal=True),
        Tile((0, 6), (3, 8), row=1, band=(-2, 1)),
    ):
        found, expected = (
            next(iter(kernel.forward([tile], q, k, v, scale=0.3)))
            for kernel in (flex, Reference().bound(scores))
        )
        torch.testing.assert_close(found.out, expected.out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.lse, expected.lse, rtol=1e-12, atol=1e-12)
