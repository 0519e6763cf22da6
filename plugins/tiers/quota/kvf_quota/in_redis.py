"""What Redis knows of the values of tenants with a quota: their sizes, their order of use, and what is promised.

It lies in Redis itself, changed by scripts, so that several servers together keep to a quota. Its keys have one hash
tag: of a cluster one server has them all. A value that Redis has dropped by itself counts until `check` finds out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from kvf_redis import RedisOptions
from kvf_redis.commands import Command, Count, Length
from kvf_redis.node import Router
from kvf_redis.resp import ProtocolSurprise, Reply, Wire, command
from kvf_redis.tier import RedisTier
from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.api.plugin import Buffer
from kvframework.api.tier import Outcome, PackedKey, Terms
from kvframework.errors import TierError

# How long a proof holds, and how often values are looked for that Redis has dropped.
PROVEN_S, CHECK_S = 60.0, 5.0
# Values of one turn of `check`, and the longest answer that is read.
CHECKED, MOST_BYTES = 256, 4 << 20

# How long a value that was admitted makes no room for others, though it is not used: it may be on its way.
WAY_S = 60
# KEYS: where the ledger is. ARGV: the time, the tenant, its quota, until when values may be on their way; then key,
# bytes and end of the promise by value. One character by value: 0 refused, 1 admitted, 2 promised; then the keys that
# make room.
_ADMIT = """
local now, tenant, most = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local sizes, sums, order = KEYS[1]..':sizes', KEYS[1]..':bytes', KEYS[1]..':order:'..tenant
local held = tonumber(redis.call('HGET', sums, tenant) or '0')
local mine, flags, gone = {}, {}, {}
for i = 5, #ARGV, 3 do mine[ARGV[i]] = true end
local function bytes_of(key) return tonumber(string.match(redis.call('HGET', sizes, key) or '0', '^%d+')) end
for i = 5, #ARGV, 3 do
  local key, nbytes, till = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  local more = nbytes - bytes_of(key)
  local fits = nbytes <= most
  while fits and held + more > most do
    local oldest = redis.call('ZRANGEBYSCORE', order, '-inf', now, 'LIMIT', 0, 1)[1]
    if not oldest or mine[oldest] then
      fits = false
    else
      held = held - bytes_of(oldest)
      redis.call('HDEL', sizes, oldest)
      redis.call('ZREM', order, oldest)
      gone[#gone + 1] = oldest
    end
  end
  local flag = '0'
  if fits then
    held = held + more
    redis.call('HSET', sizes, key, nbytes..' '..tenant)
    local kept = math.max(tonumber(redis.call('ZSCORE', KEYS[1]..':kept', key) or '0'), till)
    if till > now then redis.call('ZADD', KEYS[1]..':kept', kept, key) end
    redis.call('ZADD', order, till > now and kept or math.max(kept, tonumber(ARGV[4])), key)
    flag = kept > now and '2' or '1'
  end
  flags[#flags + 1] = flag
end
redis.call('HSET', sums, tenant, held)
return table.concat(flags)..table.concat(gone)
"""
# ARGV: keys of values that are gone.
_FORGET = """
for i = 1, #ARGV do
  local nbytes, tenant = string.match(redis.call('HGET', KEYS[1]..':sizes', ARGV[i]) or '', '^(%d+) (.*)$')
  if nbytes then
    redis.call('HDEL', KEYS[1]..':sizes', ARGV[i])
    redis.call('ZREM', KEYS[1]..':order:'..tenant, ARGV[i])
    redis.call('ZREM', KEYS[1]..':kept', ARGV[i])
    redis.call('HINCRBY', KEYS[1]..':bytes', tenant, -tonumber(nbytes))
  end
end
return ''
"""
# ARGV: the time; then keys of values that were used, or put. One character by value: 2 for one that is promised, 0 for
# one that is not in the ledger.
_USE = """
local now, flags = tonumber(ARGV[1]), {}
for i = 2, #ARGV do
  local tenant = string.match(redis.call('HGET', KEYS[1]..':sizes', ARGV[i]) or '', '^%d+ (.*)$')
  local kept = tonumber(redis.call('ZSCORE', KEYS[1]..':kept', ARGV[i]) or '0')
  if tenant then redis.call('ZADD', KEYS[1]..':order:'..tenant, math.max(kept, now), ARGV[i]) end
  flags[#flags + 1] = kept > now and '2' or tenant and '1' or '0'
end
return table.concat(flags)
"""
# ARGV: the time, and how many at most: the keys whose promises have ended.
_ENDED = """
local ended = redis.call('ZRANGEBYSCORE', KEYS[1]..':kept', '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
for i = 1, #ended do redis.call('ZREM', KEYS[1]..':kept', ended[i]) end
return table.concat(ended)
"""
# ARGV: a cursor, how many about, the time: the cursor that follows, a blank, keys of values that are not on their way.
_PAGE = """
local page = redis.call('HSCAN', KEYS[1]..':sizes', ARGV[1], 'COUNT', ARGV[2])
local keys = {}
for i = 1, #page[2], 2 do
  local order = KEYS[1]..':order:'..string.match(page[2][i + 1], '^%d+ (.*)$')
  local score = redis.call('ZSCORE', order, page[2][i])
  if score and tonumber(score) < tonumber(ARGV[3]) then keys[#keys + 1] = page[2][i] end
end
return page[1]..' '..table.concat(keys)
"""
# The bytes and the promises of each tenant, a line each.
_SUMS = """
local sums, lines = redis.call('HGETALL', KEYS[1]..':bytes'), {}
for i = 1, #sums, 2 do
  local order = KEYS[1]..':order:'..sums[i]
  local kept = redis.call('ZCOUNT', order, '('..(ARGV[1] + ARGV[2]), '+inf')
  lines[#lines + 1] = sums[i]..' '..sums[i + 1]..' '..redis.call('ZCARD', order)..' '..kept
end
return table.concat(lines, '\\n')
"""


class Asked(Command):
    """A command that is answered by a text, or by a name and its text: `text`."""

    kind = "$"

    def __init__(self, key: bytes, *words: bytes, pair: bool = False) -> None:
        self.text = b""
        self.kind = "*" if pair else "$"
        self._bytes = command(*words)
        super().__init__(key, len(self._bytes))

    def _buffers(self) -> list[Buffer]:
        return [self._bytes]

    def _take(self, reply: Reply, wire: Wire, deadline: float) -> None:
        for _ in range(reply.number if self.kind == "*" else 1):
            head = wire.reply(deadline) if self.kind == "*" else reply
            if head.kind != "$" or not 0 <= head.number <= MOST_BYTES:
                raise ProtocolSurprise("the answer is not a text")
            text = bytearray(head.number)
            wire.value_into([memoryview(text)], head.number, deadline)
            self.text = bytes(text)
        self.outcome = Outcome.FOUND


class RedisLedger:
    """The ledger of one prefix. Thread-safe; each call blocks until its deadline at most and raises `TierError`.

    `in_use`: whether this server has tenants with quotas; only then its calls cost anything."""

    def __init__(self, router: Router, prefix: bytes, ttl_s: int) -> None:
        self._router, self._prefix, self._ttl_s = router, prefix, ttl_s
        self._base = prefix + b"{quota}"
        self.in_use = False
        self._promised: set[PackedKey] = set()
        # Why no value can be promised, "" if it can, and until when that is known.
        self._lacks, self._known_until = "", 0.0
        self._checked_at, self._cursor = -PROVEN_S, b"0"
        self._sums: dict[str, object] = {}

    def admit(self, terms: Sequence[Terms], deadline: float) -> list[Outcome]:
        self.in_use = True
        answers = dict[PackedKey, Outcome]()
        for (tenant, most), each in groupby(terms, key=lambda one: (one.tenant, one.most)):
            of_tenant = list(each)
            keep = [one for one in of_tenant if one.until]
            answers |= self._ask(tenant, most, [one for one in of_tenant if not one.until], deadline)
            if keep and self._lacking(deadline):
                answers |= dict.fromkeys((one.key for one in keep), Outcome.FAILED)
            elif keep:
                answers |= self._keep(tenant, most, keep, deadline)
        self.check(deadline)
        return [answers[one.key] for one in terms]

    def _keep(self, tenant: str, most: int, terms: Sequence[Terms], deadline: float) -> dict[PackedKey, Outcome]:
        lengths = [Length(self._prefix + one.key) for one in terms]
        # Before the promise is made: where Redis or this server ends in between, a value lives longer, not shorter.
        self._router.run([*lengths, *self._counts(b"PERSIST", [one.key for one in terms])], deadline)
        there = [(one, length.nbytes) for one, length in zip(terms, lengths, strict=True) if length.nbytes]
        with_bytes = [Terms(one.key, tenant, most, nbytes, one.until, one.priority) for one, nbytes in there]
        answers = self._ask(tenant, most, with_bytes, deadline)
        refused = [key for key, outcome in answers.items() if outcome is Outcome.FAILED]
        if refused and self._ttl_s:
            self._router.run(self._counts(b"EXPIRE", refused, b"%d" % self._ttl_s), deadline)
        return {one.key: answers.get(one.key, Outcome.MISSING) for one in terms}

    def _ask(self, tenant: str, most: int, terms: Sequence[Terms], deadline: float) -> dict[PackedKey, Outcome]:
        if not terms:
            return {}
        now = time.time()
        words = [b"%.3f" % now, tenant.encode(), b"%d" % most, b"%.3f" % (now + WAY_S)]
        for one in terms:
            words += [one.key, b"%d" % one.nbytes, b"%.3f" % one.until]
        said = self._run(_ADMIT, words, deadline)
        gone = _keys(said[len(terms) :])
        # Before the caller puts its values, so that the store never has more than the quota.
        if gone:
            self._router.run(self._counts(b"UNLINK", gone), deadline)
        flags = said[: len(terms)].decode()
        self._promised |= {one.key for one, flag in zip(terms, flags, strict=True) if flag == "2" and not one.until}
        return {
            one.key: Outcome.FAILED if flag == "0" else Outcome.STORED for one, flag in zip(terms, flags, strict=True)
        }

    def has_promised(self, key: PackedKey) -> bool:
        """Return whether a value that is put now must not expire: the last `admit` found it promised."""
        return key in self._promised

    def put(self, keys: Sequence[PackedKey], outcomes: Sequence[Outcome], deadline: float) -> None:
        """Take note of what was put."""
        kept = self._promised.intersection(keys)
        self._promised -= kept
        failed = {key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.FAILED}
        self.gone(list(failed - kept), deadline)
        self.used([key for key in keys if key not in failed], deadline)

    def gone(self, keys: Sequence[PackedKey], deadline: float) -> None:
        """Take note of values that are not there, as they were deleted or not put."""
        if self.in_use and keys:
            self._run(_FORGET, keys, deadline)

    def used(self, keys: Sequence[PackedKey], deadline: float) -> list[PackedKey]:
        """Take note of uses; return the keys of values that are not promised."""
        if not self.in_use or not keys:
            return list(keys)
        flags = self._run(_USE, [b"%.3f" % time.time(), *keys], deadline).decode()
        return [key for key, flag in zip(keys, flags, strict=True) if flag != "2"]

    def check(self, deadline: float) -> None:
        """Let values expire whose promises have ended, forget some that Redis has dropped, and read the sums."""
        now = time.monotonic()
        if now - self._checked_at < (CHECK_S if self.in_use else PROVEN_S):
            return
        self._checked_at = now
        if not self.in_use:  # others may have used it, or an earlier server
            with contextlib.suppress(TierError):
                self._sum_up(deadline)
            self.in_use = bool(self._sums)
            return
        ended = _keys(self._run(_ENDED, [b"%.3f" % time.time(), b"%d" % CHECKED], deadline))
        if ended and self._ttl_s:
            self._router.run(self._counts(b"EXPIRE", ended, b"%d" % self._ttl_s), deadline)
        words = [self._cursor, b"%d" % CHECKED, b"%.3f" % time.time()]
        self._cursor, _, page = self._run(_PAGE, words, deadline).partition(b" ")
        keys = _keys(page)
        there = self._counts(b"EXISTS", keys)
        if keys:
            self._router.run(there, deadline)
            missing = [key for key, each in zip(keys, there, strict=True) if each.outcome is Outcome.MISSING]
            self.gone(missing, deadline)
        self._sum_up(deadline)

    def _sum_up(self, deadline: float) -> None:
        lines = self._run(_SUMS, [b"%.3f" % time.time(), b"%d" % WAY_S], deadline).decode().splitlines()
        rows = (line.rsplit(" ", 3) for line in lines)
        self._sums = {name: {"bytes": int(held), "values": int(of), "kept": int(kept)} for name, held, of, kept in rows}

    def status(self) -> dict[str, object]:
        return {"tenants": self._sums} if self._sums else {}

    def problems(self) -> Iterator[str]:
        if self._lacks:
            yield f"no value is promised: {self._lacks}"

    def _lacking(self, deadline: float) -> str:
        now = time.monotonic()
        if now >= self._known_until:
            self._lacks = lacking(self._router, deadline)
            self._known_until = now + PROVEN_S
        return self._lacks

    def _counts(self, verb: bytes, keys: Sequence[PackedKey], *words: bytes) -> list[Count]:
        return [Count(self._prefix + key, verb, Outcome.FOUND, *words) for key in keys]

    def _run(self, script: str, words: Sequence[bytes], deadline: float) -> bytes:
        asked = Asked(self._base, b"EVAL", script.encode(), b"1", self._base, *words)
        self._router.run([asked], deadline)
        if asked.outcome is not Outcome.FOUND:
            raise TierError(f"the ledger of tenants cannot be used: {asked.error or 'Redis is full'}", where="redis")
        return asked.text


def lacking(router: Router, deadline: float) -> str:
    """Return what a Redis lacks to keep a promise, "" for nothing: it writes each value to a disk, which a restart
    reads, and evicts no key without a TTL. Raises `TierError`."""
    for server in router.servers(deadline):
        for read in (_of_info, _of_sync):
            said = read(lambda *words, at=server, **how: _said(router, at, deadline, *words, **how))
            if said:
                return said
    return ""


def _said(router: Router, server: object, deadline: float, *words: bytes, pair: bool = False) -> bytes:
    asked = Asked(b"", *words, pair=pair)
    router.run_at(server, asked, deadline)  # type: ignore[arg-type]
    return asked.text


def _of_info(ask: Callable[..., bytes]) -> str:
    facts = dict(line.split(":", 1) for line in ask(b"INFO").decode(errors="replace").splitlines() if ":" in line)
    policy = facts.get("maxmemory_policy", "")
    if policy != "noeviction" and not policy.startswith("volatile-"):
        return f"maxmemory-policy is {policy or 'unknown'}: set noeviction, or volatile-lru and ttl_s"
    if facts.get("aof_enabled") != "1":
        return "appendonly is off: Redis would lose the values at its restart"
    if facts.get("aof_last_write_status", "ok") != "ok":
        return "Redis cannot write its append-only file"
    return ""


def _of_sync(ask: Callable[..., bytes]) -> str:
    try:
        sync = ask(b"CONFIG", b"GET", b"appendfsync", pair=True)
    except TierError:
        return "the Redis user may not read appendfsync: allow +config|get"
    return "" if sync in (b"always", b"everysec") else f"appendfsync is {sync.decode(errors='replace')}: set everysec"


def _keys(joined: bytes) -> list[PackedKey]:
    if len(joined) % PACKED_KEY_BYTES:
        raise TierError("the ledger of tenants names keys of an unknown length", where="redis")
    return [joined[at : at + PACKED_KEY_BYTES] for at in range(0, len(joined), PACKED_KEY_BYTES)]


class QuotaRedis(RedisTier):
    """The tier `redis` with quotas and promises."""

    def __init__(self, router: Router, options: RedisOptions, *, local: bool = False) -> None:
        super().__init__(router, options, local=local)
        self._ledger = RedisLedger(router, options.prefix.encode(), options.ttl_s)

    def admit(self, terms: Sequence[Terms], *, deadline: float) -> list[Outcome]:
        self._check(deadline)
        return self._ledger.admit(terms, deadline)

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        outcomes = super().put(keys, parts, deadline=deadline)
        self._ledger.put(keys, outcomes, deadline)
        return outcomes

    def ttl_of(self, key: PackedKey) -> int:
        return 0 if self._ledger.has_promised(key) else super().ttl_of(key)

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        outcomes = super().delete(keys, deadline=deadline)
        self._ledger.gone(keys, deadline)
        return outcomes

    def touch(self, keys: Sequence[PackedKey], *, deadline: float) -> None:
        self._check(deadline)
        super().touch(self._ledger.used(keys, deadline), deadline=deadline)

    def problems(self) -> list[str]:
        return [*super().problems(), *self._ledger.problems()]

    def status(self) -> dict[str, object]:
        return self._ledger.status()

    def ping(self, *, deadline: float) -> None:
        super().ping(deadline=deadline)
        self._ledger.check(deadline)
