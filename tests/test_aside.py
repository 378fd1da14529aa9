"""Checkpoints that are written aside: what a crash at any moment leaves can be read."""

import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_cp.plugin import aside
from lightning_cp.plugin.aside import WritesAside, growing, newest, put, swapped
from tests._harness.grid import rare


class Aside(WritesAside, TorchCheckpointIO):
    """As the strategy makes it."""


class Crash(BaseException):
    """Stands for the end of the process."""


def content(path: Path) -> dict[str, str]:
    """Names and contents of a folder, or the one content of a file."""
    if path.is_dir():
        return {part.name: part.read_text() for part in path.iterdir()}
    return {"": path.read_text()}


def write(path: Path, text: str, *, folder: bool) -> None:
    place = growing(path)
    if folder:
        place.mkdir()
        for name in ("a", "b"):
            (place / name).write_text(text)
    else:
        place.write_text(text)
    put(path)


CHANGES = [
    *((Path, name) for name in ("rename", "replace", "unlink", "mkdir", "write_text")),
    (aside.shutil, "rmtree"),
    (aside, "swapped"),
]
"""Every call that changes the disk."""

TO_FOLDERS = [(False, True), (True, False), (True, True)]
"""What was a folder before a save, and what is one after it, where one rename is not enough."""


def crashes(path: Path, text: str, *, folder: bool, at: int) -> bool:
    """Write, but for the changes from number `at` on; whether there were so many."""
    left = at

    def counted(call):
        def run(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                raise Crash
            return call(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in CHANGES:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        try:
            write(path, text, folder=folder)
        except Crash:
            return True
    return False


def renames(one: Path, other: Path) -> bool:
    """In place of `swapped`, as where that is not possible."""
    return False


@pytest.mark.parametrize(
    ("before", "after", "swap"),
    [
        *((None, after, swapped) for after in (False, True)),
        (False, False, swapped),
        *((*pair, how) for pair in TO_FOLDERS for how in (swapped, renames)),
    ],
)
def test_a_crash_at_any_change_leaves_a_complete_one(
    before: bool | None, after: bool, swap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is no checkpoint before, True a folder; after a first crash there is a second one."""
    monkeypatch.setattr(aside.os, "fsync", lambda _: None)  # for crashes of machines, and slow
    monkeypatch.setattr(aside, "swapped", swap)
    one_step = swap is swapped and can_swap(tmp_path)
    seen, ended, again = set(), 0, 0
    for first in range(12):
        for second in range(12):
            path = tmp_path / f"{first}-{second}" / "last.ckpt"
            if before is not None:
                write(path, "old", folder=before)
            for text, at in (("new", first), ("newer", second)):
                crashed = crashes(path, text, folder=after, at=at)
                found = newest(path)
                assert found == path or not one_step
                if before is not None or found.exists():
                    texts = set(content(found).values())
                    assert len(texts) == 1
                    assert content(found).keys() == ({"a", "b"} if found.is_dir() else {""})
                    seen |= texts
                if not crashed:
                    assert content(path).keys() == ({"a", "b"} if after else {""})
                    assert set(content(path).values()) == {text}
                    assert [part.name for part in path.parent.iterdir()] == ["last.ckpt"]
                ended += not crashed
                again += crashed
    assert ended > 0
    assert again > 10
    assert seen == ({"new", "newer"} if before is None else {"old", "new", "newer"})


def can_swap(folder: Path) -> bool:
    """Whether the file system of a folder can let names change places."""
    names = [folder / name for name in ("one", "other")]
    for name in names:
        name.write_text(name.name)
    found = swapped(*names)
    assert [name.read_text() for name in names] == (["other", "one"] if found else ["one", "other"])
    for name in names:
        name.unlink()
    return found


def test_names_that_cannot_change_places(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    assert not swapped(tmp_path / "one", tmp_path / "other")
    assert [part.name for part in tmp_path.iterdir()] == ["one"]


def test_the_name_of_a_folder_is_never_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks for the last checkpoint while it is replaced finds one."""
    if not can_swap(tmp_path):
        pytest.skip("this file system cannot let names change places")
    monkeypatch.setattr(aside.os, "fsync", lambda _: None)
    path, looks, done = tmp_path / "last.ckpt", list[bool](), threading.Event()
    write(path, "0", folder=True)

    def look() -> None:
        while not done.is_set():
            looks.append(path.is_dir())

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(1, 200):
        write(path, str(number), folder=True)
    done.set()
    thread.join()
    assert all(looks)
    assert len(looks) > 100
    assert set(content(path).values()) == {"199"}


def save_for_ever(path: str) -> None:
    step = 0
    while True:
        step += 1
        Aside().save_checkpoint({"step": step, "x": torch.full((200_000,), float(step))}, path)


@pytest.mark.parametrize("times", rare([1, 3], [3]))
@pytest.mark.timeout(120)
def test_killed_processes_leave_a_complete_file(times: int, tmp_path: Path) -> None:
    path, draw = tmp_path / "last.ckpt", random.Random(0)
    context = multiprocessing.get_context("spawn")  # threads of this process survive no fork
    for _ in range(times):
        path.unlink(missing_ok=True)
        process = context.Process(target=save_for_ever, args=(str(path),), daemon=True)
        process.start()
        while not path.exists() and process.is_alive():
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.2))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        found = torch.load(path, weights_only=True)
        assert (found["x"] == found["step"]).all()


def test_addresses_are_left_to_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for name in ("save_checkpoint", "load_checkpoint"):
        monkeypatch.setattr(TorchCheckpointIO, name, lambda self, *args: seen.append(args))
    Aside().save_checkpoint({}, "memory://a/b.ckpt")
    Aside().load_checkpoint("memory://a/b.ckpt")
    assert seen == [({}, "memory://a/b.ckpt", None), ("memory://a/b.ckpt",)]
