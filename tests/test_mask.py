"""The mask, its definition and its rectangles against a dense boolean matrix."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from lightning_cp import attend
from lightning_cp.errors import BatchError, ContextParallelError
from lightning_cp.mask import Documents, Mask, Rect, Visibility, rows_of
from lightning_cp.spans import Span
from tests._harness.simulate import Bools, dense, masks

PAST = 2
"""Dummies after the last query and key that must see nothing and be seen by nobody."""

quick = settings(deadline=None, max_examples=100)


def extents(mask: Mask) -> tuple[int, int, int]:
    return (
        len(mask.keys or rows_of(mask.documents) or mask.prefix or (None,)),
        mask.q_length + PAST,
        mask.kv_length + PAST,
    )


def drawn(rows: str) -> Bools:
    return np.array([[mark == "x" for mark in line] for line in rows.split()])


@quick
@given(masks(max_length=20))
def test_visible_is_the_dense_matrix(mask: Mask) -> None:
    batch, q_size, kv_size = extents(mask)
    visible = [
        [[mask.visible(q, k, row=row) for k in range(kv_size)] for q in range(q_size)]
        for row in range(batch)
    ]
    assert np.array_equal(visible, dense(mask, extents(mask)))


@quick
@given(masks())
def test_rects_cover_the_dense_matrix_once(mask: Mask) -> None:
    batch, q_size, kv_size = extents(mask)
    expected = dense(mask, (batch, q_size, kv_size))
    for row in range(batch):
        rects = mask.rects(row if mask.rows != (None,) else None)
        counts = np.zeros((q_size, kv_size), np.int64)
        for rect in rects:
            q, k = np.arange(*rect.q)[:, None], np.arange(*rect.k)[None, :]
            low, high = rect.band or (-q_size, kv_size)
            seen = (k <= q) if rect.causal else (low <= k - q) & (k - q <= high)
            assert not (rect.causal and rect.band)
            assert seen.any(1).all() or rect.causal, f"{rect} has rows that see nothing"
            counts[q, k] += seen
        assert np.array_equal(counts, expected[row])
        spans = [rect.q for rect in rects]
        assert all(left[1] <= right[0] for left, right in pairwise(spans))
        assert all(start < stop for rect in rects for start, stop in (rect.q, rect.k))


@pytest.mark.parametrize(
    ("mask", "rows"),
    [
        (Mask.causal(3), "x.. xx. xxx"),
        (Mask.full(2), "xx xx"),
        (Mask.full(2, 3), "xxx xxx"),
        (Mask(2, 3), "x.. xx."),
        (Mask(3, 2), "x. xx xx"),
        (Mask.packed([0, 2, 3]), "x.. xx. ..x"),
        (Mask.packed([0, 0, 2, 2, 3], is_causal=False), "xx. xx. ..x"),
        (Mask(3, 3, keys=((1, 3),)), "... .x. .xx"),
        (Mask(3, 3, False, keys=((0, 2),)), "xx. xx. xx."),
        (Mask(3, 3, keys=((2, 2),)), "... ... ..."),
        (Mask(4, 4, window=(1, None)), "x... xx.. .xx. ..xx"),
        (Mask(4, 4, False, window=(1, 0)), "x... xx.. .xx. ..xx"),
        (Mask(4, 4, False, window=(0, 2)), "xxx. .xxx ..xx ...x"),
        (Mask(4, 4, False, window=(None, 1)), "xx.. xxx. xxxx xxxx"),
        (Mask(4, 4, False, window=(0, 0)), "x... .x.. ..x. ...x"),
        (Mask(4, 4, documents=(0, 1, 4), window=(1, 1)), "x... .x.. .xx. ..xx"),
        (Mask(4, 2, False, window=(1, 0)), "x. xx .x .."),
        (Mask(5, 5, chunk=2), "x.... xx... ..x.. ..xx. ....x"),
        (Mask(5, 5, False, chunk=3), "xxx.. xxx.. xxx.. ...xx ...xx"),
        (Mask(5, 5, False, keys=((1, 5),), chunk=2), "..... .xx.. .xx.. ...xx ...xx"),
        (Mask(5, 5, documents=(0, 3, 5), chunk=2), "x.... xx... ..x.. ...x. ...xx"),
        (
            Mask(6, 6, False, (0, 3, 6), ((2, 6),), chunk=2),
            "...... ...... ..x... ...xx. ...xx. .....x",
        ),
        (Mask(3, 5, False, chunk=2), "xx... xx... ..xx."),
        (Mask(4, 4, prefix=(2,)), "xx.. xx.. xxx. xxxx"),
        (Mask(2, 4, prefix=(3,)), "xxx. xxx."),
        (Mask(4, 4, documents=(0, 2, 4), prefix=(3,)), "xx.. xx.. ..x. ..xx"),
        (Mask(4, 4, window=(1, None), prefix=(3,)), "xxx. xxx. .xx. ..xx"),
        (Mask(4, 4, window=(None, 1), prefix=(4,)), "xx.. xxx. xxxx xxxx"),
        (Mask(4, 4, keys=((1, 4),), prefix=(3,)), ".xx. .xx. .xx. .xxx"),
        (Mask(4, 4, chunk=3, prefix=(2,)), "xx.. xx.. xxx. ...x"),
        (Mask(4, 4, keys=((1, 3),), window=(1, None)), ".... .x.. .xx. ..x."),
    ],
)
def test_small_masks_by_hand(mask: Mask, rows: str) -> None:
    expected = drawn(rows)
    found = [[mask.visible(q, k) for k in range(mask.kv_length)] for q in range(mask.q_length)]
    assert np.array_equal(found, expected)
    assert np.array_equal(dense(mask, (1, *expected.shape))[0], expected)


def test_nothing_outside_the_sequence_is_visible() -> None:
    mask = Mask.full(2, 3)
    assert mask.visible(1, 2)
    assert not any(mask.visible(q, k) for q, k in [(-1, 0), (0, -1), (2, 0), (0, 3)])


def test_rects_of_padded_documents() -> None:
    mask = Mask(9, 9, documents=(0, 4, 4, 5, 9), keys=((2, 7),))
    assert mask.rects() == (
        Rect((2, 4), (2, 4), True),
        Rect((4, 5), (4, 5), True),
        Rect((5, 9), (5, 7), True),
    )


def test_documents_of_every_row() -> None:
    mask = Mask(5, 5, documents=((0, 2, 5), (0, 5)), keys=((0, 5), (1, 4)))
    assert mask.edges(1) == (0, 5)
    assert mask.rects(0) == (Rect((0, 2), (0, 2), True), Rect((2, 5), (2, 5), True))
    assert mask.rects(1) == (Rect((1, 5), (1, 4), True),)
    assert not mask.visible(2, 1, row=0)
    assert mask.visible(2, 1, row=1)


@pytest.mark.parametrize(
    ("documents", "keys", "rows"),
    [
        ((0, 2, 4), None, (None,)),
        (((0, 2, 4), (0, 2, 4)), None, (None,)),
        (((0, 2, 4), (0, 4)), None, (0, 1)),
        (((0, 2, 4), (0, 4)), ((1, 4), (1, 4)), (0, 1)),
        (((0, 4), (0, 4)), ((1, 4), (0, 4)), (0, 1)),
    ],
)
def test_rows_are_told_apart_where_their_documents_differ(
    documents: Documents, keys: tuple[Span, ...] | None, rows: tuple[int | None, ...]
) -> None:
    assert Mask(4, 4, documents=documents, keys=keys).rows == rows


def test_documents_and_keys_of_other_numbers_of_rows_are_refused() -> None:
    with pytest.raises(BatchError, match=r"documents of 2 and visible keys of 3"):
        Mask(4, 4, documents=((0, 4), (0, 2, 4)), keys=((0, 4),) * 3)
    with pytest.raises(BatchError, match=r"edges \(0, 3\) must rise from 0 to .* length 4"):
        Mask(4, 4, documents=((0, 4), (0, 3)))


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        (None, (None,)),
        ((), (None,)),
        (((1, 3),), (None,)),
        (((1, 3), (1, 3)), (None,)),
        (((1, 3), (0, 3)), (0, 1)),
        (((1, 3), (0, 3), (1, 3)), (0, 1, 2)),
    ],
)
def test_rows_are_told_apart_only_where_they_differ(
    keys: tuple[Span, ...] | None, rows: tuple[int | None, ...]
) -> None:
    assert Mask(4, 4, keys=keys).rows == rows


def test_constructors() -> None:
    cu_seqlens: Any = torch.tensor([0, 2, 5], dtype=torch.int32)
    assert Mask.causal(5) == Mask(5, 5, True)
    assert Mask.full(5) == Mask(5, 5, False)
    assert Mask.full(5, 0) == Mask(5, 0, False)
    assert Mask.packed(cu_seqlens) == Mask(5, 5, True, (0, 2, 5))
    assert Mask.packed([0, 5], is_causal=False).is_causal is False
    assert len({Mask.causal(5), Mask(5, 5), Mask.packed([0, 5])}) == 2


@pytest.mark.parametrize(
    ("q_length", "kv_length", "documents", "numbers"),
    [
        (5, 5, (), ["()", "length 5", "edge None"]),
        (5, 5, (1, 5), ["(1, 5)", "length 5"]),
        (5, 5, (0, 4), ["(0, 4)", "length 5", "last edge 4"]),
        (5, 5, (0, 6), ["(0, 6)", "length 5", "last edge 6"]),
        (5, 5, (0, 3, 2, 5), ["(0, 3, 2, 5)", "rise from 0"]),
        (5, 7, (0, 5), ["length 5", "7 keys"]),
        (5, 5, (0, *range(9)), ["(0, 0, 1, 2, 3, 4, 5, 6)...", "last edge 8"]),
    ],
)
def test_documents_that_do_not_fit_are_refused(
    q_length: int, kv_length: int, documents: tuple[int, ...], numbers: list[str]
) -> None:
    with pytest.raises(BatchError) as caught:
        Mask(q_length, kv_length, documents=documents)
    assert all(number in str(caught.value) for number in numbers)
    assert "cumulative lengths" in str(caught.value)


def test_no_documents_at_all_are_refused() -> None:
    with pytest.raises(BatchError, match="must rise from 0"):
        Mask.packed([])


@pytest.mark.parametrize("span", [(-1, 3), (0, 6), (3, 2), (6, 6)])
def test_keys_outside_the_sequence_are_refused(span: Span) -> None:
    with pytest.raises(BatchError, match=rf"{span[0]}\.\.{span[1]} of batch row 1 .* 0\.\.5"):
        Mask(5, 5, keys=((0, 5), span))


def test_batch_error_is_a_value_error_of_the_package() -> None:
    assert issubclass(BatchError, ValueError)
    assert issubclass(BatchError, ContextParallelError)


@pytest.mark.parametrize(
    "window", [(-1, None), (0, -2), 3, (1,), (1, 2, 3), ("a", None), (1.5, None), (True, 0)]
)
def test_what_is_no_window_is_refused(window: Any) -> None:
    with pytest.raises(BatchError, match=r"must be \(left, right\)"):
        Mask(4, 4, window=window)
    q = torch.zeros(1, 1, 4, 2)
    with pytest.raises(BatchError, match=r"must be \(left, right\)"):
        attend(q, q, q, window=window)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"chunk": 0}, "chunk=0 must be a positive integer"),
        ({"chunk": True}, "chunk=True must be a positive integer"),
        ({"prefix": ()}, r"prefix=\(\) must be a tuple"),
        ({"prefix": (3, -1)}, r"prefix=\(3, -1\) must be a tuple"),
        ({"prefix": (None,)}, "must be a tuple of integers"),
        ({"prefix": (2,), "is_causal": False}, "no effect without is_causal=True"),
    ],
)
def test_what_is_no_chunk_or_prefix_is_refused(asked: dict[str, Any], message: str) -> None:
    q = torch.zeros(1, 1, 4, 2)
    with pytest.raises(BatchError, match=message):
        Visibility(**asked)
    with pytest.raises(BatchError, match=message):
        Mask(4, 4, **asked)
    with pytest.raises(BatchError, match=message):
        attend(q, q, q, **{"is_causal": True, **asked})


def test_prefixes_of_other_numbers_of_rows_are_refused() -> None:
    q = torch.zeros(3, 1, 4, 2)
    with pytest.raises(BatchError, match=r"prefixes of 2 batch rows for .* 3 rows"):
        attend(q, q, q, is_causal=True, prefix=(1, 2))
    with pytest.raises(BatchError, match="visible keys of 3 and prefixes of 2"):
        Mask(4, 4, keys=((0, 4),) * 3, prefix=(1, 2))
