"""Swapping attention and losses under the user's model, without editing it."""

from lightning_cp.swap.install import Installation

__all__ = ["Installation"]
