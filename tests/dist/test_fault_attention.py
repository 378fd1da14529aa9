"""Faults of packed rows, padding and positions that people met: the smallest input of each.

What is right is a document, or the real tokens of a row, on their own in one process in double.
"""

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_cp import functional
from lightning_cp.comm.failure import forget
from lightning_cp.errors import ContextParallelError
from lightning_cp.layout import LAYOUTS
from tests._harness import hf
from tests._harness.group import grads_of, one_group
from tests._harness.parts import WIDTH, Attention, made
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist

VOCABULARY, IGNORED = 256, -100
NAN = float("nan")
Batch = dict[str, Tensor]


def ids(length: int = 8) -> Tensor:
    """Tokens `[1, S]`."""
    return hf.tokens(1, length)


class Raw(nn.Module):
    """Two layers of causal attention over tokens and positions of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.seen: Tensor | None = None

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Logits `[B, S, V]`."""
        self.seen = position_ids
        x = self.tokens(input_ids) + self.places(position_ids)
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.head(x)
        return logits


class Llama(nn.Module):
    """A model of transformers that keeps documents apart; sees which positions its RoPE uses."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = hf.build("llama", use_cache=False)
        self.model.model.rotary_emb.register_forward_pre_hook(self._look, with_kwargs=True)
        self.seen: Tensor | None = None

    def _look(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.seen = kwargs["position_ids"] if "position_ids" in kwargs else args[1]

    def forward(self, **batch: Tensor) -> Tensor:
        """Logits `[B, S, V]`."""
        with hf.in_double():
            logits: Tensor = self.model(**batch).logits
        return logits


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "raw": (made(Raw), "position_ids"),
    "llama": (Llama, "auto"),
    "llama, declared": (Llama, "position_ids"),
}
"""Builder of a model, and the rule about documents that it is run with."""


def restarting(*lengths: int) -> Tensor:
    """Positions of packed documents `[1, S]`."""
    return torch.cat([torch.arange(size) for size in lengths])[None]


class Packed(NamedTuple):
    """Whole logits, those after each document in turn was changed, and positions of this rank."""

    logits: Tensor
    changed: list[Tensor]
    positions: Tensor


def run_packed(rank: int, world: int, name: str, layout: str, packs: list[Any]) -> bytes:
    make, documents = MODELS[name]
    model, found = make(), []
    with one_group(rank, world, layout=layout, documents=documents) as context, torch.no_grad():
        for lengths in packs:
            logits = []
            for part in (torch.empty(0).long(), *torch.arange(8).split(lengths)):
                tokens = ids()
                tokens[:, part] = (tokens[:, part] + 7) % VOCABULARY
                batch = {"input_ids": tokens, "position_ids": restarting(*lengths)}
                shard = context.shard(batch, module=model)
                with context.active(shard):
                    out = model(**shard.batch)
                context.check(shard, None)
                logits.append(context.unshard(out, shard))
            found.append(Packed(logits[0], logits[1:], model.seen))
    return pickle.dumps(found)


PACKS = [(3, 5), (1, 2, 5), (8,)]
PLACES = [
    *((world, layout, "raw") for world in (2, 3) for layout in LAYOUTS),
    (2, "zigzag", "llama"),
    (3, "contiguous", "llama"),
    (2, "contiguous", "llama, declared"),
]


@pytest.mark.parametrize(("world", "layout", "name"), PLACES)
def test_packed_documents_never_meet(world: int, layout: str, name: str, pool: Pool) -> None:
    """Each is what it is on its own, and does not move at all when another one changes."""
    ranks = [pickle.loads(x) for x in pool.run(run_packed, name, layout, PACKS, world=world)]
    model, places = MODELS[name][0](), LAYOUTS[layout](8, world)
    for number, lengths in enumerate(PACKS):
        found = [packs[number] for packs in ranks]
        for rank, one in enumerate(found):
            own = restarting(*lengths)[:, places.positions(rank)]
            assert torch.equal(one.positions, own), f"rank {rank}: positions are overwritten"
        for document, part in enumerate(torch.arange(8).split(lengths)):
            with torch.no_grad():
                alone = model(input_ids=ids()[:, part], position_ids=torch.arange(len(part))[None])
            for rank, one in enumerate(found):
                where = f"rank {rank}: document {document} of {lengths}"
                off = (one.logits[:, part] - alone).abs().max()
                assert off < 1e-12 * alone.abs().max(), f"{where} is off by {off}"
                for other, after in enumerate(one.changed):
                    same = torch.equal(after[:, part], one.logits[:, part])
                    assert same == (other != document), f"{where}, after a change in {other}"


class Padded(NamedTuple):
    """Rows of 8 tokens of which so many are real, at one end; and options."""

    lengths: tuple[int, ...]
    left: bool
    exchange: str
    layout: str

    def real(self) -> Tensor:
        """Which tokens are real: bool `[B, 8]`."""
        rows = torch.arange(8) < torch.tensor(self.lengths)[:, None]
        return rows.flip(1) if self.left else rows

    def batch(self, filling: float) -> Batch:
        """Embeddings with `filling` where padding is, mask and labels."""
        generator = torch.Generator().manual_seed(3)
        shape = (len(self.lengths), 8, WIDTH)
        embeds = torch.randn(shape, generator=generator, dtype=torch.float64)
        labels = torch.arange(len(self.lengths) * 8).view(-1, 8) % WIDTH
        return {
            "inputs_embeds": torch.where(self.real()[..., None], embeds, filling),
            "attention_mask": self.real().long(),
            "labels": torch.where(self.real(), labels, IGNORED),
        }


PADDED: dict[tuple[str, str], list[tuple[tuple[int, ...], bool]]] = {
    # Of two real tokens zigzag gives the second of two ranks none.
    ("ring", "zigzag"): [((5, 8), False), ((5, 8), True), ((2, 2), False)],
    ("ring", "contiguous"): [((7, 7), False), ((2, 2), True)],
    ("allgather", "zigzag"): [((5, 8), True)],
    ("allgather", "contiguous"): [((1, 2), False)],
}
"""By exchange and layout: numbers of real tokens of rows of 8, and whether padding is on the left.
"""

FILLINGS = (0.0, 1e30, NAN)


def stack() -> nn.Module:
    """Two layers of causal attention over embeddings, told nothing of padding."""
    return nn.Sequential(Attention(), Attention())


def run_padded(rank: int, world: int, rows: list[Padded]) -> bytes:
    """Loss, whole logits and gradients for every batch and filling; they have the same options."""
    found = {}
    with one_group(rank, world, layout=rows[0].layout, exchange=rows[0].exchange) as context:
        for padded in rows:
            for filling in FILLINGS:
                model = made(stack)()
                shard = context.shard(padded.batch(filling), module=model)
                with context.active(shard):
                    logits = model(shard.batch["inputs_embeds"])
                    loss = F.cross_entropy(logits.mT, shard.batch["labels"])
                    loss.backward()
                whole = context.unshard(logits, shard)
                found[padded, str(filling)] = (loss.item(), whole, grads_of(model))
    return pickle.dumps(found)


@pytest.mark.parametrize("options", list(PADDED))
@pytest.mark.parametrize("world", [2, 3])
def test_what_lies_in_padding_has_no_effect(
    world: int, options: tuple[str, str], pool: Pool
) -> None:
    """Rows of 5 and 8 tokens, and ranks that hold padding alone."""
    rows = [Padded(lengths, left, *options) for lengths, left in PADDED[options]]
    ranks = [pickle.loads(x) for x in pool.run(run_padded, rows, world=world)]
    for padded in rows:
        model, real, batch = made(stack)(), padded.real(), padded.batch(0.0)
        tokens = [x[keep][None] for x, keep in zip(batch["inputs_embeds"], real, strict=True)]
        logits = torch.cat([model(row)[0] for row in tokens])
        loss = F.cross_entropy(logits, batch["labels"][real])
        loss.backward()
        for filling in map(str, FILLINGS):
            shards = [found[padded, filling] for found in ranks]
            for rank, (got, whole, _) in enumerate(shards):
                where = f"rank {rank}: {padded} with {filling}"
                assert got == pytest.approx(loss.item(), rel=1e-12), where
                torch.testing.assert_close(whole[real], logits.detach(), rtol=1e-12, atol=1e-12)
                assert torch.equal(whole[real], ranks[0][padded, "0.0"][1][real]), where
            for name, grad in grads_of(model).items():
                mean = sum(grads[name] for *_, grads in shards) / world
                # NaN times a gradient of 0 is NaN on one device too.
                close = torch.allclose(mean, grad, rtol=1e-11, atol=1e-12)
                assert close or filling == "nan", f"{padded} with {filling}: {name}"


class Crossing(nn.Module):
    """Tokens of a row look at a memory that every rank has whole."""

    def __init__(self, local: bool) -> None:
        super().__init__()
        self.local = local

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """`[B, S, C]` and `[B, M, C]` to `[B, S, C]`."""
        q, k = x[:, None], memory[:, None]
        if not self.local:
            return F.scaled_dot_product_attention(q, k, k)[:, 0]
        with functional.local():
            return F.scaled_dot_product_attention(q, k, k)[:, 0]


def crossing() -> tuple[Batch, Tensor]:
    """Eight tokens and a memory of five."""
    embeds, memory = (
        torch.arange(float(size * WIDTH), dtype=torch.float64).view(1, size, WIDTH).cos()
        for size in (8, 5)
    )
    return {"inputs_embeds": embeds}, memory


def run_crossing(rank: int, world: int) -> bytes:
    """The refusal, and what it says to do."""
    batch, memory = crossing()
    with one_group(rank, world) as context:
        shard = context.shard(batch)
        said = "nothing"
        try:
            with context.active(shard):
                Crossing(local=False)(shard.batch["inputs_embeds"], memory)
        except ContextParallelError as error:
            said = str(error)
        torch.distributed.barrier()
        forget()
        shard = context.shard(batch)
        with context.active(shard):
            out = Crossing(local=True)(shard.batch["inputs_embeds"], memory)
        return pickle.dumps((said, context.unshard(out, shard)))


@pytest.mark.parametrize("world", [2, 3])
def test_a_memory_that_every_rank_has_whole_is_not_taken_for_a_share(
    world: int, pool: Pool
) -> None:
    batch, memory = crossing()
    expected = Crossing(local=True)(batch["inputs_embeds"], memory)
    for said, out in map(pickle.loads, pool.run(run_crossing, world=world)):
        assert "5 tokens are no declared sequence's share on this rank" in said
        assert "functional.local()" in said
        torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)


class Dropping(nn.Module):
    """Attention that drops weights in training."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Logits `[B, S, V]`, the same at every rate in eval mode."""
        q = F.one_hot(input_ids, VOCABULARY).double()[:, None] / 2
        return F.scaled_dot_product_attention(
            q, q, q, dropout_p=0.5 * self.training, is_causal=True
        )[:, 0]


