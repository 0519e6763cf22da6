"""Hides torchvision from a process of vLLM: its wheel is built for CUDA, and SGLang's stand-in for it is not there."""

import sys

sys.modules["torchvision"] = None  # type: ignore[assignment]
