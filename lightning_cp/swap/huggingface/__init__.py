"""Models of Hugging Face transformers on a part of the sequence, as they are on the whole.

Nothing here imports transformers: a process that never did has no such models.
"""

from lightning_cp.swap.huggingface.adapter import HuggingFace
from lightning_cp.swap.huggingface.models import Traits, counts_in_vain, traits

__all__ = ["HuggingFace", "Traits", "counts_in_vain", "traits"]
