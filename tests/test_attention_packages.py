"""Attention functions of other modules: plain outside a context, refused within one."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lightning_cp.context import SLOT
from lightning_cp.errors import RefusedError
from lightning_cp.swap import Installation
from lightning_cp.swap.packages import FUNCTIONS, WITHOUT_OPERATORS
from tests._harness import (
    flash_attn,
    flash_attn_3_ops,
    flash_attn_4_functions,
    flash_attn_later,
)
from tests._harness.multihead import BATCH, HEADS, SIZE, context

LIBRARIES = {name: names for name, names in FUNCTIONS.items() if not name.startswith("torch.")}


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def flexed(q: Tensor) -> Tensor:
    mask = create_block_mask(causal, None, None, SIZE, SIZE, device="cpu")
    found: Tensor = flex_attention(q, q, q, block_mask=mask)
    return found


def flexed_by_keyword(q: Tensor) -> Tensor:
    found: Tensor = flex_attention(key=q, query=q, value=q, scale=0.3)
    return found


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "block mask": flexed,
    "keywords": flexed_by_keyword,
}


@contextmanager
def in_use() -> Iterator[Installation]:
    installation = Installation()
    try:
        yield installation
    finally:
        installation.remove()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_flex_attention_that_was_imported_before(call: Callable[[Tensor], Tensor]) -> None:
    q = torch.randn(BATCH, HEADS, SIZE, 16)
    before, signature = call(q), inspect.signature(flex_attention)
    code, keywords = flex_attention.__code__, flex_attention.__kwdefaults__
    with in_use():
        torch.testing.assert_close(call(q), before)
        assert inspect.signature(flex_attention) == signature
        own = context()
        with SLOT.activate(own):
            torch.testing.assert_close(call(q), before)
            assert own.log.attention == 1
        with SLOT.activate(own), SLOT.suspend():
            torch.testing.assert_close(call(q), before)
        assert own.log.attention == 1
    torch.testing.assert_close(call(q), before)
    assert flex_attention.__code__ is code
    assert flex_attention.__kwdefaults__ == keywords
    assert not hasattr(flex_attention, "__signature__")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_over_whole_rows_may_do_anything() -> None:
    q = torch.randn(BATCH, HEADS, SIZE, 16)

    def capped(x: Tensor) -> Tensor:
        found: Tensor = flex_attention(x, x, x, score_mod=lambda s, b, h, q, k: s.tanh())
        return found

    before = capped(q)
    with in_use(), SLOT.activate(own := context()):
        torch.testing.assert_close(capped(q), before)
    assert own.log.attention == 1


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_flex_attention_in_compiled_code(call: Callable[[Tensor], Tensor]) -> None:
    """A graph of its own outside any context, and none within one."""
    q = torch.randn(BATCH, HEADS, SIZE, 16)
    with in_use():
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(call, backend="aot_eager")
        found = compiled(q)
        for _ in range(10):
            with SLOT.activate(context()):
                torch.testing.assert_close(compiled(q), found)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
        torch.testing.assert_close(compiled(q), found)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_flex_attention_in_one_graph(call: Callable[[Tensor], Tensor]) -> None:
    q = torch.randn(BATCH, HEADS, SIZE, 16)
    found = call(q)
    with in_use():
        whole = torch.compile(call, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(whole(q), found)
        with SLOT.activate(context()), pytest.raises(Unsupported, match="without fullgraph"):
            whole(q)


def _package(name: str, functions: tuple[str, ...]) -> Iterator[ModuleType]:
    """A module of this name with such functions, each of which doubles its first argument."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        module.__path__ = []
        yield module
    for function in functions:
        exec(f"def {function}(query, *rest, p=0.0): return query * 2", vars(module))


@contextmanager
def _present(name: str, functions: tuple[str, ...]) -> Iterator[ModuleType]:
    modules = list(_package(name, functions))
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setitem(sys.modules, module.__name__, module)
        yield modules[-1]


@pytest.mark.parametrize("name", LIBRARIES)
def test_functions_of_packages(name: str) -> None:
    names = LIBRARIES[name]
    with _present(name, names) as module:
        functions = [getattr(module, function) for function in names]
        with in_use(), SLOT.activate(context()):
            for function in functions:
                with pytest.raises(RefusedError, match=rf"{function.__name__} computes over"):
                    function(torch.ones(2))
        assert [function(1) for function in functions] == [2] * len(names)
        assert [function.__kwdefaults__ for function in functions] == [{"p": 0.0}] * len(names)


def test_flash_attn_without_registered_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_cp.swap.flash_attn.NAMESPACE", "flash_attn_of_old")
    with (
        _present("flash_attn.flash_attn_interface", WITHOUT_OPERATORS) as module,
        in_use(),
        SLOT.activate(context()),
    ):
        for name in WITHOUT_OPERATORS:
            with pytest.raises(RefusedError, match=rf"{name} computes over"):
                getattr(module, name)(torch.ones(2))


def test_packages_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIBRARIES:
        monkeypatch.setitem(sys.modules, name, None)
    with in_use():
        pass


def test_signatures_of_the_real_package() -> None:
    package = pytest.importorskip("flash_attn")
    for name, signature in flash_attn.SIGNATURES.items():
        assert str(inspect.signature(getattr(package, name))) == signature
    for name, schema in flash_attn.SCHEMAS.items():
        found = getattr(torch.ops.flash_attn, name).default._schema
        assert str(found) == f"flash_attn::{name}{schema}"


@pytest.mark.parametrize("name", flash_attn_later.SIGNATURES)
def test_signatures_of_later_packages(name: str) -> None:
    module = pytest.importorskip(name)
    for function, signature in flash_attn_later.SIGNATURES[name].items():
        given = inspect.signature(getattr(module, function)).parameters.values()
        plain = [x.replace(annotation=inspect.Parameter.empty) for x in given]
        assert function.endswith("cache") or str(inspect.Signature(plain)) == signature


def test_functions_of_version_4() -> None:
    module = pytest.importorskip(flash_attn_later.FOURTH)
    for name, signature in flash_attn_4_functions.SIGNATURES.items():
        given = inspect.signature(getattr(module, name)).parameters.values()
        plain = [x.replace(annotation=inspect.Parameter.empty) for x in given]
        assert str(inspect.Signature(plain)) == signature


def test_schemas_of_version_3() -> None:
    pytest.importorskip("flash_attn_interface")
    for name, schema in flash_attn_3_ops.SCHEMAS.items():
        found = getattr(torch.ops.flash_attn_3, name).default._schema
        assert str(found) == f"flash_attn_3::{name}{schema}"


def test_schemas_of_the_stand_in() -> None:
    with flash_attn.installed() as package:
        for name, signature in flash_attn.SIGNATURES.items():
            assert str(inspect.signature(getattr(package, name))) == signature
        q = torch.randn(2, 3, 1, 8, requires_grad=True)
        torch.library.opcheck(
            torch.ops.flash_attn._flash_attn_forward.default,
            (q.detach(), q.detach(), q.detach(), 0.0, 0.5, True, -1, -1, 0.0, None, False),
            test_utils=("test_schema", "test_faketensor"),
        )
