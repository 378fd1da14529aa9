"""The collate function that cuts after another: what moves with a batch, copies, failures."""

import copy
import pickle
from typing import Any

import torch
from torch.utils.data import default_collate

from lightning_cp.data.collate import ShardedBatch, Share, Uncut, WorkerCollate
from lightning_cp.data.cut import Rules
from lightning_cp.layout import LAYOUTS


class Moving:
    """No container and no tensor, but it moves."""

    def __init__(self, device: str = "cpu") -> None:
        self.device, self.pinned = device, False

    def to(self, device: Any) -> "Moving":
        return Moving(str(device))

    def pin_memory(self) -> "Moving":
        self.pinned = True
        return self


def share() -> Share:
    return Share(Rules(layout=LAYOUTS["zigzag"]), "zigzag", 1, 2)


def test_objects_that_move_do_so_with_their_batch():
    rows = {"input_ids": torch.arange(18).view(2, 9), "graph": Moving(), "names": ["a", "b"]}
    found = WorkerCollate(lambda samples: samples, share)(rows)
    assert isinstance(found, ShardedBatch)
    moved = found.to("meta")
    assert moved.batch["input_ids"].is_meta
    assert (moved.batch["graph"].device, moved.batch["names"]) == ("meta", ["a", "b"])
    assert found.batch["graph"].device == "cpu"


def test_a_copy_for_another_process_has_the_answer_of_that_moment():
    answers: list[Any] = [None]
    collate = WorkerCollate(default_collate, lambda: answers[-1])
    samples = [{"input_ids": torch.arange(9)} for _ in range(2)]
    whole = pickle.loads(pickle.dumps(collate))
    answers.append(share())
    cut = copy.deepcopy(collate)
    answers.append(None)
    assert isinstance(whole(samples), dict)
    assert isinstance(cut(samples), ShardedBatch)
    assert isinstance(collate(samples), dict)
    assert collate.__name__ == "default_collate"  # attributes are those of the user's function
    failed = cut([{"tokens": torch.ones(3)}])
    assert isinstance(failed, Uncut)
    assert "no field of the batch has a sequence dimension" in failed.reason
