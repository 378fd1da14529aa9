"""Random numbers under context parallelism: alike on peers, except where they belong to tokens.

[Note: one draw a call] The default generators are alike on peers. A call takes one number from
that of the CPU, seeds all with it and, where its output holds local tokens, with the rank, and puts
them back. So peers stay alike whatever they draw and however many tokens they hold, and what
activation checkpointing repeats from a saved state of the default generator is the same again.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_cp.context import SLOT, Context
from lightning_cp.swap._torch import is_tracing, original

Function = Callable[..., Any]

SHARED = 0
"""Whose numbers are drawn: those of all peers. Rank r's own are r + 1."""

DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
"""Operators of aten; each has a variant that works in place, with an underscore."""

FUNCTIONS = (
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "multinomial", "normal"),
)
"""Functions of torch that draw."""

METHODS = (
    *("bernoulli", "multinomial"),
    *("bernoulli_", "uniform_", "normal_", "exponential_", "random_"),
    *("geometric_", "cauchy_", "log_normal_"),
)
"""Methods of tensors that draw."""


def dropout(name: str) -> Callable[[Tensor, float, bool], Tensor]:
    """The override of a dropout: masks of tokens differ between peers, others are the same.

    Args:
        name: the operator.
    """

    def kernel(input: Tensor, p: float, train: bool) -> Tensor:
        plain, context = original(name), SLOT.current
        if not train or p == 0:
            return plain(input, p, train)
        if is_tracing(input):
            if SLOT.suspended or name not in ("dropout", "dropout_"):
                return plain(input, p, train)
            seed = torch.ops.aten.randint.low(0, 2**62, [], dtype=torch.int64, device="cpu")
            out: Tensor = torch.ops.lightning_cp.dropout(input, p, seed)[0]
            return input.copy_(out) if name.endswith("_") else out
        if context is None or context.world == 1:
            return plain(input, p, train)
        with _seeded(_draw(), whose(context, input.shape)):
            return plain(input, p, train)

    return kernel


KERNELS = {name: dropout(name) for kind in DROPOUTS for name in (kind, f"{kind}_")}
"""Overrides by name of the operator."""


def drawing(function: Function) -> Function:
    """The replacement of a function or method that draws; the same arguments.

    With a generator of the user's, for parameters, in compiled code and outside a context it is the
    original.
    """
    in_place = function.__name__.endswith("_")

    @functools.wraps(function)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        context = SLOT.current
        untouched = kwargs.get("generator") is not None or (
            in_place and isinstance(args[0], torch.nn.Parameter)
        )
        if context is None or context.world == 1 or untouched:
            return function(*args, **kwargs)
        number = _draw()
        with _seeded(number, whose(context, args[0].shape) if in_place else context.rank + 1):
            found = function(*args, **kwargs)
        if not in_place and whose(context, found.shape) == SHARED:
            with _seeded(number, SHARED):
                return function(*args, **kwargs)
        return found

    return replacement


def whose(context: Context, shape: torch.Size) -> int:
    """Whose random numbers fill a tensor: a rank's own where it holds local tokens.

    Tokens are in `[B, S_local, ...]`, `[B * S_local, ...]`, other rows `[N, S_local, ...]`, and
    wherever a tensor of three or more dimensions with the rows of the batch has the size S_local.
    """
    for sequence in context.sequences.values():
        share = sequence.layout.size(context.rank)
        flat = len(shape) > 0 and shape[0] == sequence.batch * share
        second = len(shape) > 1 and shape[1] == share
        later = len(shape) > 2 and shape[0] == sequence.batch and share in shape[2:]
        if share and (flat or second or later):
            return context.rank + 1
    return SHARED


def _draw() -> int:
    """One number from the default generator of the CPU, past what this module replaces."""
    return int(torch.ops.aten.randint.low(0, 2**62, [], dtype=torch.int64, device="cpu"))


def _mixed(number: int, who: int) -> int:
    """A seed of 32 well-mixed bits; generators of the CPU use no more."""
    mixed = (number + who * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return (mixed ^ mixed >> 31) % 2**32


@contextmanager
def _seeded(number: int, who: int) -> Iterator[None]:
    """Default generators seeded for one call, and put back."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(_mixed(number, who))
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _scaled_mask(like: Tensor, p: float, number: Tensor, who: int) -> Tensor:
    generator = torch.Generator(like.device)
    generator.manual_seed(_mixed(int(number), who))
    kept = torch.empty_like(like, memory_format=torch.contiguous_format)
    torch.ops.aten.bernoulli_.float(kept, 1 - p, generator=generator)
    return kept if p == 1 else kept.div_(1 - p)


@torch.library.custom_op("lightning_cp::dropout", mutates_args=())
def _dropout(input: Tensor, p: float, number: Tensor) -> tuple[Tensor, Tensor]:
    """Dropout in compiled code: a function of its seed, and whose mask it was."""
    context = SLOT.current
    who = SHARED if context is None else whose(context, input.shape)
    return input * _scaled_mask(input, p, number, who), torch.tensor(who)


@torch.library.custom_op("lightning_cp::dropout_backward", mutates_args=())
def _dropout_backward(grad: Tensor, p: float, number: Tensor, who: Tensor) -> Tensor:
    return grad * _scaled_mask(grad, p, number, int(who))


@_dropout.register_fake
def _(input: Tensor, p: float, number: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(input)
    return out, torch.empty((), dtype=torch.int64)


@_dropout_backward.register_fake
def _(grad: Tensor, p: float, number: Tensor, who: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _save(ctx: Any, inputs: tuple[Tensor, float, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.p = inputs[1]
    ctx.save_for_backward(inputs[2], output[1])


def _differentiate(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor, None, None]:
    return torch.ops.lightning_cp.dropout_backward(grad, ctx.p, *ctx.saved_tensors), None, None


_dropout.register_autograd(_differentiate, setup_context=_save)
