"""The shares of a server's file descriptors; `kvframework doctor` judges a machine's limit by the same numbers."""

from __future__ import annotations

# With at least this limit, none of the tested crowds took the last descriptor between two checks; docs/security.md has
# the figures.
SAFE_LIMIT = 4096
# The share of the limit from which no new session is accepted.
SESSIONS_SHARE = 0.65
