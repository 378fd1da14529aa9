"""The window in which the next block is gathered, by predicted times."""

import pytest

from lightning_cp.balance import CostModel, gather_window

SECOND = CostModel(pair=14 * 4096, token=0, bandwidth=1.0)
"""One operation and one byte a second."""


@pytest.mark.parametrize(
    ("pairs", "tokens", "window"),
    [
        # Keys take 2 * 3 * 2 * 8 / 2 = 48 seconds on 8 tokens, the gather 100 * 2 * 3 / 4 = 150.
        (33, 8, "early"),  # 4 * 3 * 33 / 2 = 198
        (32, 8, "after_attention"),  # 192 < 198, linear layers 2 * 100 * 8 / 2 = 800
        (0, 2, "after_attention"),  # 200
        (0, 1, "fsdp"),  # 100
    ],
)
def test_by_hand(pairs: int, tokens: int, window: str) -> None:
    found = gather_window(
        tokens=tokens,
        pairs=pairs,
        width=3,
        parameters=100,
        itemsize=2,
        ranks=4,
        cp=2,
        cost=SECOND,
    )
    assert found == window


def test_long_rows_hide_a_gather_and_short_ones_do_not() -> None:
    layer = {"width": 4096, "parameters": 200_000_000, "itemsize": 2, "ranks": 16, "cp": 8}
    found = {n: gather_window(tokens=n, pairs=n * n // 2, **layer) for n in (2**12, 2**17, 2**20)}
    assert found == {2**12: "fsdp", 2**17: "after_attention", 2**20: "early"}
