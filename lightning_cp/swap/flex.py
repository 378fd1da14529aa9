"""`flex_attention` of torch under context parallelism.

Legend: B batch, H query heads, n queries, m keys.

[Note: block masks] What a `BlockMask` hides is said by its `mask_mod`, a function of positions,
which is evaluated at the global positions of every tile. Its blocks are an index of that function
and are not used, whatever lengths they were made for, but they must not say anything else. A
tensor that the function reads must hold the whole sequence, since it is indexed by such positions.
Flex attention passes the function single positions, attention here whole rows that broadcast: once
for every mask it is looked whether that comes to the same.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex

from lightning_cp.attention import attention, keeping
from lightning_cp.comm.digest import Digest
from lightning_cp.context import SLOT, Context
from lightning_cp.data.content import content_code
from lightning_cp.errors import RefusedError
from lightning_cp.mask import MaskMod
from lightning_cp.swap.calls import Function, swapped, without_gradient
from lightning_cp.swap.captured import captured
from lightning_cp.swap.guard import anywhere

BlockMask = flex.BlockMask

COMPILED = (
    "flex_attention in one graph with other code (fullgraph=True) is not supported under context "
    "parallelism; compile without fullgraph, flex_attention alone or what calls it, and the call "
    "stays out of the graph"
)


def flex_attention(original: Function) -> Function:
    """The replacement of the function of this name, made from torch's own.

    Inside a context every rank passes the queries, keys and values of its own tokens and gets
    their output, and with `return_lse` or `return_aux` their LSE, which has no gradient.

    Args:
        original: torch's function.

    Raises:
        RefusedError: from a call, for a `score_mod`, for block masks that are not what their
            `mask_mod` says or that read tensors of this rank's tokens, for the largest scores, and
            for what attention itself refuses.
        MismatchError: if peers pass a `mask_mod` that reads other values.
    """
    return swapped(original, _Calls(), _lacks, COMPILED)


def create_block_mask(original: Function) -> Function:
    """The replacement of the function of this name, which counts positions from 0 on purpose."""

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if SLOT.current is None or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        with SLOT.suspend():
            return original(*args, **kwargs)

    return replacement


class _Calls:
    """Calls within contexts; remembers the block masks that are what their functions say."""

    def __init__(self) -> None:
        self._right: WeakKeyDictionary[BlockMask, None] = WeakKeyDictionary()

    def __call__(self, context: Context, call: dict[str, Any]) -> Any:
        query, key, value = (call[name] for name in ("query", "key", "value"))
        if query.shape[-3] != key.shape[-3] and not call["enable_gqa"]:
            raise RefusedError(
                f"{query.shape[-3]} query heads and {key.shape[-3]} key heads need enable_gqa=True"
            )
        mask = call["block_mask"]
        mod = None if mask is None else self._mask_mod(context, mask, query, key)
        name = None if mod is None else SLOT.mask_mods.name(mod)
        scale = query.shape[-1] ** -0.5 if call["scale"] is None else call["scale"]
        asked = {"mask_mod": name, "keep": keeping(query, key, value)}
        out, lse, *_ = attention(query, key, value, False, scale, **asked)
        aux = call["return_aux"]
        if aux is not None:
            return out, flex.AuxOutput(lse=without_gradient(lse) if aux.lse else None)
        return (out, without_gradient(lse)) if call["return_lse"] else out

    def _mask_mod(
        self, context: Context, mask: BlockMask, query: Tensor, key: Tensor
    ) -> MaskMod | None:
        """The function that says what a block mask hides, None if it hides nothing.

        Raises:
            RefusedError: if the mask says more, is for other lengths, or reads local tokens.
        """
        sizes = query.shape[-2], key.shape[-2]
        lengths = tuple(context.held(size).length for size in sizes)
        mod: MaskMod = mask.mask_mod
        if context.world > 1:
            self._check_reads(context, mod, sizes, lengths)
        made_for = tuple(mask.shape[-2:])
        if mask not in self._right:
            if anywhere(context, made_for not in (sizes, lengths)):
                raise RefusedError(
                    f"a block mask for {made_for[0]} queries and {made_for[1]} keys; make it for "
                    f"this rank's {sizes[0]} and {sizes[1]}, or the whole {lengths[0]} and "
                    f"{lengths[1]}"
                )
            with SLOT.suspend():
                says_more, varies = _compared(mask)
            if anywhere(context, says_more):
                raise RefusedError(
                    "the blocks of the block mask hide or show other keys than its mask_mod, "
                    "which alone says what positions of other ranks see; make it with "
                    "create_block_mask from a mask_mod(b, h, q, k) that says all of it"
                )
            if anywhere(context, varies):
                raise RefusedError(
                    "the mask_mod of the block mask gives something else for tensors of positions "
                    "that broadcast than for single positions; let it compare and index "
                    "element by element"
                )
            self._right[mask] = None
        return None if mod is flex.noop_mask else mod

    def _check_reads(
        self,
        context: Context,
        mod: MaskMod,
        sizes: tuple[int, int],
        lengths: tuple[int, ...],
    ) -> None:
        """Refuse a function that reads tensors of local tokens, or other values than on peers."""
        reads = captured(mod)
        tensors = {name: x for name, x in reads.items() if isinstance(x, Tensor)}
        local = set(sizes) - set(lengths)
        wrong = [name for name, x in tensors.items() if local & set(x.shape)]
        if anywhere(context, bool(wrong)):
            shown = " and ".join(f"{name} {list(tensors[name].shape)}" for name in wrong)
            raise RefusedError(
                f"the mask_mod of the block mask reads tensors of this rank's {sizes[0]} tokens "
                f"({shown or 'those of a peer'}), but is given positions in the whole sequence of "
                f"{lengths[0]}; let it read lightning_cp.functional.gather_sequence(tensor, "
                f"dim=...), or leave documents to the batch (position_ids that start anew with "
                f"each, and documents='position_ids')"
            )
        if context.compare_calls:
            field = f"what the mask_mod of attention call {context.log.attention} reads"
            plain = {name: x for name, x in reads.items() if name not in tensors}
            shown = f"{plain} and {', '.join(f'{n} {list(x.shape)}' for n, x in tensors.items())}"
            code = content_code({**tensors, "plain": torch.tensor(list(repr(plain).encode()))})
            with SLOT.suspend():
                Digest({field: code}, {field: f"{shown} (hash {code})"}, context.meta).wait()


def _lacks(call: dict[str, Any]) -> str | None:
    """What of a call is not supported, and the way out; None if nothing."""
    if call["score_mod"] is not None:
        return (
            "score_mod of flex_attention is not supported under context parallelism; call "
            "lightning_cp.attend with softcap, alibi_slopes, relative_bias or sinks"
        )
    aux = call["return_aux"]
    if aux is not None and aux.max_scores:
        return (
            "the largest scores of rows (max_scores) are not known under context parallelism; ask "
            "for the LSE alone"
        )
    return None


def _compared(mask: BlockMask) -> tuple[bool, bool]:
    """Whether blocks hide or show what the function of the mask does not, and whether it varies.

    Blocks that the function shows in part must be listed, and those listed as full be full. It
    varies if it gives something else for rows of positions than pair by pair. One row of blocks is
    looked at after the other.
    """
    batch, heads, queries, keys = mask.shape
    if min(queries, keys) == 0:
        return False, False
    rows, columns = min(mask.BLOCK_SIZE[0], queries), min(mask.BLOCK_SIZE[1], keys)
    count = -(-keys // columns)
    listed = _listed(mask.kv_num_blocks, mask.kv_indices, count)
    full = torch.zeros_like(listed)
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = _listed(mask.full_kv_num_blocks, mask.full_kv_indices, count)
    b, h, k = (torch.arange(n, device=listed.device) for n in (batch, heads, keys))
    wrong, varies = torch.zeros(2, dtype=torch.bool, device=listed.device)
    for index, start in enumerate(range(0, queries, rows)):
        q = torch.arange(start, min(start + rows, queries), device=listed.device)
        seen = _pair_by_pair(mask.mask_mod)(b, h, q, k)
        together = mask.mask_mod(
            b.view(-1, 1, 1, 1), h.view(1, -1, 1, 1), q.view(1, 1, -1, 1), k.view(1, 1, 1, -1)
        )
        varies |= (together.expand_as(seen) != seen).any()
        edge = count * columns - keys
        some = F.pad(seen, (0, edge)).unflatten(-1, (count, columns)).any(-1).any(-2)
        every = F.pad(seen, (0, edge), value=True).unflatten(-1, (count, columns)).all(-1).all(-2)
        wrong |= (some & ~(listed | full)[:, :, index]).any() | (full[:, :, index] & ~every).any()
    return bool(wrong), bool(varies)


def _pair_by_pair(mod: MaskMod) -> MaskMod:
    """The function for vectors b, h, q, k: bool `[B, H, n, m]`, from its results for numbers."""
    for place in (3, 2, 1, 0):
        mod = torch.vmap(mod, in_dims=tuple(0 if place == index else None for index in range(4)))
    return mod


def _listed(numbers: Tensor, indices: Tensor, count: int) -> Tensor:
    """Which blocks of keys a row of blocks lists: bool `[B, H, rows, count]`."""
    column = torch.arange(indices.shape[-1], device=indices.device)
    places = torch.where(column < numbers.unsqueeze(-1), indices.long(), count)
    found = torch.zeros(*indices.shape[:-1], count + 1, dtype=torch.bool, device=indices.device)
    return found.scatter_(-1, places, True)[..., :count]


SWAPS: dict[str, Callable[[Function], Function]] = {
    "flex_attention": flex_attention,
    "create_block_mask": create_block_mask,
}
"""Functions of `torch.nn.attention.flex_attention`, each with what makes its replacement."""
