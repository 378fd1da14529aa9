"""Putting the replacements into transformers, and taking them out again.

[Note: nothing of a model changes] transformers looks its attention and mask functions up by the
name in a model's config. The look-up is replaced and the name is left alone: outside a context it
finds what it always found, and a model or config that is copied or saved in the meantime holds no
trace. With transformers' own functions the look-up finds ours in a context; an attention function
that somebody else registered stays what it is.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from lightning_cp.context import SLOT
from lightning_cp.swap.huggingface.attention import BASES, Attention
from lightning_cp.swap.huggingface.inputs import (
    bias_by_distance,
    filling,
    place_globally,
    pool_first,
    refuse_rescaling,
)
from lightning_cp.swap.huggingface.losses import shifting_globally, shifts
from lightning_cp.swap.huggingface.models import (
    biases_by_distance,
    is_own,
    loaded,
    looks_up_positions,
    pools_first,
    pretrained,
)

RESCALED = ("dynamic", "longrope")


class HuggingFace:
    """What is replaced in transformers and hooked into models, until `remove`."""

    def __init__(self) -> None:
        self._attention = Attention()
        self._undo: list[Callable[[], None]] = []
        self._places: set[str] = set()
        self._known: WeakSet[nn.Module] = WeakSet()

    def prepare(self, module: nn.Module | None) -> None:
        """Replace what this process has loaded of transformers, and hook the models of `module`.

        Calling it again does what is new. Outside a context nothing behaves differently.

        Args:
            module: the user's root module, or None.
        """
        places: dict[str, Callable[[Any], None]] = {
            "modeling_utils": self._replace_attention,
            "masking_utils": self._replace_masks,
            "modeling_attn_mask_utils": self._replace_expansion,
            "loss.loss_utils": self._replace_losses,
        }
        for name, replace in places.items():
            place = loaded(name)
            if place is not None and name not in self._places:
                self._places.add(name)
                replace(place)
        if module is None or module in self._known:
            return
        self._known.add(module)
        models = pretrained(module)
        for part in {id(part): part for model in models for part in model.modules()}.values():
            if part not in self._known or part is module:
                self._known.add(part)
                self._hook(part, part in models)

    def remove(self) -> None:
        """Put everything back; calling it again does nothing."""
        while self._undo:
            self._undo.pop()()
        self._places.clear()
        self._known.clear()

    def _hook(self, part: nn.Module, is_model: bool) -> None:
        if is_model:
            hook = part.register_forward_pre_hook(filling(part), with_kwargs=True)
            self._undo.append(hook.remove)
            loss = vars(part).get("_loss_function")
            if loss is not None and shifts(loss):
                self._set(part, "_loss_function", shifting_globally(loss))
        elif looks_up_positions(part):
            hook = part.register_forward_pre_hook(place_globally, with_kwargs=True)
            self._undo.append(hook.remove)
        elif biases_by_distance(part):
            hook = part.register_forward_pre_hook(bias_by_distance, with_kwargs=True)
            self._undo.append(hook.remove)
        elif pools_first(part):
            hook = part.register_forward_pre_hook(pool_first, with_kwargs=True)
            self._undo.append(hook.remove)
        elif any(name in str(getattr(part, "rope_type", "")) for name in RESCALED):
            self._undo.append(part.register_forward_pre_hook(refuse_rescaling).remove)

    def _replace_attention(self, utils: Any) -> None:
        interface, attention = utils.AttentionInterface, self._attention.attention
        # Version 4 looks up by index, version 5 by a method that also knows the eager function.
        name = "get_interface" if hasattr(interface, "get_interface") else "__getitem__"
        before = getattr(interface, name)

        def found(interface: Any, *which: Any, **more: Any) -> Any:
            function = before(interface, *which, **more)
            return function if SLOT.current is None or not is_own(function) else attention

        self._set(interface, name, found)

    def _replace_masks(self, utils: Any) -> None:
        interface = utils.AttentionMaskInterface
        mask, packed = self._attention.mask, self._attention.packed
        before, finding = interface.__getitem__, utils.find_packed_sequence_indices
        self._attention.bases = [
            (getattr(utils, name), kind) for name, kind in BASES.items() if hasattr(utils, name)
        ]

        def found(interface: Any, name: str) -> Any:
            function = before(interface, name)
            return function if SLOT.current is None or not is_own(function) else mask

        def find(position_ids: Tensor) -> Any:
            return finding(position_ids) if SLOT.current is None else packed(position_ids)

        self._set(interface, "__getitem__", found)
        self._set(utils, "find_packed_sequence_indices", find)

    def _replace_expansion(self, utils: Any) -> None:
        """Padding is expanded to one row per query; one row for all says the same."""
        converter = getattr(utils, "AttentionMaskConverter", None)
        if converter is None:
            return
        before = converter._expand_mask

        def expand(mask: Tensor, dtype: Any, tgt_len: int | None = None) -> Any:
            return before(mask, dtype, tgt_len if SLOT.current is None else 1)

        self._set(converter, "_expand_mask", staticmethod(expand))

    def _replace_losses(self, utils: Any) -> None:
        mapping: dict[str, Any] = utils.LOSS_MAPPING
        for name, loss in list(mapping.items()):
            if shifts(loss):
                mapping[name] = shifting_globally(loss)
                self._undo.append(partial(mapping.__setitem__, name, loss))

    def _set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute, to be put back or taken away again."""
        own = name in vars(owner)
        before = vars(owner).get(name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before) if own else delattr(owner, name))
