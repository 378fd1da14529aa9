"""What stands in for the attention and mask functions of transformers in an active context.

Legend: B batch, H query heads, K key heads, S local tokens, D head size.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lightning_cp.attention import attend
from lightning_cp.context import SLOT, Context
from lightning_cp.errors import RefusedError
from lightning_cp.mask import Edges, Mask, Visibility
from lightning_cp.sequences import Sequence
from lightning_cp.swap.dropped import kept_dropout, tile_only
from lightning_cp.swap.guard import anywhere
from lightning_cp.swap.huggingface.inputs import ByDistance
from lightning_cp.swap.sdpa import refuse_masks
from lightning_cp.swap.where import caller

CAUSAL, FULL = "causal", "bidirectional"
BASES = {"causal_mask_function": CAUSAL, "bidirectional_mask_function": FULL}
OVERLAYS: dict[str, Callable[[Mapping[str, Any]], Visibility]] = {
    "sliding_window_overlay": lambda own: Visibility(window=(own["sliding_window"] - 1, None)),
    "sliding_window_bidirectional_overlay": lambda own: Visibility(
        window=(own["sliding_window"], own["sliding_window"])
    ),
    "chunked_overlay": lambda own: Visibility(chunk=own["chunk_size"]),
}
"""From the name of what makes a mask function, and the function's own values, to what it shows."""

EDGES = ("cu_seq_lens_q", "cu_seq_lens_k")
REFUSED = {
    "position_bias": "a bias on the scores",
    "head_mask": "a mask over heads",
    "indices": "a choice of keys by index",
    "block_indices": "a choice of keys by block",
}
"""Arguments of an attention function that change its result, with what they are."""


