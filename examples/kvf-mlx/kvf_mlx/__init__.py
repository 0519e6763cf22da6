"""mlx-lm's prompt cache with kvframework behind it: prompts begin with what any process on the node has computed."""

from __future__ import annotations

from kvf_mlx.identity import by_content
from kvf_mlx.prompt_cache import SharedPromptCache

__all__ = ["SharedPromptCache", "by_content"]
