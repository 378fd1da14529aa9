"""Cumulative lengths that a call passes, and the documents of the batch which they must be."""

from itertools import pairwise
from weakref import WeakKeyDictionary

from torch import Tensor

from lightning_cp.context import Context
from lightning_cp.errors import RefusedError
from lightning_cp.mask import Mask
from lightning_cp.sequences import Sequence
from lightning_cp.swap.guard import anywhere


class Lengths:
    """Compares the lengths of calls with the documents of the batch, each tensor once."""

    def __init__(self) -> None:
        self._right: WeakKeyDictionary[Context, list[tuple[Tensor, int]]] = WeakKeyDictionary()

    def check(self, context: Context, rows: Tensor, edges: Tensor, *, is_causal: bool) -> Sequence:
        """The sequence that packed rows are of.

        Args:
            context: the active context.
            rows: `[B * S, ...]`, this rank's tokens of all rows, one row after the other.
            edges: cumulative lengths, integers: those of the documents of the whole rows, or of
                what this rank has of them.
            is_causal: of the call.

        Raises:
            RefusedError: if they are neither, or `rows` are not those of one declared sequence.
        """
        sequence = packed(context, rows.shape[0])
        known = self._right.setdefault(context, [])
        if any(edges is seen and edges._version == version for seen, version in known):
            return sequence
        isolated = is_causal or not sequence.as_transformers or sequence.documents is None
        given = sorted(set(edges.tolist()))
        right = isolated and (
            given == _whole(sequence) or _are_local(given, sequence, context.rank)
        )
        if anywhere(context, not right):
            shown = f"{given[:8]}{'...' if len(given) > 8 else ''}"
            raise RefusedError(
                f"the cumulative lengths {shown} of this call are not those of the documents of "
                f"this batch, in whole rows or among this rank's tokens (models of Hugging Face "
                f"keep documents apart in causal attention only); every rank takes the documents "
                f"from the batch: declare them with position_ids [B, S] that start anew with each "
                f"and documents='position_ids', and pass the lengths of the whole rows"
            )
        known.append((edges, edges._version))
        return sequence


def packed(context: Context, tokens: int) -> Sequence:
    """The sequence of which this rank holds so many tokens, in all rows together.

    Raises:
        RefusedError: if there is none, or more than one different sequence.
    """
    sizes = {n: s.batch * s.layout.size(context.rank) for n, s in context.sequences.items()}
    found = [s for n, s in context.sequences.items() if sizes[n] == tokens]
    if not found or any(other != found[0] for other in found[1:]):
        raise RefusedError(
            f"{tokens} packed tokens are not those of all rows of one declared sequence on this "
            f"rank (which are {sizes}); keep padding in the rows and pass it as the batch's "
            f"'attention_mask' [B, S], or wrap code that is meant to work on local tokens in "
            f"functional.local()"
        )
    return found[0]


def _whole(sequence: Sequence) -> list[int]:
    """Cumulative lengths of the documents of all rows, one after the other."""
    mask = Mask(sequence.length, sequence.length, documents=sequence.documents)
    found = {0}
    for row in range(sequence.batch):
        found |= {row * sequence.length + edge for edge in mask.edges(row)}
    return sorted(found)


def _are_local(edges: list[int], sequence: Sequence, rank: int) -> bool:
    """Whether edges are those of documents among a rank's tokens of all rows.

    Where positions jump, and at dummies, there may be an edge or not: neither says anything of
    documents.
    """
    own = sequence.layout.positions(rank).tolist()
    mask = Mask(sequence.length, sequence.length, documents=sequence.documents)
    needed, allowed = {0, sequence.batch * len(own)}, set()
    for row in range(sequence.batch):
        starts, first = set(mask.edges(row)), row * len(own)
        needed.add(first)
        for index, (left, right) in enumerate(pairwise(own), first + 1):
            if right != left + 1 or right >= sequence.length:
                allowed.add(index)
            elif right in starts:
                needed.add(index)
    return needed <= set(edges) <= needed | allowed
