"""Saved at one mesh, loaded at every other: the next steps are those of the uninterrupted run."""

from pathlib import Path

import pytest

from tests._harness.grid import named
from tests._harness.resharded import Place, both_epochs, compare, go_on, save_both
from tests._harness.sharded import needs_sharding

pytestmark = [pytest.mark.dist, needs_sharding]

TOLERANCE = {"64-true": 1e-10, "32-true": 1e-6}
PLAIN, ONE = Place("plain", stage=None), Place("one")
DDP = Place("ddp2", dp=2, stage=None)
CP2 = [Place(f"cp2-zero{n}", cp=2, stage=n) for n in (3, 0)]
MESHES = {
    "dp1cp4": [Place(f"dp1cp4-zero{n}", cp=4, stage=n) for n in (3, 0, 1, 2)],
    "dp2cp2": [Place(f"dp2cp2-zero{n}", dp=2, cp=2, stage=n) for n in (1, 2, 3, 0)],
    "cp2tp2": [Place(f"cp2tp2-zero{n}", cp=2, tp=2, stage=n) for n in (2, 3, 1)],
    "dp4": [Place(f"dp4-zero{n}", dp=4, stage=n) for n in (3, 0, 1, 2)],
    "one": [ONE],
    "plain": [PLAIN],
}
DEFAULT = {
    ("dp1cp4-zero3", "folder", "cp2tp2"),
    ("cp2tp2-zero2", "folder", "one"),
    ("dp2cp2-zero1", "file", "plain"),
    ("dp4-zero3", "folder", "dp2cp2"),
    ("plain", "file", "dp1cp4"),
    ("one", "file", "dp4"),
}
"""Every mesh is saved at and loaded at, every stage takes part; all others with `-m full`."""


def cases():
    """Every source at every mesh, at stages and from files and folders in turn.

    Each pair of meshes has both where the source is sharded, from sources of different stages.
    """
    found = []
    for number, source in enumerate(place for places in MESHES.values() for place in places):
        for turn, (name, targets) in enumerate(MESHES.items()):
            target = targets[number % len(targets)]
            for what in ("file", "folder") if source.sharded else ("file",):
                own = (source.name, what, name) in DEFAULT
                # A folder takes a tool for the plain Trainer, see test_portable.py.
                folder = source.sharded and name != "plain" and (number + turn) % 2 == 0
                if own or folder == (what == "folder"):
                    marks = () if own else pytest.mark.full
                    found.append(pytest.param(source, what, target, marks=marks))
    return found


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    folders: dict[tuple[str, str], Path] = {}

    def save(place: Place, precision: str) -> Path:
        if (place.name, precision) not in folders:
            folder = tmp_path_factory.mktemp(place.name)
            pool.run(save_both, place, precision, folder, world=place.world)
            folders[place.name, precision] = folder
        return folders[place.name, precision]

    return save


@pytest.fixture(scope="module")
def whole(pool):
    found = {}

    def run(precision: str):
        if precision not in found:
            (found[precision],) = pool.run(both_epochs, precision, world=1)
        return found[precision]

    return run


@pytest.mark.parametrize(("source", "what", "target"), cases(), ids=named)
def test_the_next_steps_are_the_same(source, what, target, saved, whole, pool):
    path = saved(source, "64-true") / f"{what}.ckpt"
    assert path.is_dir() == (what == "folder")
    found = pool.run(go_on, target, "64-true", path, world=target.world)
    compare(found, target, whole("64-true"), TOLERANCE["64-true"])


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (DDP, CP2[0]),
        (CP2[0], DDP),
        pytest.param(DDP, CP2[1], marks=pytest.mark.full),
        pytest.param(CP2[1], DDP, marks=pytest.mark.full),
    ],
    ids=named,
)
def test_from_and_to_two_devices_of_the_plain_trainer(source, target, saved, whole, pool):
    path = saved(source, "64-true") / "file.ckpt"
    found = pool.run(go_on, target, "64-true", path, world=target.world)
    compare(found, target, whole("64-true"), TOLERANCE["64-true"])


@pytest.mark.full
@pytest.mark.parametrize("source", MESHES)
@pytest.mark.parametrize("target", MESHES)
def test_in_single_precision(source, target, saved, whole, pool):
    before, after = MESHES[source][0], MESHES[target][-1]
    folder = before.sharded and after is not PLAIN
    path = saved(before, "32-true") / f"{'folder' if folder else 'file'}.ckpt"
    found = pool.run(go_on, after, "32-true", path, world=after.world)
    compare(found, after, whole("32-true"), TOLERANCE["32-true"])
