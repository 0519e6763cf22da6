"""transformers as an engine: stores and restores the `DynamicCache` of a decoder model. Needs torch, transformers."""

from __future__ import annotations

from kvf_transformers.kv import TransformersKV
from kvf_transformers.results import Generated, Restored, Saved

__all__ = ["Generated", "Restored", "Saved", "TransformersKV"]
