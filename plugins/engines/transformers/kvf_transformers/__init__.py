"""transformers as an engine: stores and restores the `DynamicCache` of a decoder model. Needs torch, transformers."""

from __future__ import annotations

from kvf_transformers.forward import Generated, Restored, Saved
from kvf_transformers.kv import TransformersKV

__all__ = ["Generated", "Restored", "Saved", "TransformersKV"]
