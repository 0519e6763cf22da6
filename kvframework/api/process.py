"""Child processes, for a package that has one."""

from __future__ import annotations

from kvframework.child_process import end_with_parent

__all__ = ["end_with_parent"]
