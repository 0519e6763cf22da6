"""The use of each tenant by day: the listener `usage`, which writes it into a file, and the sum of such files.

Bytes are those of the server's status, every `every_s` seconds; hits and saved time are those of its LOOKUPs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvframework.api.listener import (
    Finished,
    Listener,
    ListenerContext,
    ListenerProvider,
    Records,
    hookimpl,
)
from kvframework.api.plugin import Options
from kvframework.client import StatusSource
from kvframework.errors import ConfigFieldError, KVFrameworkError

log = logging.getLogger(__name__)

MOST_DAYS, MOST_BYTES = 400, 64 << 20
ANSWER_S = 5.0
# What the requests of no tenant are called.
OTHER = "other"
GB_HOUR = 3600 * 1e9
# A status that comes later than this many turns says nothing of the time before.
MOST_TURNS = 3


class UsageOptions(Options, frozen=True):
    """Options of the `usage` listener."""

    path: Annotated[str, Meta(min_length=1, description="file of the sums by day, which the next server continues")]
    every_s: Annotated[
        float, Meta(ge=1, le=3600, description="seconds between two counts of the bytes that each tenant has")
    ] = 60.0


class Use(msgspec.Struct):
    """The use of one tenant on one day, in UTC. GB are 10^9 bytes; `l2_gb_hours` are those of tiers with quotas."""

    l1_gb_hours: float = 0.0
    l2_gb_hours: float = 0.0
    lookups: int = 0
    hit_tokens: int = 0
    saved_s: float = 0.0


# By day, such as "2026-11-30", and tenant.
Days = dict[str, dict[str, Use]]
COLUMNS = ("day", "tenant", *Use.__struct_fields__)


def read_days(path: Path) -> Days:
    """Read a file of the listener. Raises `ConfigFieldError`."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MOST_BYTES), type=Days)
    except OSError as error:
        raise ConfigFieldError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except msgspec.MsgspecError as error:
        raise ConfigFieldError(f"is not a file of the listener usage: {error}", where=str(path)) from None


def rows_of(files: Sequence[Path]) -> list[tuple[object, ...]]:
    """Return rows of `COLUMNS` by day and tenant: the sums over files of several servers. Of a store that they share
    each has the same bytes, so the largest `l2_gb_hours` counts. Raises `ConfigFieldError`."""
    total: Days = {}
    for file in files:
        for day, tenants in read_days(file).items():
            for tenant, use in tenants.items():
                of = total.setdefault(day, {}).setdefault(tenant, Use())
                of.l2_gb_hours = max(of.l2_gb_hours, use.l2_gb_hours)
                for name in ("l1_gb_hours", "lookups", "hit_tokens", "saved_s"):
                    setattr(of, name, getattr(of, name) + getattr(use, name))
    return [
        (day, tenant, *(round(each, 9) for each in msgspec.structs.astuple(use)))
        for day, tenants in sorted(total.items())
        for tenant, use in sorted(tenants.items())
    ]


class UsageListener(Listener):
    """Owns the file while the server runs. One thread reads records, another asks for the status and writes."""

    def __init__(self, options: UsageOptions, context: ListenerContext) -> None:
        self._path, self._every_s, self._where = Path(options.path).expanduser(), options.every_s, context.where
        self._endpoint = context.server.endpoints[0]
        self._days: Days = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._counted_at = time.monotonic()
        self._problem = ""

    def start(self, *, keeps: bool) -> None:
        if self._path.exists():
            self._days = read_days(self._path)
        self._write()
        if self._problem:
            raise ConfigFieldError(self._problem, where=f"{self._where} path")

    def listen(self, records: Records) -> None:
        counting = threading.Thread(target=self._count, name="kvf-usage", daemon=True)
        counting.start()
        for batch in records:
            lookups = [each for each in batch.records if isinstance(each, Finished) and each.request == "LOOKUP"]
            with self._lock:
                for each in lookups:
                    use = self._of(each.tenant, each.at)
                    use.lookups += 1
                    use.hit_tokens += each.l1_tokens + each.l2_tokens
                    use.saved_s += getattr(each, "saved_s", 0.0)
        self._ended.set()
        self._write()

    def status(self) -> Mapping[str, object]:
        return {"problem": self._problem}

    def _of(self, tenant: str, at: float) -> Use:
        day = time.strftime("%Y-%m-%d", time.gmtime(at))
        if day not in self._days and len(self._days) >= MOST_DAYS:
            del self._days[min(self._days)]
        return self._days.setdefault(day, {}).setdefault(tenant or OTHER, Use())

    def _count(self) -> None:
        source = StatusSource(self._endpoint, ANSWER_S, name="usage")
        try:
            while not self._ended.wait(self._every_s):
                with contextlib.suppress(KVFrameworkError, msgspec.MsgspecError):  # the next turn will do
                    self._add_bytes(msgspec.json.decode(source.ask()))
                self._write()
        finally:
            source.close()

    def _add_bytes(self, status: Mapping[str, Any]) -> None:
        before, self._counted_at = self._counted_at, time.monotonic()
        hours = min(self._counted_at - before, MOST_TURNS * self._every_s) / GB_HOUR
        with self._lock:
            for tenant, row in status["use"]["tenants"].items():
                self._of(tenant, time.time()).l1_gb_hours += row["bytes"] * hours
            for tier in status["l2"]:
                for tenant, row in tier["details"].get("tenants", {}).items():
                    self._of(tenant, time.time()).l2_gb_hours += row["bytes"] * hours

    def _write(self) -> None:
        with self._lock:
            content = msgspec.json.encode(self._days)
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_bytes(content)
            beside.replace(self._path)
            self._problem = ""
        except OSError as error:
            self._problem = f"{self._path} cannot be written: {error.strerror}"


@hookimpl
def kvf_listeners() -> list[ListenerProvider[UsageOptions]]:
    return [
        ListenerProvider(
            name="usage",
            summary="sums up by tenant and day what is cached and what it saves",
            options=UsageOptions,
            create=UsageListener,
        )
    ]
