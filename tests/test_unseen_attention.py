"""Attention that no override would see: within vmap, over nested tensors and wrappers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from lightning_cp.context import SLOT
from lightning_cp.errors import RefusedError
from lightning_cp.swap import Installation, _torch
from tests._harness.multihead import BATCH, HEADS, SIZE, context


def vmapped(q: Tensor) -> Tensor:
    return torch.func.vmap(F.scaled_dot_product_attention)(q, q, q)


def vmapped_keys(q: Tensor) -> Tensor:
    call = torch.func.vmap(F.scaled_dot_product_attention, in_dims=(0, None, None))
    return call(q, q[0], q[0])


def strided(q: Tensor) -> Tensor:
    nested = torch._nested_view_from_buffer(
        q.detach().flatten(),
        *(torch.tensor(s) for s in ([[HEADS, 5, 4]] * 2, [[20, 4, 1]] * 2)),
        torch.tensor([0, 40]),
    )
    return F.scaled_dot_product_attention(nested, nested, nested)


def jagged(q: Tensor) -> Tensor:
    offsets = torch.tensor([0, 3, 10])
    rows = q.detach().transpose(1, 2).reshape(10, HEADS, 4)
    nested = torch.nested.nested_tensor_from_jagged(rows, offsets).transpose(1, 2)
    return F.scaled_dot_product_attention(nested, nested, nested).values()


def wrapped(q: Tensor) -> Tensor:
    pair = TwoTensor(q, q.clone())
    return F.scaled_dot_product_attention(pair, pair, pair).a


UNSEEN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "vmap": (vmapped, "attention within vmap; call it without"),
    "vmap over queries": (vmapped_keys, "attention within vmap"),
    "strided": (strided, "attention over nested tensors; pass padded tensors"),
    "jagged": (jagged, "attention over nested tensors"),
    "wrapper": (wrapped, "attention over a TwoTensor is not supported"),
}


@pytest.mark.parametrize(("call", "message"), UNSEEN.values(), ids=list(UNSEEN))
@pytest.mark.filterwarnings("ignore:.*performance drop because we have not yet implemented")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_attention_that_no_override_would_see(
    call: Callable[[Tensor], Tensor], message: str
) -> None:
    q = torch.randn(BATCH, HEADS, SIZE, 4)
    before = call(q)
    installation = Installation()
    try:
        during = call(q)
        with SLOT.activate(context()), pytest.raises(RefusedError, match=message):
            call(q)
    finally:
        installation.remove()
    for found in (during, call(q)):
        pairs = [x.unbind() if x.is_nested else [x] for x in (found, before)]
        torch.testing.assert_close(*pairs)


def test_private_names_of_torch() -> None:
    name = "aten::scaled_dot_product_attention"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, _torch.VMAP)
    for key in (*_torch.nested_keys("cpu"), *_torch.nested_keys("cuda")):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    module, function = _torch.JAGGED
    assert callable(getattr(module, function))
    assert not _torch.is_wrapper(torch.ones(1))
    assert not _torch.is_wrapper(nn.Parameter(torch.ones(1)))
