"""The checks of the limits of this process; a server started in the same way would have the same ones."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from kvframework.api.findings import Finding, Level
from kvframework.api.options import ByteSize
from kvframework.config.descriptors import SAFE_LIMIT, SESSIONS_SHARE

# docs/operations.md: 64 for the server and 4 for each client process.
_SERVER_DESCRIPTORS = 64
_CLIENT_DESCRIPTORS = 4
_FEWEST_CLIENTS = 1


def limits() -> Iterator[Finding]:
    yield _descriptors()
    yield memlock()


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return Finding("limits.descriptors", "ok", "no limit")
    clients = max(int(SESSIONS_SHARE * hard) - _SERVER_DESCRIPTORS, 0) // _CLIENT_DESCRIPTORS
    fact = f"{hard} descriptors ({soft} until `serve` raises it): enough for {clients} client processes"
    if hard >= SAFE_LIMIT:
        return Finding("limits.descriptors", "ok", fact)
    level: Level = "warn" if clients >= _FEWEST_CLIENTS else "fail"
    return Finding(
        "limits.descriptors",
        level,
        f"{fact}; below {SAFE_LIMIT} a burst of connections may use them up before the server reacts",
        "raise it: LimitNOFILE=65536 under systemd, or ulimit -Hn",
    )


def memlock(needed_by: str = "") -> Finding:
    """The check of lockable memory. `needed_by` is the transport that pins L1, if one does."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("limits.memlock", "ok", "no limit")
    fact = f"{ByteSize(soft)} of memory may be locked"
    if not needed_by:
        return Finding("limits.memlock", "ok", f"{fact}; only device transports lock memory")
    return Finding(
        "limits.memlock",
        "warn",
        f"{fact}, and {needed_by} pins L1 for its device",
        "LimitMEMLOCK=infinity under systemd, --ulimit memlock=-1 for a container, or ulimit -l unlimited",
    )
