"""Compiled `nn.MultiheadAttention` in a context of one rank and outside of it."""

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

from lightning_cp.context import SLOT
from lightning_cp.errors import RefusedError
from lightning_cp.swap import Installation
from tests._harness.multihead import BATCH, KEYS, LATER, PADDING, SIZE, WIDTH, context, mha, rows


@pytest.fixture
def x() -> Tensor:
    return rows()


class Block(nn.Module):
    """Compiled as a whole; `options` of the call, and whether weights are returned."""

    def __init__(self, used: bool = False, **options: Any) -> None:
        super().__init__()
        self.attn, self.used, self.options = mha(**options.pop("made", {})), used, options

    def forward(self, x: Tensor) -> Any:
        out, weights = self.attn(x, x, x, **self.options)
        return (out, weights) if self.used else out


@pytest.mark.parametrize("options", [{}, {"attn_mask": LATER, "is_causal": True}])
@pytest.mark.parametrize("first", ["plain", "context"])
def test_one_graph_serves_both(
    first: str, options: dict[str, Any], x: Tensor, installation: Installation
) -> None:
    block = Block(**options)
    expected = block(x)
    expected.sum().backward()
    gradient, x.grad = x.grad, None
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    for inside in (first == "context", first == "plain") * 2:
        active = context() if inside else None
        with SLOT.activate(active):
            out = compiled(x)
            out.sum().backward()
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(x.grad, gradient)
        x.grad = None
        assert active is None or (active.log.attention, active.log.causal) == (1, bool(options))
    assert counter.frame_count == 1


COMPILED: dict[str, tuple[dict[str, Any], str]] = {
    "weights": ({"used": True}, "weights of nn.MultiheadAttention are not computed"),
    "weights with a mask": (
        {"used": True, "attn_mask": LATER},
        "weights of nn|attention with a mask",
    ),
    "a mask": ({"attn_mask": LATER, "need_weights": False}, "attention with a mask"),
    "padding": ({"key_padding_mask": PADDING}, "attention with a mask"),
    "add_bias_kv": ({"made": {"add_bias_kv": True}}, "6 tokens are no declared sequence's share"),
}


@pytest.mark.parametrize("inside_first", [False, True])
@pytest.mark.parametrize(("options", "message"), COMPILED.values(), ids=list(COMPILED))
def test_compiled_code_refuses_when_it_runs(
    options: dict[str, Any],
    message: str,
    inside_first: bool,
    x: Tensor,
    installation: Installation,
) -> None:
    """Whether the graph was made in a context or outside, and is right outside."""
    block = Block(**options)
    expected = block(x)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for inside in (inside_first, True, False):
        if not inside:
            torch.testing.assert_close(compiled(x), expected)
            continue
        active = context(keys=KEYS if "key_padding_mask" in options else None)
        with SLOT.activate(active), pytest.raises(RuntimeError, match=message):
            compiled(x)


def test_compiled_dropout_drops_in_output_and_weights_alike(installation: Installation) -> None:
    x = torch.randn(BATCH, SIZE, WIDTH)
    block = Block(used=True, made={"dropout": 0.5})
    nn.init.eye_(block.attn.out_proj.weight)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    out, weights = compiled(x)
    zero = (weights == 0).all(-1)  # rows in which every key was dropped, in all heads
    assert torch.equal(zero, (out == 0).all(-1))
    assert not torch.allclose(out, block.eval()(x)[0])
    with SLOT.activate(context()), pytest.raises(RefusedError, match="weights of nn"):
        compiled(x)
