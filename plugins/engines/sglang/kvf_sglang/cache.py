"""The cache as SGLang's storage calls need it, without SGLang's classes: pools by name, hits over several pools, loads
and stores with a deadline each. Engine side; every method but `close` may be called from any of its threads.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvf_sglang.attach import Attachments, Place
from kvf_sglang.options import SglangOptions
from kvf_sglang.pages import PoolPages, Salt, digests_of, places_of
from kvf_sglang.pools import PoolForm, form_of
from kvframework.api.process import LogLimit
from kvframework.client import KVClient, KvIdentity, ModelPart
from kvframework.errors import KVFrameworkError

Way = Literal["prefetch", "backup"]
# What nobody takes is dropped.
_MOST = 4096


class Taken(NamedTuple):
    """Pages and GB/s of each transfer since the last time, by way."""

    pages: dict[Way, list[int]]
    gb_per_s: dict[Way, list[float]]


class Tally:
    """`totals` are counts since the start: pages asked for and found, moved each way, failed transfers."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._taken = _empty()

    def found(self, pages: int, asked: int) -> None:
        with self._lock:
            self.totals["asked_pages"] += asked
            self.totals["found_pages"] += pages

    def moved(self, way: Way, pages: int, nbytes: int, seconds: float) -> None:
        with self._lock:
            self.totals[f"{way}_pages"] += pages
            self.totals[f"failed_{way}s"] += not pages
            if pages and len(self._taken.pages[way]) < _MOST:
                self._taken.pages[way].append(pages)
                self._taken.gb_per_s[way].append(nbytes / max(seconds, 1e-9) / 1e9)

    def take(self) -> Taken:
        with self._lock:
            taken, self._taken = self._taken, _empty()
        return taken


def _empty() -> Taken:
    return Taken({"prefetch": [], "backup": []}, {"prefetch": [], "backup": []})


log = logging.getLogger(__name__)

KV = "kv"
ALL_PAGES, TRAILING_PAGES = "all_pages", "trailing_pages"
# States that are named to SGLang, which chooses the last one that every rank has.
_MOST_ENDS = 8


