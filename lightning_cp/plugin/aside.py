"""Checkpoints are written aside, synced and renamed: the last complete one outlives any crash.

[Note: two names] A new checkpoint grows under a hidden name beside its own. When it is complete and
on the disk it takes its name: a file by one rename; a folder, which no rename can put in place of
another one, by changing places with the old one, which Linux does in one step. Where the system
cannot, the old one is first renamed to a second hidden name. So where the name is free and the
second hidden name is taken, the first holds a complete checkpoint.
"""

import ctypes
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO as Host
else:
    Host = object  # a concrete class brings the TorchCheckpointIO of its package


def is_local(path: Any) -> bool:
    """Whether a path is on a file system of this machine, and no address."""
    return "://" not in str(path)


def growing(path: Path) -> Path:
    """Where a new checkpoint of this name is written; what a crash left there is cleared away.

    One process calls, before any writes.
    """
    if (complete := newest(path)) != path:
        complete.rename(path)
    place = _beside(path, "new")
    _remove(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    return place


def put(path: Path) -> None:
    """Let what was written to `growing(path)` take its name; one process calls, after all wrote.

    A complete checkpoint of the name exists at every moment: see [Note: two names].
    """
    new, old = _beside(path, "new"), _beside(path, "old")
    _sync(new)
    _remove(old)
    if not (path.is_dir() or (new.is_dir() and (path.exists() or path.is_symlink()))):
        new.replace(path)
    elif not swapped(new, path):
        path.rename(old)
        new.rename(path)
    _sync_folder(path.parent)
    for what in (old, new):
        _remove(what)


def swapped(one: Path, other: Path) -> bool:
    """Let two names of one file system change places, in one step.

    Returns:
        False where that was not possible, and nothing has changed: other systems than Linux, and
        some file systems, know no such step.
    """
    if sys.platform != "linux":
        return False
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    if call is None:  # of a C library that has no name for it
        return False
    first, second = (ctypes.c_char_p(os.fsencode(path.absolute())) for path in (one, other))
    # RENAME_EXCHANGE of linux/fs.h; absolute names begin in no open folder.
    return bool(call(0, first, 0, second, ctypes.c_uint(2)) == 0)


def forget(path: Path) -> None:
    """Clear away what a crash left beside a name that is about to be removed."""
    for what in ("old", "new"):
        _remove(_beside(path, what))


def newest(path: Path) -> Path:
    """Where the newest complete checkpoint of a name is: under the name, but after a crash.

    See [Note: two names].
    """
    if path.exists() or not (old := _beside(path, "old")).exists():
        return path
    new = _beside(path, "new")
    return new if new.exists() else old


class WritesAside(Host):
    """Lightning's `TorchCheckpointIO`, which never leaves half a file under a checkpoint's name.

    Paths on other machines ("s3://...") are left to it as they are.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint in one file; see the module."""
        if not is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        super().save_checkpoint(checkpoint, growing(Path(path)), storage_options)
        put(Path(path))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint, the newest complete one of this name."""
        found = newest(Path(path)) if is_local(path) else path
        return super().load_checkpoint(found, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, and what a crash left beside it."""
        if is_local(path):
            forget(Path(path))
        super().remove_checkpoint(path)


def _beside(path: Path, what: str) -> Path:
    """A hidden name; Lightning takes all that has "hpc_ckpt_" in its name for a checkpoint."""
    name = path.name.replace("%", "%25").replace("_", "%5F")
    return path.with_name(f".{name}.{what}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Wait until a file, or all of a folder, is on the disk."""
    if not path.is_dir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return
    for part in path.iterdir():
        _sync(part)
    _sync_folder(path)


def _sync_folder(path: Path) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
