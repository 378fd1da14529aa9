"""Links for benchmarks: the rate of the emulated one, and messages that wait to be posted."""

import time

import pytest
import torch
import torch.distributed as dist

from lightning_cp.comm import throttle
from lightning_cp.comm.mailbox import Mailboxes
from lightning_cp.comm.p2p import BlockingLink, GroupLink
from lightning_cp.comm.throttle import ThrottledLink, measured_rate
from lightning_cp.errors import ConfigError

KILOBYTE = 8e-6
"""Gbit/s at which 1000 bytes take one second."""


class Clock:
    """A clock that only moves when somebody sleeps."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(throttle, "time", found)
    return found


def message(size):
    return torch.arange(size, dtype=torch.uint8)


def test_messages_share_the_bucket_of_their_sender(clock):
    boxes = Mailboxes()
    sender = ThrottledLink(boxes.link(0), KILOBYTE)
    readers = [ThrottledLink(boxes.link(rank), KILOBYTE) for rank in (1, 2)]
    first = sender.exchange([(1, message(1000)), (2, message(500))], [])
    second = sender.exchange([(1, message(250))], [])
    found = [torch.zeros(size, dtype=torch.uint8) for size in (1000, 500, 250)]
    waits = [
        readers[0].exchange([], [(0, found[0])]),
        readers[1].exchange([], [(0, found[1])]),
        readers[0].exchange([], [(0, found[2])]),
    ]
    ends = []
    for waiting in (*waits, first, second):
        waiting.wait()
        ends.append(clock.now)
    # To two peers or one, one byte leaves after the other; nothing is due before its bytes are out.
    assert ends == pytest.approx([101, 101.5, 101.75, 101.75, 101.75])
    assert [x.tolist() for x in found] == [message(x.numel()).tolist() for x in found]
    assert boxes.empty


def test_a_sender_waits_until_its_bytes_have_left(clock):
    ThrottledLink(Mailboxes().link(0), KILOBYTE).exchange([(1, message(300))], []).wait()
    assert clock.now == pytest.approx(100.3)


def test_time_without_messages_is_not_saved_up(clock):
    link = ThrottledLink(Mailboxes().link(0), KILOBYTE)
    link.exchange([(1, message(100))], []).wait()
    clock.sleep(50)
    link.exchange([(1, message(1000))], []).wait()
    assert clock.now == pytest.approx(100.1 + 50 + 1)


def test_nothing_to_wait_for(clock):
    ThrottledLink(Mailboxes().link(0), KILOBYTE).exchange([], []).wait()
    assert clock.now == 100.0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_is_above_zero(rate):
    with pytest.raises(ConfigError, match="choose a rate above 0"):
        ThrottledLink(Mailboxes().link(0), rate)


def test_blocking_messages_are_posted_when_waited_for():
    boxes = Mailboxes()
    link = BlockingLink(boxes.link(0))
    waiting = link.exchange([(1, message(4))], [])
    assert boxes.empty
    waiting.wait()
    assert boxes.take(0, 1, "keys").tolist() == [0, 1, 2, 3]


def emulated(rank, world, rate, size):
    """The rate as measured several times: other work on the machine can only make it smaller."""
    link = ThrottledLink(GroupLink(dist.group.WORLD), rate)
    return [measured_rate(link, rank=rank, world=world, size=size) for _ in range(4)]


@pytest.mark.dist
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_emulated_rate(pool, rate):
    size = int(rate * 1e9 / 8 * 0.05)  # four messages last 0.2 s
    for found in pool.run(emulated, rate, size, world=2):
        assert max(found) == pytest.approx(rate, rel=0.05)
        assert max(found) <= rate


def waits(rank, world, rate):
    """Seconds of waiting for 0.3 s worth of messages after computing for as long, and without."""
    size = int(rate * 1e9 / 8 * 0.3)
    found = []
    for wrap in (lambda link: link, BlockingLink):
        link = wrap(ThrottledLink(GroupLink(dist.group.WORLD), rate))
        sent, received = torch.full((size,), rank, dtype=torch.uint8), torch.zeros(size).byte()
        dist.barrier()
        waiting = link.exchange([(1 - rank, sent)], [(1 - rank, received)])
        time.sleep(0.3)  # stands for the kernel
        start = time.monotonic()
        waiting.wait()
        found.append(time.monotonic() - start)
        assert (received == 1 - rank).all()
    return found


@pytest.mark.dist
def test_emulated_messages_travel_in_the_background_unless_blocked(pool):
    for overlapped, blocked in pool.run(waits, 0.1, world=2):
        assert overlapped < 0.15
        assert blocked >= 0.3