class DroppingLlama(Llama):
    """The same, as an option of a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = hf.build("llama", attention_dropout=0.5)


DROPPING: list[Callable[[], nn.Module]] = [Dropping, DroppingLlama]


def run_dropout(rank: int, world: int) -> bytes:
    """What training says, and logits in eval mode."""
    found = []
    for make in DROPPING:
        with one_group(rank, world) as context:
            model, said = make(), "nothing"
            shard = context.shard({"input_ids": ids(7)}, module=model)
            try:
                with context.active(shard):
                    model(**shard.batch)
            except ContextParallelError as error:
                said = str(error)
            torch.distributed.barrier()
            forget()
            model.eval()
            shard = context.shard({"input_ids": ids(7)}, module=model, stage="validate")
            with context.active(shard), torch.no_grad():
                logits = model(**shard.batch)
            found.append((said, context.unshard(logits, shard)))
    return pickle.dumps(found)


@pytest.mark.parametrize("world", [2, 3])
def test_attention_dropout_is_refused_in_training_and_off_in_eval(world: int, pool: Pool) -> None:
    ranks = [pickle.loads(x) for x in pool.run(run_dropout, world=world)]
    for number, make in enumerate(DROPPING):
        with torch.no_grad():
            expected = make().eval()(input_ids=ids(7))
        for said, logits in (found[number] for found in ranks):
            assert "dropout of 0.5 in training" in said, said
            torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
