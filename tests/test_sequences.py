"""Batches of several named sequences: what belongs to which, how they are cut and told apart."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cp.config import Config
from lightning_cp.context import Context, mask_of
from lightning_cp.data import Cut, find_fields
from lightning_cp.data.apart import Sizes, told_apart
from lightning_cp.data.collate import Share, planned
from lightning_cp.data.cut import Rules
from lightning_cp.data.valid import valid_tokens
from lightning_cp.errors import BatchError, ConfigError, RefusedError
from lightning_cp.layout import contiguous, zigzag
from lightning_cp.mask import Visibility
from lightning_cp.sequences import Sequence, plan_key
from tests._harness.cuts import BATCH, parts, tokens

FULL, CAUSAL = Visibility(is_causal=False), Visibility()
TARGET: dict[str, Any] = {"tgt": ("target", 1), "goal": ("target", 1)}


def two(source: int, target: int) -> dict[str, Tensor]:
    """A source, and a target with labels, `[B, S]` and `[B, T]`."""
    return {"input_ids": tokens(source), "tgt": tokens(target), "goal": -tokens(target)}


def context_of(part: Cut, rank: int, world: int) -> Context:
    return Context(
        rank=rank,
        world=world,
        group=None,
        meta=None,
        sequences=part.sequences,
        whole=part.whole,
        exchange="direct",
    )


def put_together(found: list[Cut], field: str, sequence: str) -> Tensor:
    """A field of all ranks as whole rows."""
    of = found[0].sequences[sequence]
    joined = of.layout.unshard([part.batch[field] for part in found], dim=1)
    return joined.narrow(1, 0, of.length)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
def test_every_sequence_is_cut_by_its_own_length(world: int, layout: str) -> None:
    for source in range(1, 14):
        for target in range(1, 14):
            batch = two(source, target)
            if source == target:
                batch["attention_mask"] = torch.ones(BATCH, source, dtype=torch.int64)
                batch["attention_mask"][0, 0] = 0
            found = parts(batch, world, layout=layout, sequence_dims=TARGET)
            first, second = (found[0].sequences[name].layout for name in ("sequence", "target"))
            for one, other in zip(first.sizes, second.sizes, strict=True):
                assert abs(one - other) > 1, (source, target, first.sizes, second.sizes)
            for name, of in (("input_ids", "sequence"), ("tgt", "target"), ("goal", "target")):
                assert torch.equal(put_together(found, name, of), batch[name])


def test_sequences_that_are_equal_stay_as_they_are() -> None:
    part = parts(two(9, 9), 2, sequence_dims=TARGET)[0]
    assert part.sequences["sequence"] == part.sequences["target"]
    assert part.sequence.layout.length == 9
    assert context_of(part, 0, 2).sequence_of(5) == part.sequence


def test_dummies_that_tell_apart_keep_the_multiple() -> None:
    found = parts(two(16, 15), 2, sequence_dims=TARGET, pad_to_multiple_of=8)[0].sequences
    assert [x.layout.length for x in found.values()] == [16, 24]
    assert sorted(found["target"].layout.sizes) == [12, 12]


@pytest.mark.parametrize("make", [contiguous, zigzag])
def test_no_size_of_other_rows_is_the_same(make: Any) -> None:
    others = [Sizes(make(length, 3).sizes, batch) for length, batch in ((12, 2), (30, 3), (5, 1))]
    for length in range(40):
        for batch in (1, 2, 3, 6):
            found = told_apart(make(length, 3), batch, others, multiple=1)
            assert found.length - length < 60
            for other in others:
                for size, share in zip(found.sizes, other.shares, strict=True):
                    assert abs(size - share) > 1
                    assert size * batch != share * other.batch


def test_fields_of_decoders_are_a_sequence_with_their_labels() -> None:
    batch = {"input_ids": tokens(9), "labels": tokens(5), "attention_mask": tokens(9)}
    decoded = {**batch, "decoder_input_ids": tokens(5)}
    found = find_fields(decoded, None)
    assert found["sequence"].dims == {"input_ids": 1, "attention_mask": 1}
    assert found["decoder"].dims == {"labels": 1, "decoder_input_ids": 1}
    named = find_fields(decoded, {"decoder_input_ids": ("tgt", 1)})
    assert named["tgt"].dims == {"decoder_input_ids": 1, "labels": 1}
    assert find_fields(batch, None, decodes=True)["decoder"].dims == {"labels": 1}
    with pytest.raises(BatchError, match=r"different lengths .* \('target', 1\)"):
        find_fields(batch, None)
    own = find_fields(decoded, {"decoder_input_ids": None, "labels": ("x", 1)})
    assert list(own) == ["sequence", "x"]


def test_the_sequence_without_a_name_comes_first() -> None:
    batch = {"tgt": tokens(4), "input_ids": tokens(9)}
    assert list(find_fields(batch, {"tgt": ("target", 1)})) == ["sequence", "target"]
    both = {"b": tokens(4), "a": tokens(9)}
    assert list(find_fields(both, {"a": ("x", 1), "b": ("y", 1)})) == ["y", "x"]


def test_masks_positions_and_labels_are_found_by_the_end_of_their_names() -> None:
    mask = torch.ones(BATCH, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    starts = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 4]])
    batch = {
        "input_ids": tokens(9),
        "tgt": tokens(6),
        "tgt_attention_mask": mask,
        "tgt_position_ids": starts,
        "tgt_labels": tokens(6),
    }
    dims: dict[str, Any] = {name: ("tgt", 1) for name in batch if name.startswith("tgt")}
    part = parts(batch, 4, sequence_dims=dims, documents="position_ids")[3]
    target = part.sequences["tgt"]
    assert target.keys == ((0, 6), (0, 4))
    assert target.documents == ((0, 3, 6), (0, 1, 6))
    assert part.sequence.documents is None
    assert part.sequence.keys is None
    dummies = ~target.real(3)
    assert dummies.any()
    assert (part.batch["tgt_labels"][:, dummies] == -100).all()
    assert (part.batch["tgt"][:, dummies] == 0).all()


def test_nested_batches_get_positions_of_each_sequence() -> None:
    batch = {"a": {"input_ids": tokens(9)}, "b": {"input_ids": tokens(5)}}
    dims: dict[str, Any] = {f"{name}.input_ids": (name, 1) for name in batch}
    found = parts(batch, 2, sequence_dims=dims, takes_positions=True)
    assert found[0].added == ("a.position_ids", "b.position_ids")
    for rank, part in enumerate(found):
        for name in batch:
            places = part.sequences[name].layout.positions(rank)
            assert torch.equal(part.batch[name]["position_ids"], places.expand(BATCH, -1))


def test_the_decoder_of_a_flat_batch_gets_no_positions() -> None:
    batch = {"input_ids": tokens(9), "decoder_input_ids": tokens(5)}
    assert parts(batch, takes_positions=True)[0].added == ("position_ids",)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_keys_that_every_rank_holds(world: int) -> None:
    frames = torch.randn(BATCH, 7, 3)
    mask = torch.ones(BATCH, 7, dtype=torch.int64)
    mask[0, 5:] = 0
    batch = {"input_ids": tokens(5), "frames": frames, "frames_attention_mask": mask}
    dims: dict[str, Any] = {name: ("frames", 1, "whole") for name in batch if name != "input_ids"}
    seen = []
    for rank, part in enumerate(parts(batch, world, sequence_dims=dims)):
        assert part.batch["frames"] is frames
        assert list(part.sequences) == ["sequence"]
        context = context_of(part, rank, world)
        share = part.sequence.layout.size(rank)
        assert share != 7
        assert context.held(7) == part.whole["frames"]
        key = plan_key(
            context.held(share),
            context.held(7),
            mask_of(context.held(share), context.held(7), FULL),
            rank=rank,
            exchange="direct",
        )
        plan = key.build()
        assert all(not step.sends and not step.receives for step in plan.rounds)
        seen.append((plan.work(BATCH), int(part.sequence.real(rank).sum())))
        with pytest.raises(RefusedError, match="no declared sequence's share"):
            context.sequence_of(7)
        with pytest.raises(RefusedError, match="7 queries that every rank holds whole"):
            context.handle(BATCH, 7, share, FULL)
    assert [work for work, _ in seen] == [real * (5 + 7) for _, real in seen]


def test_documents_of_two_sequences_do_not_mix_in_silence() -> None:
    layout = contiguous(8, 2)
    packed = Sequence(layout=layout, length=8, batch=1, documents=(0, 3, 8))
    plain = Sequence(layout=contiguous(6, 2), length=6, batch=1)
    for pair in ((packed, plain), (plain, packed)):
        with pytest.raises(RefusedError, match="which documents belong together is not known"):
            mask_of(*pair, FULL)
    assert mask_of(packed, replace(packed), FULL).documents == (0, 3, 8)
    loose = replace(packed, as_transformers=True)
    assert mask_of(plain, loose, FULL).documents is None


def test_workers_plan_the_calls_between_sequences() -> None:
    rules = Rules(layout="zigzag", sequence_dims=TARGET)
    part = parts(two(9, 5), 2, layout="zigzag", sequence_dims=TARGET)[1]
    context = context_of(part, 1, 2)
    sizes = [part.sequences[name].layout.size(1) for name in ("sequence", "target")]
    context.handle(BATCH, sizes[0], sizes[0], FULL)
    context.handle(BATCH, sizes[1], sizes[1], CAUSAL)
    context.handle(BATCH, sizes[1], sizes[0], FULL)
    calls = tuple((call, tuple(pairs)) for call, pairs in context.log.seen.items())
    plans = planned(part.sequences, Share(rules, 1, 2, calls), "direct")
    assert plans.keys() == set(context.log.plans.values())
    assert len(plans) == 3
    gone = Share(rules, 1, 2, ((CAUSAL, (("sequence", "absent"),)),))
    assert planned(part.sequences, gone, "direct") == {}


def test_tokens_that_count_are_those_of_the_labelled_sequence() -> None:
    batch = {"input_ids": tokens(9), "decoder_input_ids": tokens(5), "labels": tokens(5)}
    batch["labels"][0, 3] = -100
    counts = [valid_tokens(x, rank=rank) for rank, x in enumerate(parts(batch, 3))]
    assert sum(counts) == 2 * 5 - 1
    unlabelled = {"input_ids": tokens(9), "decoder_input_ids": tokens(5)}
    masked = {**unlabelled, "attention_mask": torch.ones(BATCH, 9)}
    for case in (unlabelled, masked):
        with pytest.raises(RefusedError, match="the sequences sequence, decoder"):
            valid_tokens(parts(case)[0], rank=0)


@pytest.mark.parametrize(
    "dims",
    [
        {"a": ("x",)},
        {"a": ("", 1)},
        {"a": (1, "x")},
        {"a": ("x", True)},
        {"a": ("x", 1, "cut")},
        {"a": ("x", 1, "whole", 2)},
        {"a": "x"},
        {"a": ("x", 1), "b": ("x", 1, "whole")},
    ],
)
def test_declarations_that_mean_nothing(dims: Any) -> None:
    with pytest.raises(ConfigError, match="sequence_dims="):
        Config(sequence_dims=dims)


def test_declarations_from_a_file_are_lists() -> None:
    dims: Any = {"tgt": ["target", -1], "image": ["image", 1, "whole"]}
    Config(sequence_dims=dims)
    batch = {"input_ids": tokens(9), "tgt": tokens(5), "image": torch.zeros(BATCH, 4, 3)}
    part = parts(batch, sequence_dims=dims)[0]
    assert (list(part.sequences), list(part.whole)) == (["sequence", "target"], ["image"])


def test_only_whole_sequences_leave_nothing_to_cut() -> None:
    with pytest.raises(BatchError, match="no field of the batch has a sequence dimension"):
        parts({"image": torch.zeros(BATCH, 4)}, sequence_dims={"image": ("image", 1, "whole")})
