"""Faults of batches that are cut along the sequence: the smallest input of each, and what is right.

Token 0, 1, ... of a row is cut for every rank in one process; nothing is communicated.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_cp.data import Cut, cut
from lightning_cp.data.cut import Rules
from lightning_cp.data.valid import valid_tokens
from lightning_cp.layout import LAYOUTS
from lightning_cp.mask import Mask
from tests._harness.simulate import dense


def shards(batch: Any, world: int = 2, layout: str = "zigzag", **rules: Any) -> list[Cut]:
    """What every rank keeps of a batch."""
    chosen = Rules(layout=layout, **rules)
    return [cut(batch, chosen, rank=rank, world=world) for rank in range(world)]


def restarting(*lengths: int) -> Tensor:
    """Positions of packed documents `[1, S]`."""
    return torch.cat([torch.arange(size) for size in lengths])[None]


def test_the_last_real_token_of_a_padded_row_counts() -> None:
    """Seven tokens and one of padding: half of a row on each of two ranks is not three each."""
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]])
    for layout, counts in (("zigzag", [3.0, 4.0]), ("contiguous", [4.0, 3.0])):
        found = shards({"input_ids": mask.cumsum(1), "attention_mask": mask}, layout=layout)
        assert [valid_tokens(part, rank=rank) for rank, part in enumerate(found)] == counts
        visible = [part.sequence.visible_keys(rank).sum() for rank, part in enumerate(found)]
        assert [int(number) for number in visible] == counts
    filled = shards({"input_ids": mask[:, :7]}, pad_to_multiple_of=4)
    assert [int(part.sequence.real(rank).sum()) for rank, part in enumerate(filled)] == [3, 4]


@pytest.mark.parametrize("causal", [False, True])
def test_documents_without_a_token_change_nothing(causal: bool) -> None:
    empty = Mask.packed([0, 0, 4, 4, 8, 8], is_causal=causal)
    plain = Mask.packed([0, 4, 8], is_causal=causal)
    assert empty.rects() == plain.rects()
    assert np.array_equal(dense(empty, (1, 8, 8)), dense(plain, (1, 8, 8)))


@pytest.mark.parametrize(
    ("lengths", "edges"),
    [((3, 5), (0, 3, 8)), ((1, 2, 5), (0, 1, 3, 8)), ((3, 2, 3), (0, 3, 5, 8)), ((8,), None)],
)
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("world", [2, 3])
def test_documents_are_those_of_the_whole_row_on_every_rank(
    world: int, layout: str, lengths: tuple[int, ...], edges: tuple[int, ...] | None
) -> None:
    """Neither a cut between ranks nor a share that starts at position 4 begins a document."""
    positions = restarting(*lengths)
    batch = {"input_ids": torch.arange(8)[None], "position_ids": positions}
    for part in shards(batch, world, layout, documents="position_ids"):
        assert part.sequence.documents == edges


@pytest.mark.parametrize("takes_positions", [False, True])
def test_positions_of_the_batch_are_never_overwritten(takes_positions: bool) -> None:
    """Each token keeps its own position within its document, wherever it lies."""
    batch = {"input_ids": torch.arange(8)[None], "position_ids": restarting(4, 4)}
    found = shards(batch, documents="position_ids", takes_positions=takes_positions)
    assert [part.batch["position_ids"].tolist() for part in found] == [
        [[0, 1, 2, 3]],
        [[2, 3, 0, 1]],
    ]
    assert [part.batch["input_ids"].tolist() for part in found] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    assert all(not part.added for part in found)


def test_positions_that_are_added_are_global() -> None:
    found = shards({"input_ids": torch.arange(8)[None]}, takes_positions=True)
    assert [part.batch["position_ids"].tolist() for part in found] == [
        [[0, 1, 6, 7]],
        [[2, 3, 4, 5]],
    ]


@pytest.mark.parametrize("multiple", [None, 6])
@pytest.mark.parametrize("world", [2, 3])
def test_other_fields_of_a_token_travel_with_it(world: int, multiple: int | None) -> None:
    """Two documents, a mask of tokens `[S]` and features of tokens `[S, D]`."""
    ids = torch.arange(1, 9)
    batch = {
        "input_ids": ids[None],
        "labels": ids[None] * 10,
        "position_ids": restarting(3, 5),
        "is_image": ids % 3 == 0,
        "features": ids[:, None] * torch.tensor([1.0, -1.0]),
        "shift_labels": ids[None] * 100,
        "loss_mask": ids[None] / 2,
    }
    dims = {"is_image": 0, "features": 0}
    rules = {"documents": "position_ids", "pad_to_multiple_of": multiple, "sequence_dims": dims}
    for rank, part in enumerate(shards(batch, world, **rules)):
        real = part.sequence.real(rank)
        own = part.batch["input_ids"][0, real]
        assert (part.batch["labels"][0, real] == own * 10).all()
        assert (part.batch["shift_labels"][0, real] == own * 100).all()
        assert (part.batch["loss_mask"][0, real] == own / 2).all()
        assert (part.batch["position_ids"][0, real] == restarting(3, 5)[0, own - 1]).all()
        assert (part.batch["is_image"][real] == (own % 3 == 0)).all()
        assert (part.batch["features"][real, 0] == own).all()
        assert (part.batch["features"][real, 1] == -own).all()
        assert part.sequence.documents == (0, 3, 8)
        filled = {name: part.batch[name][..., ~real] for name in ("labels", "shift_labels")}
        assert all((x == -100).all() for x in filled.values())
        assert not part.batch["loss_mask"][:, ~real].any()
        assert not part.batch["is_image"][~real].any()


def test_every_label_of_a_response_is_found_by_its_position() -> None:
    """A prompt of 5 and a response of 3: zigzag gives rank 0 the end of the response alone."""
    labels = torch.tensor([[-100] * 5 + [5, 6, 7]])
    found = shards({"input_ids": torch.arange(8)[None], "labels": labels})
    assert [part.batch["labels"].tolist() for part in found] == [
        [[-100, -100, 6, 7]],
        [[-100, -100, -100, 5]],
    ]
    assert [valid_tokens(part, rank=rank) for rank, part in enumerate(found)] == [2.0, 1.0]
