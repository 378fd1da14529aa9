"""Why a module is wrong on a part of the sequence, and what to write instead."""

import torch
from torch import nn

Kinds = tuple[type[nn.Module], ...]

CLASSES: tuple[tuple[Kinds, str, str], ...] = (
    (
        (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d),
        "a convolution over the sequence needs tokens that other ranks hold",
        "run it on functional.gather_sequence(x) and cut with functional.scatter_sequence",
    ),
    (
        (nn.RNNBase,),
        "a recurrence over the sequence starts anew on every rank",
        "run it on functional.gather_sequence(x) and cut with functional.scatter_sequence",
    ),
    (
        (torch.nn.modules.batchnorm._BatchNorm,),
        "batch statistics are taken over this rank's tokens alone",
        "use a norm over channels (LayerNorm, RMSNorm), or put it into eval()",
    ),
    (
        (nn.MultiheadAttention,),
        "attention that did not pass through context parallelism",
        "call it with need_weights=False, or see the limits",
    ),
    (
        (
            nn.modules.pooling._AvgPoolNd,
            nn.modules.pooling._MaxPoolNd,
            nn.modules.pooling._AdaptiveAvgPoolNd,
            nn.modules.pooling._AdaptiveMaxPoolNd,
        ),
        "pooling over the sequence sees this rank's tokens alone",
        "use functional.sequence_mean or functional.sequence_max",
    ),
    (
        (nn.modules.dropout._DropoutNd,),
        "random numbers differ between one device and a shard",
        "set its rate to 0 to compare the rest",
    ),
)

PHRASES: tuple[tuple[str, str, str], ...] = (
    (
        "the step stopped",
        "a call was refused, or failed on the shard",
        "the message names the call and the way out",
    ),
    (
        "the loss differs",
        "the loss is computed by hand from this rank's tokens",
        "use torch.nn.functional.cross_entropy, functional.sequence_mean, or loss='token_mean'",
    ),
    (
        "logged value",
        "it is computed from this rank's tokens",
        "log the loss itself, or make the value with functional.sequence_mean or sequence_sum",
    ),
    (
        "gradients differ",
        "something between here and the loss has no exact adjoint: a detach, a collective without "
        "gradient, or a value that only some ranks use",
        "use the operators of functional, whose backward is exact",
    ),
    (
        "attention calls are missing",
        "some attention calls did not go through context parallelism, and did not matter here",
        "call torch.nn.functional.scaled_dot_product_attention or lightning_cp.attend",
    ),
)

OWN_CODE = (
    "its own code mixes tokens of the sequence (positions counted from 0, a mask or a reduction of "
    "the local size, attention written out), or takes the local length for the whole",
    "functional.positions for positions, scaled_dot_product_attention for attention, "
    "functional.sequence_sum/mean/max, cumsum or gather_sequence for what mixes tokens",
)


def cause_of(part: nn.Module, name: str, what: str, audited: list[str]) -> tuple[str, str]:
    """Likely cause and remedy.

    Args:
        part: the module that was found.
        name: its qualified name.
        what: what differs.
        audited: what the audit said of the step; of this module it knows best.
    """
    place = f"module '{name}'" if name else "the root module"
    for message in audited:
        if message.startswith(place):
            cause, _, remedy = message.partition("; ")
            return cause, remedy or "see the message"
    for kinds, cause, remedy in CLASSES:
        if isinstance(part, kinds):
            return cause, remedy
    for phrase, cause, remedy in PHRASES:
        if phrase in what:
            return cause, remedy
    return OWN_CODE