class Worker(NamedTuple):
    """The place of this process in the engine. `replicated`: all tensor-parallel ranks hold the same keys and values
    (MLA). `kv_heads` are those of the whole model, 0 if they are not known."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    replicated: bool = False
    kv_heads: int = 0

    def place(self, *, per_head: bool, first_layer: int = 0) -> Place:
        """`first_layer` is the first of a pipeline stage: users may split the layers as they like."""
        stages = [
            f"pp{self.pp_rank}of{self.pp_size}@{first_layer}" if self.pp_size > 1 else "",
            f"cp{self.cp_rank}of{self.cp_size}" if self.cp_size > 1 else "",
        ]
        stage = "+".join(filter(None, stages))
        if not per_head:
            return Place(stage=stage, part=ModelPart(1))
        part = ModelPart(self.kv_heads, self.tp_rank, self.tp_size) if self.kv_heads else None
        return Place(self.tp_rank, self.tp_size, stage, part)


class Found(NamedTuple):
    """The pages that can be loaded; by pool, and after how many of them the engine can go on."""

    pages: int
    by_pool: dict[str, int]
    restorable: list[int]


NOTHING = Found(0, {}, [])


class PageCache:
    """The pools of one worker. Connecting, naming the weights and registering happen in the background: until then, and
    whenever there is no server, everything is a miss."""

    def __init__(
        self,
        options: SglangOptions,
        worker: Worker,
        identity: Callable[[], KvIdentity],
        *,
        release: str = "",
        client: KVClient | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`release` is that of an SGLang that is only tried: it shares with engines of the same one. Raises
        `EndpointError` and `ConfigFieldError`. Never blocks."""
        self.tally = Tally()
        self._options = options
        self._worker = worker
        self._clock = clock
        self._client = client or KVClient(
            options.endpoint or None, name="sglang", deadline_scale=options.deadline_scale
        )
        self._salt = Salt(engine_name())
        self._attachments = Attachments(self._client, options, identity, self._salt, release=release, clock=clock)
        self._page_tokens = 0
        self._first_layer = 0
        self._retired = ""
        self._left_out = False
        self._once = LogLimit.once()

    def add_pool(self, name: str, pool: Any, form_of: Callable[[Any, int], PoolForm] = form_of) -> None:
        """Declare a pool, by default one of the host, and the one of keys and values first: its pages are those of the
        page hashes. If a pool cannot be kept nothing is: a hit needs all of them. Never blocks."""
        if name == KV:
            self._page_tokens = int(pool.page_size)
            self._first_layer = int(getattr(pool, "start_layer", 0))
        try:
            form = form_of(pool, self._page_tokens)
            # The first rank alone stores what all hold alike, except states.
            if name != KV and self._worker.replicated and form.per_head and not form.state and self._worker.tp_size > 1:
                self._leave_out(f"pool {name} is not cached: only the first rank stores, and heads differ by rank")
                return
        except KVFrameworkError as error:
            self._leave_out(f"pool {name}: {error}")
            return
        place = self._worker.place(per_head=form.per_head, first_layer=self._first_layer)
        self._attachments.add(name, form, self._page_tokens, place)

    def attached(self, name: str) -> bool:
        """True if a pool is registered and the server is there, so that a call is worth its while. Never blocks."""
        return self._client.usable and self._of(name) is not None

    def retire(self, why: str) -> None:
        """From now on everything is a miss: the names of this engine's KV no longer hold."""
        if not self._retired:
            self._retired = why
            log.warning("the engine loads and stores nothing until it restarts: %s", why)

    def forget(self) -> None:
        """From now on only what is stored later is found. The server keeps its objects: other engines use them."""
        self._salt.renew()

    def find(self, keys: Sequence[str], transfers: Sequence[Any] = (), deadline_s: float | None = None) -> Found:
        """How many pages can be loaded, in all pools that `transfers` names: with their policies. Takes `deadline_s` at
        most; None: the option's."""
        pages = self._of(KV)
        if pages is None or not keys:
            return NOTHING
        until = self._clock() + (self._options.lookup_deadline_s if deadline_s is None else deadline_s)
        digests = digests_of(keys)
        count = pages.prefix(digests, self._left(until))
        by_pool = {KV: count} if count else {}
        restorable = list(range(1, count + 1))
        for transfer in transfers:
            if not restorable:
                break
            own, policy = self._of(name_of(transfer)), str(getattr(transfer.hit_policy, "value", transfer.hit_policy))
            if own is None:
                return NOTHING
            if policy == ALL_PAGES:
                there = own.prefix(digests[:count], self._left(until))
                restorable = [page for page in restorable if page <= there]
            elif policy == TRAILING_PAGES and own.holds_states and len(transfer.keys or "1") == 1:
                ends = own.ends(digests[:count], _MOST_ENDS, self._left(until))
                there = max(ends, default=0)
                restorable = sorted({*restorable}.intersection(ends))
            else:
                self._log(f"pool {name_of(transfer)} is not cached: its policy is {policy}")
                return NOTHING
            if there:
                by_pool[name_of(transfer)] = there
        found = max(restorable, default=0)
        self.tally.found(found, len(keys))
        return Found(found, by_pool, restorable)

    def load(self, name: str, keys: Sequence[str], indices: Sequence[int]) -> list[bool]:
        """Load pages into their slots; those that are true are there, from the first on."""
        return self._moved(name, keys, indices, storing=False)

    def store(self, name: str, keys: Sequence[str], indices: Sequence[int]) -> list[bool]:
        return self._moved(name, keys, indices, storing=True)

    def close(self) -> None:
        """Unregister and disconnects. Idempotent."""
        self._attachments.close()
        self._client.close()

    def _moved(self, name: str, keys: Sequence[str], indices: Sequence[int], *, storing: bool) -> list[bool]:
        pages = self._of(name)
        failed = [False] * len(keys)
        if pages is None or not keys:
            return failed
        places = places_of(indices, pages.slots)
        if places is None or len(places) != len(keys):
            self._log(f"pool {name}: the slots are not one whole page of {pages.slots} slots for each key")
            return failed
        digests = digests_of(keys)
        started = self._clock()
        if storing:
            done = len(keys) if pages.store(digests, places, self._options.store_deadline_s) else 0
        else:
            done = pages.load(digests, places, self._options.load_deadline_s)
        self.tally.moved("backup" if storing else "prefetch", done, done * pages.page_bytes, self._clock() - started)
        return [True] * done + failed[done:]

    def _of(self, name: str) -> PoolPages | None:
        return None if self._retired or self._left_out else self._attachments.get(name)

    def _leave_out(self, why: str) -> None:
        self._left_out = True
        self._log(f"SGLang's KV is not cached: {why}")

    def _left(self, until: float) -> float:
        return max(until - self._clock(), 0.0)

    def _log(self, text: str) -> None:
        if self._once.passes(text):
            log.warning("%s", text)


def name_of(transfer: Any) -> str:
    return str(getattr(transfer.name, "value", transfer.name))


def engine_name() -> str:
    """A name that the worker processes of one engine share, and no other engine: their parent, and its start."""
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (OSError, IndexError):
        started, boot = str(time.time_ns()), ""
    return hashlib.blake2b(f"{boot}/{parent}/{started}".encode(), digest_size=8).hexdigest()
