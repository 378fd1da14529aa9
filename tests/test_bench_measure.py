"""The instruments of `lightning-cp bench attention`: clocks, kernel calls, bytes, errors."""

import time
from dataclasses import replace

import pytest
import torch

from lightning_cp.cli.bench.attention.measure import (
    Attention,
    CountingLink,
    DistributedCall,
    Inputs,
    KernelCalls,
    PhaseTimes,
    phases,
    timed,
)
from lightning_cp.cli.bench.attention.settings import Case
from lightning_cp.cli.bench.attention.truth import Truth
from lightning_cp.comm.mailbox import Mailboxes
from lightning_cp.exchange import executor
from lightning_cp.kernels import KERNELS
from lightning_cp.mask import Mask
from tests._harness import oracle
from tests._harness.benched import SETTINGS


def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_phase_probe_adds_up_cpu_time():
    probe = PhaseTimes()
    for _ in range(2):
        with probe("kernel"):
            burn(0.01)
    with probe("communication"):
        time.sleep(0.05)
    assert 0.02 <= probe.seconds["kernel"] < 0.03
    assert probe.seconds["communication"] < 0.01, "waiting costs no CPU time"


def test_phases_add_up_to_the_process():
    def call(probe):
        with probe("merge"):
            burn(0.01)
        burn(0.02)

    barriers = []
    start = time.process_time()
    found = phases(call, runs=2, barrier=lambda: barriers.append(1))
    whole = time.process_time() - start
    assert set(found) == {"merge", "other", "background"}
    assert len(barriers) == 2
    assert 0.01 <= found["merge"] < 0.015
    assert 0.02 <= found["other"] < 0.03
    assert 0.06 <= 2 * sum(found.values()) <= whole


def test_timed_starts_after_the_barrier():
    took = timed(lambda: time.sleep(0.05), barrier=lambda: burn(0.05))
    assert 0.05 <= took.wall < 0.5
    assert took.cpu < 0.05


def tensors(settings, dtype=torch.float32):
    torch.manual_seed(settings.seed)
    heads = (settings.heads, settings.kv_heads, settings.kv_heads, settings.heads)
    shapes = ((1, count, settings.seqlen, settings.head_dim) for count in heads)
    return Inputs(*(torch.randn(shape, dtype=dtype) for shape in shapes))


def in_turns(settings, whole, kernels):
    """Forward and backward of all ranks in one process; whole tensors, and each rank's link."""
    layout, boxes = settings.whole_layout, Mailboxes()
    ranks = range(settings.world)
    local = [Inputs(*(layout.shard(x, rank=r, dim=2) for x in whole)) for r in ranks]
    links = [CountingLink(boxes.link(r)) for r in ranks]
    plans = [settings.plan("ring", r, head_chunks=1) for r in ranks]

    def one(r):
        q, k, v, grad = local[r]
        call = executor.Call(kernels[r], q.shape[-1] ** -0.5, links[r])
        out, lse = yield from executor.forward(plans[r], call, q, k, v)
        saved = executor.Saved(q, out, lse, grad)
        grads = yield from executor.backward(plans[r], call, saved, k, v)
        return Attention(out, *grads)

    found = executor.together([one(r) for r in ranks])
    return Attention(*(layout.unshard(x, dim=2) for x in zip(*found, strict=True))), links


class Counting(type(KERNELS["sdpa"])):
    """Counts blocks, and the pairs in them."""

    def __init__(self):
        self.pairs = {"forward": 0, "backward": 0}

    def block(self, tile, *args, **kwargs):
        self.pairs["forward"] += tile.pairs
        return super().block(tile, *args, **kwargs)

    def block_backward(self, tile, *args, **kwargs):
        self.pairs["backward"] += tile.pairs
        return super().block_backward(tile, *args, **kwargs)


