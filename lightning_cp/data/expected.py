"""What the next micro-step's attention is expected to be: what that of the last one was."""

from lightning_cp.balance import Causal, Work, work_of
from lightning_cp.context import CallLog
from lightning_cp.plan import Call, known_calls

LONG = 2**20
"""Tokens of a document that tells which of two masks costs more."""


def expected_work(log: CallLog | None) -> Work:
    """What attention costs: the most that a call did, causal before the first micro-step."""
    seen = log.seen if log is not None else {}
    found = [work_of(sees) for sees in seen]
    return max(found, key=lambda work: work.before(LONG, LONG), default=Causal())


def expected_calls(log: CallLog | None) -> tuple[Call, ...]:
    """Sizes of the attention calls, the same on all peers; none before the first micro-step."""
    ran = log.ran if log is not None else ()
    calls = [Call(x.heads, x.kv_heads, x.head_dim, x.value_dim, x.itemsize) for x in ran]
    return known_calls(calls)
