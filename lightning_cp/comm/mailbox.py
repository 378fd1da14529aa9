"""Messages between ranks that take turns in one process: for checks, without any communication."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence

from torch import Tensor

from lightning_cp.comm.p2p import Message, Role


class Mailboxes:
    """Where the ranks of one process leave messages for each other."""

    def __init__(self) -> None:
        self._left: defaultdict[tuple[int, int, Role], deque[Tensor]] = defaultdict(deque)

    def link(self, rank: int) -> "MailboxLink":
        """What carries the messages of `rank`."""
        return MailboxLink(self, rank)

    def leave(self, sender: int, reader: int, buffer: Tensor, role: Role) -> None:
        """Leave a message."""
        self._left[sender, reader, role].append(buffer)

    def take(self, sender: int, reader: int, role: Role) -> Tensor:
        """The oldest message of a sender in a role.

        Raises:
            LookupError: if there is none: the plans of the two ranks do not fit.
        """
        left = self._left[sender, reader, role]
        if not left:
            raise LookupError(f"rank {reader} waits for a message that rank {sender} never sent")
        return left.popleft()

    def holds(self, sender: int, reader: int, role: Role, count: int) -> bool:
        """Whether so many messages of a sender are there."""
        return len(self._left[sender, reader, role]) >= count

    @property
    def empty(self) -> bool:
        """Whether every message was taken."""
        return not any(self._left.values())


class MailboxLink:
    """The messages of one rank; a message is there as soon as its sender has posted it."""

    def __init__(self, boxes: Mailboxes, rank: int) -> None:
        self._boxes, self._rank = boxes, rank

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], *, role: Role = "keys"
    ) -> "Delivery":
        """See `lightning_cp.comm.p2p.exchange`."""
        for peer, buffer in sends:
            self._boxes.leave(self._rank, peer, buffer, role)
        return Delivery(self._boxes, self._rank, receives, role)


class Delivery:
    """Messages that a rank waits for."""

    def __init__(
        self, boxes: Mailboxes, rank: int, receives: Sequence[Message], role: Role
    ) -> None:
        self._boxes, self._rank, self._receives, self._role = boxes, rank, receives, role

    @property
    def ready(self) -> bool:
        """Whether every message is there."""
        wanted = Counter(peer for peer, _ in self._receives)
        return all(
            self._boxes.holds(peer, self._rank, self._role, count) for peer, count in wanted.items()
        )

    def wait(self) -> None:
        """Take every message.

        Raises:
            ValueError: if one has another size than its receiver expects.
        """
        for peer, buffer in self._receives:
            message = self._boxes.take(peer, self._rank, self._role)
            if message.shape != buffer.shape or message.dtype != buffer.dtype:
                raise ValueError(
                    f"rank {peer} sent {tuple(message.shape)} {message.dtype}, rank {self._rank} "
                    f"expects {tuple(buffer.shape)} {buffer.dtype}"
                )
            buffer.copy_(message)
        self._receives = ()