def test_ideal_repeats_exactly_the_kernel_calls_of_the_plan():
    settings = SETTINGS
    inner = [Counting() for _ in range(settings.world)]
    kernels = [KernelCalls(kernel) for kernel in inner]
    in_turns(settings, tensors(settings), kernels)
    for rank, (kernel, counted) in enumerate(zip(kernels, inner, strict=True)):
        work = settings.plan("ring", rank).work()
        assert counted.pairs == {"forward": work, "backward": work}
        kernel.again()
        kernel.again()
        assert counted.pairs == {"forward": 3 * work, "backward": 3 * work}


def test_counted_bytes_are_the_planned_ones():
    settings = SETTINGS
    _, links = in_turns(settings, tensors(settings), [KERNELS["sdpa"]] * 2)
    assert sum(x.bytes_sent for x in links) == settings.planned_bytes(Case("fp32", "ring", True))
    # All that a rank lacks of 256 tokens with one key head of 16: keys and values in the forward,
    # again in the backward, and their gradients. Of the last rank's late keys the first needs none.
    rows = 128 + 64
    assert sum(x.bytes_sent for x in links) == 3 * rows * 2 * 16 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_truth_judges_errors(dtype):
    settings = replace(SETTINGS, documents=(100, 156))
    whole = Inputs(*(x.to(dtype) for x in tensors(settings)))
    truth = Truth(whole, settings.mask)
    found, _ = in_turns(settings, whole, [KERNELS["sdpa"]] * 2)
    ratios = truth.ratios(found)
    assert set(ratios) == {"out", "dq", "dk", "dv"}
    assert 0 < max(ratios.values()) < (1e-13 if dtype == torch.float64 else 2)
    expected = oracle.attention(*whole, settings.mask)
    error = (found.dk.double() - expected.dk).abs().max().item()
    if dtype == torch.float64:
        assert ratios["dk"] == pytest.approx(error, abs=1e-15)
    else:
        single = oracle.single_device(*whole, settings.mask)
        yardstick = (single.dk.double() - expected.dk).abs().max().item()
        assert ratios["dk"] == pytest.approx(error / yardstick, rel=0.5)
    wrong = truth.ratios(found._replace(dv=found.dv + 1))
    assert wrong["dv"] > (0.9 if dtype == torch.float64 else 20)


def test_truth_divides_by_no_less_than_rounding():
    # A query that sees one key gets its value: one device makes no error.
    settings = replace(SETTINGS, window=0)
    whole = tensors(settings)
    zeros = torch.zeros_like(whole.q), torch.zeros_like(whole.k)
    dv = whole.grad_out.double().sum(1, keepdim=True).float()
    found = Attention(whole.v.expand(whole.q.shape).clone(), *zeros, dv)
    truth = Truth(whole, settings.mask)
    assert truth.ratios(found)["out"] == 0
    at = whole.v[0, 0].abs().argmin()  # where 1e-5 is added without rounding
    found.out[0, 0].view(-1)[at] += 1e-5
    floor = (whole.v.abs().max().item() + 1) * torch.finfo(torch.float32).eps / 2
    assert truth.ratios(found)["out"] == pytest.approx(1e-5 / floor, rel=0.01)


def test_long_truth_is_the_fused_kernel_in_double(monkeypatch):
    settings = SETTINGS
    whole = tensors(settings, torch.float64)
    found, _ = in_turns(settings, whole, [KERNELS["sdpa"]] * 2)
    monkeypatch.setattr("lightning_cp.cli.bench.attention.truth.MATHS", 255)
    assert max(Truth(whole, settings.mask).ratios(found).values()) < 1e-13


def test_call_alone_is_one_devices_attention():
    settings = replace(SETTINGS, world=1)
    whole = tensors(settings, torch.float64)
    link = Mailboxes().link(0)
    found = DistributedCall(settings.plan("ring", 0), KERNELS["sdpa"], whole, link)()
    expected = oracle.attention(*whole, Mask.causal(256))
    for name in Attention._fields:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
