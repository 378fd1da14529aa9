"""A small benchmark of attention, for tests of its parts."""

from lightning_cp.cli.bench.attention.settings import Settings

SETTINGS = Settings(
    world=2,
    seqlen=256,
    heads=2,
    kv_heads=1,
    head_dim=16,
    dtypes=("fp32",),
    layout="zigzag",
    exchanges=("ring", "direct"),
    documents=None,
    window=None,
    network=None,
    repeats=2,
    launches=2,
    overlaps=(True,),
)
