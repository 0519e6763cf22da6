"""How a server's file descriptors are shared out; `kvframework doctor` judges a machine's limit by the same numbers."""

from __future__ import annotations

# From this limit on no crowd that was tried got to the last descriptor between two looks; docs/security.md says it.
SAFE_LIMIT = 4096
# Of the limit: where no new session comes in.
SESSIONS_SHARE = 0.65
