"""A stand-in for the package flash_attn, which has no build for CPUs: over torch's CPU kernel.

For `lightning-cp bench packed --peer ring-flash-attn`: with the folder above this one on
PYTHONPATH, ring-flash-attn finds here what it calls. Only that is here.
"""

from flash_attn.flash_attn_interface import flash_attn_func

__version__ = "2.7.4"

__all__ = ["__version__", "flash_attn_func"]
