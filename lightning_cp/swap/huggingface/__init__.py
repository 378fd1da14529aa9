"""Models of Hugging Face transformers on a part of the sequence, as they are on the whole.

Nothing here imports transformers: a process that never did has no such models.
"""

from lightning_cp.swap.huggingface.adapter import HuggingFace
from lightning_cp.swap.huggingface.models import Traits, traits

__all__ = ["HuggingFace", "Traits", "traits"]