class Attention:
    """Attention of a whole sequence in place of transformers' functions; no mask is ever built.

    Attributes:
        bases: the mask functions of `BASES`: compiled code knows functions, and no names of them.
    """

    def __init__(self) -> None:
        self.bases: list[tuple[object, str]] = []

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | Visibility | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention with the signature of transformers, in an active context.

        Causality is that of the mask, else as with its "sdpa" function: `is_causal`, else
        `module.is_causal`, and none where there is a mask over keys alone.

        Args:
            module: the attention module.
            query: `[B, H, S, D]`.
            key: `[B, K, S, D]`, `H` a multiple of `K`.
            value: `[B, K, S, D]`.
            attention_mask: None; the batch's padding as `[B, S]` or `[B, 1, 1, S]`; or what `mask`
                said that this layer sees.
            dropout: probability with which a weight is dropped, see `kept_dropout`.
            scaling: factor on the scores.
            is_causal: hide keys after the query.
            kwargs: what else the model passes on; what cannot be computed is refused.

        Returns:
            Output `[B, S, H, D]`, and None for the weights, which never exist.

        Raises:
            RefusedError: for what context parallelism cannot compute.
        """
        context = _context()
        bias = kwargs.get("position_bias")
        if isinstance(bias, ByDistance):
            del kwargs["position_bias"]
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        sees = attention_mask if isinstance(attention_mask, Visibility) else None
        self._refuse(context, causal, key.shape[2], kwargs, sees)
        padding = attention_mask if isinstance(attention_mask, Tensor) else None
        if padding is not None and padding.ndim == 2:
            padding = (padding != 0)[:, None, None, :]
        elif padding is not None:
            causal = False
        terms = _terms(kwargs, bias)
        if sees is None and not terms:
            grouped = query.shape[1] != key.shape[1]
            call = partial(scaled_dot_product_attention, scale=scaling, enable_gqa=grouped)
            out = call(query, key, value, padding, dropout, causal)
        else:
            refuse_masks(context, query, key, padding)
            dropped = kept_dropout(context, dropout, tiled=True)
            query = tile_only(query) if dropped and torch.compiler.is_compiling() else query
            attended = _seeing(sees or Visibility(causal))
            with _named(context):
                out = attended(query, key, value, scale=scaling, dropout_p=dropped, **terms)
        return out.transpose(1, 2).contiguous(), None

    def mask(
        self,
        *args: Any,
        mask_function: Callable[..., Any] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Visibility | None:
        """In place of a function that builds a mask: checks what is asked for, and builds none.

        Returns:
            What a layer sees that is given this for a mask; None for all that causality shows.

        Raises:
            RefusedError: if the mask is more than causality, windows or chunks, padding and the
                batch's documents.
        """
        context = _context()
        size = kwargs.get("kv_length", 0)
        name, sequence = _sequence(context, size)
        base = [kind for function, kind in self.bases if function is mask_function]
        parts = base or _parts(context, mask_function)
        kinds = {part for part in parts if isinstance(part, str)}
        context.log.kinds.setdefault(name, set()).update(kinds)
        packed, context.log.packed = context.log.packed, False
        isolates = sequence.as_transformers and sequence.documents is not None
        if isolates and not packed and CAUSAL in kinds:
            raise RefusedError(
                f"{caller(context)}: the position_ids of the batch start anew within a row, and "
                f"transformers keeps such documents apart only if position_ids are passed to the "
                f"model, no attention_mask is, and no cache is made (use_cache=False in the call "
                f"or in the config); on one device this call would let documents attend to each "
                f"other. Say documents='position_ids' to keep them apart whatever the call, or "
                f"documents='none' to let them"
            )
        _check_padding(context, sequence, attention_mask)
        overlays = [part for part in parts if isinstance(part, Visibility)]
        return _combined(CAUSAL in kinds, overlays, sequence.length) if overlays else None

    def packed(self, position_ids: Tensor) -> None:
        """In place of the function that looks for packed documents: the context knows them.

        Args:
            position_ids: `[B, S]` or `[1, S]`, as the model got them.

        Raises:
            RefusedError: if these positions tell of other documents than the batch's.
        """
        context = _context()
        _, sequence = _sequence(context, position_ids.shape[-1])
        context.log.packed = True
        if not sequence.as_transformers or torch.compiler.is_compiling():
            return
        with SLOT.suspend():
            wrong = _starts_differ(sequence, context.rank, position_ids.detach().cpu())
        if anywhere(context, wrong):
            raise RefusedError(
                f"{caller(context)}: the position_ids of this call start anew in other places than "
                f"those of the batch, from which every rank takes the documents; put them into the "
                f"batch as 'position_ids' [B, S] and pass them on unchanged, without an "
                f"attention_mask in the batch, or say documents='position_ids' or 'none'"
            )

    def _refuse(
        self,
        context: Context,
        causal: bool,
        size: int,
        kwargs: dict[str, Any],
        sees: Visibility | None,
    ) -> None:
        for name, what in REFUSED.items():
            if kwargs.get(name) is not None:
                raise RefusedError(
                    f"{caller(context)}: {what} ({name}) is not supported under context parallelism"
                )
        if kwargs.get("output_attentions"):
            raise RefusedError(
                f"{caller(context)}: output_attentions=True asks for weights of every query and "
                f"key, which never exist in one place; leave it off"
            )
        edges = [kwargs[name] for name in EDGES if kwargs.get(name) is not None]
        if not all(self._are_documents(context, size, given) for given in edges):
            raise RefusedError(
                f"{caller(context)}: cu_seq_lens_q and cu_seq_lens_k are not the edges of this "
                f"batch's documents, one row behind the other, or cannot be compared with them (in "
                f"compiled code); put position_ids that start anew with every document into the "
                f"batch, say documents='position_ids', and leave the lengths out"
            )
        if sees is not None:
            return
        _check_window(context, kwargs.get("sliding_window"), size)
        name, _ = _sequence(context, size)
        kinds = context.log.kinds.get(name, set())
        if len(kinds) == 1 and kinds != {CAUSAL if causal else FULL}:
            raise RefusedError(
                f"{caller(context)}: the model made a {min(kinds)} mask, but this attention says "
                f"is_causal={causal}; without a mask the two must agree, set is_causal of the "
                f"attention module"
            )

    def _are_documents(self, context: Context, size: int, edges: Any) -> bool:
        """Whether cumulative lengths are those of the documents of the whole row."""
        known, (_, sequence) = context.log.edges, _sequence(context, size)
        if any(given is edges for given in known):
            return True
        if torch.compiler.is_compiling() or not isinstance(edges, Tensor):
            return False
        if tuple(edges.tolist()) != _folded(sequence):
            return False
        known.append(edges)
        return True


def _folded(sequence: Sequence) -> Edges:
    """Cumulative lengths of the documents of all rows, laid one behind the other."""
    mask = Mask(sequence.length, sequence.length, documents=sequence.documents)
    rows = [mask.edges(row) for row in range(sequence.batch)]
    return (0, *(n * sequence.length + stop for n, row in enumerate(rows) for stop in row[1:]))


def _terms(given: Mapping[str, Any], bias: object) -> dict[str, Any]:
    """What a call does to its scores, as `attend` takes it."""
    found = {
        "softcap": given.get("softcap"),
        "sinks": given.get("s_aux", given.get("sinks")),
        "relative_bias": bias.numbers if isinstance(bias, ByDistance) else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _seeing(sees: Visibility) -> Callable[..., Tensor]:
    """`attend` with what a layer sees."""
    return partial(attend, is_causal=sees.is_causal, window=sees.window, chunk=sees.chunk)


@contextmanager
def _named(context: Context) -> Iterator[None]:
    """Says in messages who called."""
    try:
        yield
    except RefusedError as error:
        raise RefusedError(f"{caller(context)}: {error}") from error


def _context() -> Context:
    context = SLOT.current
    if context is None:
        raise RuntimeError("only what runs in an active context comes here")
    return context


def _sequence(context: Context, size: int) -> tuple[str, Sequence]:
    try:
        return context.named(size)
    except RefusedError as error:
        raise RefusedError(f"{caller(context)}: {error}") from error


def _parts(context: Context, function: Callable[..., Any] | None) -> list[str | Visibility]:
    """What a mask function is made of: kinds, and what overlays show; refuses what is unknown."""
    name = getattr(function, "__qualname__", type(function).__name__)
    if name in BASES:
        return [BASES[name]]
    inner = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    maker = name.split(".")[0]
    if maker == "and_masks":
        parts = inner.get("mask_functions", ())
        return [found for part in parts for found in _parts(context, part)]
    if maker in OVERLAYS:
        return [OVERLAYS[maker](inner)]
    raise RefusedError(
        f"{caller(context)}: a mask of a kind of its own ({name}); context parallelism knows "
        f"causal and bidirectional attention, windows, chunks, padding and documents"
    )


def _combined(causal: bool, overlays: list[Visibility], length: int) -> Visibility | None:
    """What is left of overlays in rows of this length; None where they hide nothing."""
    windows = [overlay.window for overlay in overlays if overlay.window is not None]
    chunks = [overlay.chunk for overlay in overlays if overlay.chunk is not None]
    sides = [
        min((side for window in windows if (side := window[at]) is not None), default=None)
        for at in range(2)
    ]
    before, after = (None if side is None or side >= length - 1 else side for side in sides)
    if len(set(chunks)) > 1:
        raise RefusedError(f"chunks of {sorted(set(chunks))} tokens in one mask; use one size")
    chunk = chunks[0] if chunks and chunks[0] < length else None
    if before is None and after is None and chunk is None:
        return None
    window = None if before is None and after is None else (before, after)
    return Visibility(causal, window, chunk)


def _check_window(context: Context, window: int | None, size: int) -> None:
    """A window that no mask told of hides nothing on one device, and something with others."""
    if window is None:
        return
    length = _sequence(context, size)[1].length
    if window < length:
        raise RefusedError(
            f"{caller(context)}: a window of {window} tokens in sequences of {length} tokens, but "
            f"the model made no mask with that window; let the model make its masks (pass the "
            f"padding [B, S] as attention_mask, or none), or turn sliding windows off in its config"
        )


def _check_padding(context: Context, sequence: Sequence, given: Tensor | None) -> None:
    """The padding that the model was given must be what was found in the whole batch."""
    if torch.compiler.is_compiling():
        return
    if given is None:
        if sequence.keys is not None:
            raise RefusedError(
                f"{caller(context)}: the batch has an 'attention_mask' with padding, but the model "
                f"was called without it; pass it to the model, or leave it out of the batch if "
                f"padding is to be attended"
            )
        return
    with SLOT.suspend():
        real = sequence.real(context.rank)
        visible = sequence.visible_keys(context.rank)
        equal = given.shape == visible.shape and bool(
            torch.equal((given != 0).cpu()[:, real], visible[:, real])
        )
    if anywhere(context, not equal):
        raise RefusedError(
            f"{caller(context)}: the attention_mask of shape {tuple(given.shape)} that the model "
            f"was called with is not the padding of this batch; pass the padding as the batch's "
            f"'attention_mask' [B, S], from which every rank takes it"
        )


def _starts_differ(sequence: Sequence, rank: int, position_ids: Tensor) -> bool:
    """Whether positions of a rank's tokens start anew elsewhere than the documents do."""
    own = sequence.layout.positions(rank)
    mask = Mask(sequence.length, sequence.length, documents=sequence.documents)
    edges = [mask.edges(row) for row in range(sequence.batch)]
    expected = torch.stack([torch.isin(own[1:], torch.tensor(row)) for row in edges])
    found = position_ids.diff(dim=-1) != 1
    neighbours = (own.diff() == 1) & (own[1:] < sequence.length)
    return bool(((found != expected) & neighbours).any())
