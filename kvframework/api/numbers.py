"""Numbers, times and amounts as people read them, for commands and pages."""

from __future__ import annotations

from kvframework.text import counted, short_count, short_duration, short_number

__all__ = ["counted", "short_count", "short_duration", "short_number"]
