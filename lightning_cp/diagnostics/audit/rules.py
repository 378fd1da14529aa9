"""The table of rules: operators of aten that would be silently wrong on a part of the sequence."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lightning_cp.diagnostics.audit import mixing, numbering, reductions, selection
from lightning_cp.diagnostics.audit.call import Rule

NAMES: dict[Rule, str] = {
    numbering.arange: "arange",
    numbering.linspace: "linspace",
    numbering.running: "cumsum cumsum_ cumprod cumprod_ logcumsumexp cummax cummin",
    selection.element: "select",
    selection.part: "slice",
    selection.split: "split_with_sizes",
    selection.reordered: "roll flip",
    selection.padded: "constant_pad_nd",
    selection.iterated: "unbind",
    reductions.reduced: (
        "mean sum nansum prod amax amin max min argmax argmin aminmax any all count_nonzero var "
        "std var_mean std_mean norm linalg_vector_norm logsumexp median nanmedian mode kthvalue "
        "topk sort"
    ),
    reductions.normalised: "_softmax _log_softmax _safe_softmax",
    reductions.batch_statistics: (
        "native_batch_norm _native_batch_norm_legit cudnn_batch_norm miopen_batch_norm"
    ),
    reductions.group_statistics: "native_group_norm",
    reductions.layer_statistics: "native_layer_norm",
    reductions.pooled: (
        "avg_pool2d max_pool2d_with_indices adaptive_max_pool2d _adaptive_avg_pool2d"
    ),
    mixing.convolved: "convolution",
    mixing.windows: "unfold",
    mixing.transformed: "_fft_r2c _fft_c2c",
    mixing.recurrent: "_cudnn_rnn mkldnn_rnn_layer miopen_rnn",
    mixing.products: "bmm baddbmm",
    mixing.triangle: "tril tril_ triu triu_",
}
"""Every rule with the operators whose calls it judges; a torch may lack some of them."""


def _table(names: Mapping[Rule, str]) -> dict[Any, Rule]:
    return {packet: rule for rule, listed in names.items() for packet in _packets(listed.split())}


def _packets(names: Iterable[str]) -> list[Any]:
    return [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]


RULES = _table(NAMES)
"""From operator to rule."""
