"""The status document, as REPORT_STATUS returns it and `kvframework status --json` prints it: its fields as types, and
its counters as declarations; and the records of finished requests. docs/status.md explains fields.

`msgspec.json.decode(document, type=Status)` reads a document. All fields have defaults, and unknown ones are
ignored, so documents of other releases can be read. A new counter is a line of this module, beside the one that
counts: the log's reports, `kvframework status`, metrics, the dashboard and docs/reference/status.md follow."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from kvframework.api.counter import Counter
from kvframework.api.listener import Finished
from kvframework.api.plugin import Message

# Why a lookup missed, the keys of `lookups.misses`; in the order of docs/operations.md.
REASONS = {
    "never_stored": "no engine had stored these tokens: the prompt was new, or the store failed",
    "dropped_full": "L1 was full of objects in use when the tokens were stored: raise [l1] capacity",
    "dropped_share": "a client or tenant had used up its share: raise store_share, pin_share or the tenant's max",
    "refused": "the eviction policy refused to store the tokens",
    "evicted": "L1 evicted the tokens before the next lookup: raise [l1] capacity, or attach a tier",
    "other_namespace": "another engine stored the tokens under another model, weights or layout",
    "other_salt": "the tokens are stored under another salt",
    "priced": "engines compute the tokens sooner than a tier loads them",
    "bandwidth": "the tenant was above its load_bandwidth",
    "tier_down": "a tier did not answer: see `kvframework status`",
    "timed_out": "a tier answered after the lookup's deadline",
    "damaged": "the stored value in a tier was damaged",
    "cleared": "an operator cleared the cache",
    "server_started": "the server started with an empty L1",
    "unknown_namespace": "the engine's worker is not registered",
}

# Why a server began with an empty L1, the first word of `l1.recovered.why_cold`; in the order of docs/restart.md.
COLD_REASONS = (
    "no_keeper",
    "memory_cannot",
    "keeper_failed",
    "nothing_kept",
    "incomplete",
    "no_journal",
    "other_release",
    "other_machine",
    "other_configuration",
    "failed_starts",
    "damaged",
)
# Records of finished requests that one answer holds at most.
MAX_RECENT = 1024
_ANSWERED = Counter("requests", "were answered with an error", trouble=True)
# Families of metrics of several counters.
_AHEAD = "l1_prefetched_bytes_total"
_CALLS_FAILED = "tier_calls_failed_total"
_EVENTS = "events_total"
_EVICTIONS = "l1_evictions_total"
_L1_OBJECTS = "l1_object_events_total"
_LOST = "client_lost_total"
_NEVER_WRITTEN = "tier_never_written_total"
_TROUBLE = "messaging_trouble_total"
_VALUES = "tier_values_total"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the document."""


class Problem(Part, frozen=True):
    """A current problem: the field of the document that it concerns, and the fact."""

    where: str = ""
    fact: str = ""


class Histogram(Part, frozen=True):
    """Durations by octaves, in seconds: `counts[i]` took less than `first` x 2^(i + 1), at least half of that."""

    first: float = 0.0
    counts: tuple[int, ...] = ()
    sum: float = 0.0


class Server(Part, frozen=True):
    """The server's identity, configuration and age in seconds."""

    version: str = ""
    boot_id: str = ""
    pid: int = 0
    started_at: str = ""
    uptime_s: float = 0.0
    endpoint: str = ""
    tcp: str = ""
    config: str = ""
    chunk_size: int = 0
    least_chunk: int = 0
    missing_kernels: tuple[str, ...] = ()


class Instance(Part, frozen=True):
    """The KV memory that an engine has registered: its shapes, block sizes in tokens, and transport."""

    instance_id: int = 0
    session_id: int = 0
    pid: int = 0
    model: str = ""
    world_size: int = 1
    rank: int | None = None
    shards: tuple[int, ...] = ()
    namespace: str = ""
    transport: str = ""
    is_gpu: bool = False
    lost: str | None = None
    layers: int = 0
    block_size: int = 0
    logical_block_size: int = 0
    hidden_sizes: tuple[int, ...] = ()
    dtype: str = ""
    model_dtype: str = ""
    mla: bool = False
    num_blocks: int = 0
    format: str = ""
    axes: tuple[tuple[str, ...], ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    forms: tuple[str, ...] = ()
    chunk_tokens: int = 0
    bytes_per_token: float = 0.0
    group_physical_block_sizes: tuple[int, ...] = ()
    group_compress_ratios: tuple[int, ...] = ()


class ModelLookups(Part, frozen=True):
    """Finished lookups of one model, in tokens: asked, found in L1, loaded from L2."""

    lookups: int = 0
    asked_tokens: int = 0
    l1_tokens: int = 0
    l2_tokens: int = 0


class LastHour(Part, frozen=True):
    """Lookups of the last hour, to a minute, with tokens asked and found, and the seconds of prefill saved."""

    lookups: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    prefill_saved_s: float = 0.0


class Lookups(Part, frozen=True):
    """Lookups since the start, with tokens asked and found, and misses by reason."""

    lookups: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    unknown_namespace: int = 0
    prefill_saved_s: float = 0.0
    last_hour: LastHour = LastHour()
    by_model: dict[str, ModelLookups] = {}
    misses: dict[str, int] = {}


class Engine(Part, frozen=True):
    """The speed that a connected engine last reported, in tokens per second."""

    client: str = ""
    pid: int = 0
    tokens_per_s: float = 0.0
    attention_tokens: float = 0.0
    queued_s: float = 0.0


class Price(Part, frozen=True):
    """Lookups whose loads were priced, and the seconds that cutting them has saved."""

    on: bool = False
    lookups: int = 0
    cut: int = 0
    cut_tokens: int = 0
    saved_s: float = 0.0
    engines: tuple[Engine, ...] = ()


class Account(Part, frozen=True):
    """The use of L1 by one model, tenant, namespace or engine."""

    bytes: int = 0
    objects: int = 0
    lookups: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    stored_objects: int = 0
    evicted_objects: int = 0
    prefill_saved_s: float = 0.0
    limited: int = 0


class HotPrefix(Part, frozen=True):
    """One of the most used prefixes, with its tokens and an upper bound of the counting error."""

    model: str = ""
    prefix: str = ""
    hit_tokens: int = 0
    count: int = 0
    error: int = 0


class Use(Part, frozen=True):
    """Bytes in L1, lookups and evictions by model, tenant, namespace and engine."""

    models: dict[str, Account] = {}
    tenants: dict[str, Account] = {}
    namespaces: dict[str, Account] = {}
    engines: dict[str, Account] = {}
    hot_prefixes: tuple[HotPrefix, ...] = ()


class Device(Part, frozen=True):
    """One accelerator and its copier process."""

    device: str = ""
    pid: int | None = None
    starts: int = 0
    instances: int = 0
    copies: int = 0
    last_error: str = ""
    lacks: tuple[str, ...] = ()


class OwnCounter(Part, frozen=True):
    """A counter that a plugin declares, see `kvframework.api.counter.Counts`."""

    value: int = 0
    unit: str = ""
    meaning: str = ""
    trouble: bool = False


class Transport(Part, frozen=True):
    """A device transport: its copiers, and the counters of its plugin."""

    devices: tuple[Device, ...] = ()
    counters: dict[str, OwnCounter] = {}


class Recovered(Part, frozen=True):
    """The content that L1 took over at the start, in objects, bytes and seconds, or the reason why L1 began empty."""

    objects: int = 0
    bytes: int = 0
    seconds: float = 0.0
    why_cold: str = ""
    verified: int = 0
    damaged: int = 0


class Evicted(Part, frozen=True):
    """Objects evicted from L1 by cause."""

    room: Annotated[int, Counter("objects", "were evicted to make room for another object", False, _EVICTIONS)] = 0
    watermark: Annotated[int, Counter("objects", "were evicted to get below the high watermark", False, _EVICTIONS)] = 0
    tenant: Annotated[int, Counter("objects", "were evicted to keep a tenant within its share", False, _EVICTIONS)] = 0
    hinted: Annotated[int, Counter("objects", "were evicted early by a request's hint", False, _EVICTIONS)] = 0


class Ghosts(Part, frozen=True):
    """The remembered keys of evicted objects: their number, its limit, and their bytes."""

    held: int = 0
    most: int = 0
    bytes: int = 0


class Capacity(Part, frozen=True):
    """The hit rate (0 to 1) that L1 would have with `capacity_bytes`."""

    capacity_bytes: int = 0
    hit_rate: float = 0.0


class L1Counters(Part, frozen=True):
    """Objects and leases of L1 since the start."""

    stored: Annotated[int, Counter("objects", "were stored by engines", False, _L1_OBJECTS)] = 0
    loaded: Annotated[int, Counter("objects", "were loaded from L2", False, _L1_OBJECTS)] = 0
    aborted: Annotated[int, Counter("objects", "were aborted by the storing client", False, _L1_OBJECTS)] = 0
    dropped: Annotated[int, Counter("objects", "had no room in L1", True, _L1_OBJECTS)] = 0
    forgotten: Annotated[int, Counter("objects", "were deleted by `clear`", False, _L1_OBJECTS)] = 0
    ahead_used_bytes: Annotated[int, Counter("bytes", "were prefetched and used", False, _AHEAD, "used")] = 0
    ahead_wasted_bytes: Annotated[
        int, Counter("bytes", "were prefetched and left L1 unused", False, _AHEAD, "wasted")
    ] = 0
    retrieves: Annotated[int, Counter("RETRIEVEs", "", False, "retrieves_total")] = 0
    retrieve_misses: Annotated[int, Counter("RETRIEVEs", "missed an object", False, "retrieve_misses_total")] = 0
    lapsed: Annotated[int, Counter("pins", "expired after ticket_s or retrieve_lease_s", True, "pins_lapsed_total")] = 0
    over_share: Annotated[
        int, Counter("leases", "were ended or refused because of pin_share", True, "pins_over_share_total")
    ] = 0
    quarantined: Annotated[int, Counter("stores", "exceeded store_lease_s", True, "stores_quarantined_total")] = 0


class L1(Part, frozen=True):
    """The memory tier: bytes, objects, pins, leases and evictions."""

    capacity_bytes: int = 0
    ready_bytes: int = 0
    used_bytes: int = 0
    free_bytes: int = 0
    largest_free_bytes: int = 0
    fragmentation: float = 0.0
    quarantined_bytes: int = 0
    objects: int = 0
    pins: int = 0
    write_leases: int = 0
    pin_leases: int = 0
    evictions: int = 0
    recovered: Recovered = Recovered()
    journal_bytes: int = 0
    evicted: Evicted = Evicted()
    evicted_idle_s: Histogram = Histogram()
    wanted_after_eviction_s: Histogram = Histogram()
    ghosts: Ghosts = Ghosts()
    more_capacity: tuple[Capacity, ...] = ()
    counters: L1Counters = L1Counters()


class Usage(Part, frozen=True):
    """Bytes that a tier uses, and its capacity in bytes."""

    used_bytes: int = 0
    capacity_bytes: int = 0


class Circuits(Part, frozen=True):
    """The circuit breakers of a tier: `closed` works, `open` and `half-open` are down."""

    read: str = ""
    write: str = ""


class Latency(Part, frozen=True):
    """Durations of calls that worked, in milliseconds."""

    count: int = 0
    p50: float = 0.0
    p99: float = 0.0


class TierCounters(Part, frozen=True):
    """Values, bytes and failed calls of a tier since the start."""

    hits: Annotated[int, Counter("values", "were loaded", False, _VALUES, "hit")] = 0
    misses: Annotated[int, Counter("values", "were missing", False, _VALUES, "miss")] = 0
    stored: Annotated[int, Counter("values", "were stored", False, _VALUES)] = 0
    evicted: Annotated[int, Counter("values", "were evicted to keep below the high watermark", False, _VALUES)] = 0
    read_failed: Annotated[int, Counter("values", "could not be read", True, _VALUES)] = 0
    store_failed: Annotated[int, Counter("values", "could not be stored", True, _VALUES)] = 0
    corrupt: Annotated[int, Counter("values", "were damaged and were deleted", True, _VALUES)] = 0
    codec_failed: Annotated[int, Counter("values", "could not be unpacked", True, _VALUES)] = 0
    foreign_codec: Annotated[int, Counter("values", "were packed by a codec that is not allowed", True, _VALUES)] = 0
    forged: Annotated[int, Counter("values", "were not what was sealed under their name", True, _VALUES)] = 0
    no_key: Annotated[int, Counter("values", "had no key here that opens them", True, _VALUES)] = 0
    unsealed: Annotated[int, Counter("values", "were plain in a tier of sealed ones", True, _VALUES)] = 0
    bytes_read: Annotated[int, Counter("bytes of values", "were read", False, "tier_bytes_total", "read")] = 0
    bytes_written: Annotated[int, Counter("bytes of values", "were written", False, "tier_bytes_total", "write")] = 0
    errors: Annotated[int, Counter("tier calls", "failed", True, _CALLS_FAILED, "error")] = 0
    bugs: Annotated[int, Counter("tier calls", "failed because of a bug in the plugin", True, _CALLS_FAILED, "bug")] = 0
    refused: Annotated[int, Counter("tier calls", "were skipped: the tier is down", True, _CALLS_FAILED)] = 0
    promised: Annotated[int, Counter("values", "are promised to be kept", False, _VALUES)] = 0
    promise_refused: Annotated[int, Counter("values", "could not be promised to be kept", False, _VALUES)] = 0
    write_dropped: Annotated[int, Counter("objects", "had no room in write_queue", True, _NEVER_WRITTEN, "dropped")] = 0
    write_lost: Annotated[
        int, Counter("objects", "left L1 before the tier wrote them", True, _NEVER_WRITTEN, "lost")
    ] = 0
    write_given_up: Annotated[int, Counter("objects", "could not be written", True, _NEVER_WRITTEN, "given_up")] = 0


class Tier(TierCounters, frozen=True):
    """A tier of L2. `details` are its plugin's own facts."""

    name: str = ""
    codec: str = ""
    read_only: bool = False
    problems: tuple[str, ...] = ()
    details: dict[str, Any] = {}
    capabilities: tuple[str, ...] = ()
    usage: Usage | None = None
    load_bytes_per_s: float = 0.0
    load_call_s: float = 0.0
    load_queued_bytes: int = 0
    state: str = ""
    state_s: float = 0.0
    circuits: Circuits = Circuits()
    last_error: str = ""
    pending_calls: int = 0
    oldest_call_s: float = 0.0
    overdue_call: str = ""
    overdue_s: float = 0.0
    latency_ms: dict[str, Latency] = {}
    seconds: dict[str, Histogram] = {}
    write_policy: str = ""
    promote: bool = False
    write_pending: int = 0
    loads: int = 0
    writes: int = 0


class LostBy(Part, frozen=True):
    """Calls that one client lost within the last 60 s, by kind and error code."""

    session_id: int = 0
    client: str = ""
    pid: int = 0
    lookups: int = 0
    loads: int = 0
    stores: int = 0
    bytes: int = 0
    codes: dict[str, int] = {}
    ago_s: float = 0.0


class Losses(Part, frozen=True):
    """Calls that failed at clients, those that have ended included."""

    lookups: Annotated[int, Counter("client lookups", "failed", True, _LOST)] = 0
    loads: Annotated[int, Counter("client loads", "failed", True, _LOST)] = 0
    stores: Annotated[int, Counter("client stores", "failed", True, _LOST)] = 0
    bytes: Annotated[int, Counter("bytes", "of failed client calls were lost", False, "client_lost_bytes_total")] = 0
    recent: tuple[LostBy, ...] = ()


class Prefetch(Part, frozen=True):
    """The current loads from L2."""

    in_flight: int = 0
    refused: Annotated[int, Counter("loads", "were refused: too many at once", True, "prefetch_refused_total")] = 0


class Drain(Part, frozen=True):
    """The write of what only L1 holds before the server ends, in `left_s` seconds at most: objects written, objects and
    bytes left, and for each tier that lacks some their number and its last error. `done` is null without a drain."""

    done: bool | None = None
    left_s: float = 0.0
    written: int = 0
    left: int = 0
    left_bytes: int = 0
    tiers: tuple[str, ...] = ()


class Log(Part, frozen=True):
    """Lines of the server's log that wait to be written, and why."""

    waiting: int = 0
    dropped: Annotated[int, Counter("log lines", "were lost", True, "log_dropped_total")] = 0
    problem: str = ""


class Observe(Part, frozen=True):
    """The process of `kvframework observe` that the server keeps; empty without one."""

    listen: str = ""
    pid: int | None = None
    starts: int = 0
    problem: str = ""


class EventsCounters(Part, frozen=True):
    """Batches of events and questions for replays since the start."""

    batches: Annotated[int, Counter("batches", "were sent to routers", False, _EVENTS)] = 0
    replays: Annotated[int, Counter("replays", "of missed events were sent to routers", False, _EVENTS)] = 0
    unread_replays: Annotated[int, Counter("replays", "were not read by their router", False, _EVENTS)] = 0
    subscribers: Annotated[int, Counter("subscriptions", "", False, _EVENTS)] = 0
    bad_requests: Annotated[int, Counter("router requests", "were malformed", False, _EVENTS)] = 0
    curve_refused: Annotated[int, Counter("event readers", "had an unknown key", True, _EVENTS)] = 0
    dropped: Annotated[int, Counter("changes of L1", "were not sent to routers", True, "events_dropped_total")] = 0
    mismatched: Annotated[int, Counter("chunks", "did not match their digest", True, "events_withheld_total")] = 0
    withheld: Annotated[int, Counter("chunks", "were withheld from routers", False, "events_withheld_total")] = 0


class Events(Part, frozen=True):
    """The events published for routers; empty without `[events]`."""

    endpoint: str = ""
    replay: str = ""
    blocks: dict[str, int] = {}
    next_number: int = 0
    waiting: int = 0
    ledger_bytes: int = 0
    problem: str = ""
    counters: EventsCounters = EventsCounters()


class MessagingCounters(Part, frozen=True):
    """Requests and answers since the start. Further keys, `errors.CODE`, count answers by error code."""

    requests: Annotated[int, Counter("requests", "were received", False, "messages_total")] = 0
    responses: Annotated[int, Counter("answers", "were sent", False, "messages_total")] = 0
    errors: Annotated[int, Counter("answers", "were errors", False, "messages_total")] = 0
    sessions_opened: Annotated[int, Counter("clients", "connected", False, "clients_total", "opened")] = 0
    sessions_ended: Annotated[int, Counter("clients", "ended", False, "clients_total", "ended")] = 0
    curve_refused: Annotated[int, Counter("connections", "had an unknown key", True, _TROUBLE)] = 0
    dropped: Annotated[int, Counter("answers", "did not reach their client", True, _TROUBLE)] = 0
    hello_refused: Annotated[int, Counter("clients", "were refused", True, _TROUBLE)] = 0
    late: Annotated[int, Counter("answers", "arrived after their deadline", True, _TROUBLE)] = 0
    liveness_refused: Annotated[int, Counter("liveness sockets", "were refused", True, _TROUBLE)] = 0
    local_shut: Annotated[int, Counter("times", "local connections waited for descriptors", True, _TROUBLE)] = 0
    loop_errors: Annotated[int, Counter("internal errors", "occurred in the serving loop", True, _TROUBLE)] = 0
    malformed: Annotated[int, Counter("messages", "were malformed", True, _TROUBLE)] = 0
    server_refused: Annotated[int, Counter("clients", "refused this server", True, _TROUBLE)] = 0
    tick_errors: Annotated[int, Counter("internal errors", "occurred in periodic work", True, _TROUBLE)] = 0
    unanswerable: Annotated[int, Counter("messages", "had no request id", True, _TROUBLE)] = 0
    unroutable: Annotated[int, Counter("answers", "were dropped: their client has ended", False, _TROUBLE)] = 0


class Descriptors(Part, frozen=True):
    """Open file descriptors, their limit, and whether new peers are accepted."""

    in_use: int = 0
    limit: int = 0
    sessions: bool = True
    local: bool = True
    readers: bool = True


class Session(Part, frozen=True):
    """A connected client: process, protocol version, bytes it keeps from eviction."""

    session_id: int = 0
    pid: int = 0
    name: str = ""
    local: bool = False
    version: int = 0
    client_version: str = ""
    pinned_bytes: int = 0
    over_share: int = 0


class Refused(Part, frozen=True):
    """A refused client, or one that refuses the server."""

    client: str = ""
    pid: int = 0
    client_version: str = ""
    versions: str = ""
    what: str = ""
    code: str = ""
    reason: str = ""
    count: int = 0
    ago_s: float = 0.0


class Messaging(Part, frozen=True):
    """Connections: sessions, refused clients, descriptors and counters."""

    descriptors: Descriptors = Descriptors()
    sessions: tuple[Session, ...] = ()
    refused: tuple[Refused, ...] = ()
    counters: MessagingCounters = MessagingCounters()


class Status(Part, frozen=True):
    """The whole document."""

    server: Server = Server()
    problems: tuple[Problem, ...] = ()
    instances: tuple[Instance, ...] = ()
    gpu_instance_ids: tuple[int, ...] = ()
    non_gpu_instance_ids: tuple[int, ...] = ()
    namespaces: tuple[str, ...] = ()
    tickets: int = 0
    lookups: Lookups = Lookups()
    price: Price = Price()
    use: Use = Use()
    requests: dict[str, Histogram] = {}
    transports: dict[str, Transport] = {}
    l1: L1 = L1()
    l2: tuple[Tier, ...] = ()
    losses: Losses = Losses()
    prefetch: Prefetch = Prefetch()
    drain: Drain = Drain()
    log: Log = Log()
    observe: Observe = Observe()
    events: Events = Events()
    listeners: dict[str, Any] = {}
    messaging: Messaging = Messaging()


class RecentReply(Message, frozen=True):
    """The answer to RECENT, the oldest first. `last` is the number of the newest record, 0 for none; `forgotten` is the
    number of those after `after` that are no longer held; `boot_id` and `started_at` (wall clock) name the server's
    start, after which numbers begin again."""

    records: Annotated[tuple[Finished, ...], msgspec.Meta(max_length=MAX_RECENT)]
    last: int
    forgotten: int
    boot_id: bytes
    started_at: float


def counted(document: Mapping[str, Any], kind: type[Part] = Status, at: str = "") -> Iterator[tuple[str, Counter, int]]:
    """Yield each counter of a document by its place, such as `l2.0.hits`, with its value. An absent part has none."""
    for name, (inner, counter) in _fields(kind).items():
        value, place = document.get(name), f"{at}{name}"
        if counter is not None:
            yield place, counter, value or 0
        elif not value:
            continue
        elif inner == tuple[Tier, ...]:
            for number, tier in enumerate(value):
                yield from counted(tier, Tier, f"{place}.{number}.")
                yield from _own(tier.get("details"), f"{place}.{number}.details.counters.")
        elif inner == dict[str, Transport]:
            for transport, status in value.items():
                yield from _own(status, f"{place}.{transport}.counters.")
        elif isinstance(inner, type) and issubclass(inner, Part):
            yield from counted(value, inner, f"{place}.")


def trouble(document: Mapping[str, Any]) -> Iterator[tuple[str, Counter, int]]:
    """Yield the counters of failures that are not 0 by their place, with their values; answered errors last."""
    for place, counter, amount in counted(document):
        if counter.trouble and amount:
            yield place, counter, amount
    answered = document.get("messaging", {}).get("counters", {})
    for name in sorted(answered):
        if name.startswith("errors.") and answered[name]:  # followed by the error's code
            yield f"messaging.counters.{name}", _ANSWERED, answered[name]


def own_counters(status: object) -> dict[str, OwnCounter]:
    """Return the counters that a plugin declares in its status, by name. Invalid ones are ignored."""
    declared = status.get("counters") if isinstance(status, Mapping) else None
    try:
        return msgspec.convert(declared or {}, dict[str, OwnCounter])
    except msgspec.ValidationError:
        return {}


def _own(status: object, at: str) -> Iterator[tuple[str, Counter, int]]:
    for name, each in own_counters(status).items():
        yield f"{at}{name}", Counter(each.unit, each.meaning, each.trouble), each.value


def places(kind: type[Part] = Status, at: str = "") -> Iterator[tuple[str, Counter | None]]:
    """Yield each field's place, and its declaration if it is a counter. `[]` is an item of a list, `*` of a map."""
    for name, (inner, counter) in _fields(kind).items():
        place = f"{at}{name}"
        origin, items = get_origin(inner), [each for each in get_args(inner) if each is not type(None)]
        if origin is dict and items[1] is not Any:
            inner, place = items[1], f"{place}.*"
        elif origin is tuple and isinstance(items[0], type) and issubclass(items[0], Part):
            inner, place = items[0], f"{place}[]"
        elif origin is not tuple and origin is not dict and items:
            inner = items[0]
        if isinstance(inner, type) and issubclass(inner, Part):
            yield from places(inner, f"{place}.")
        else:
            yield place, counter


def zeros(kind: type[Part]) -> dict[str, int]:
    """Return the counters of a part by name, all 0."""
    return {name: 0 for name, (_, counter) in _fields(kind).items() if counter is not None}


@functools.cache
def _fields(kind: type[Part]) -> dict[str, tuple[Any, Counter | None]]:
    """Return the type of each field, and its declaration if it is a counter."""
    found: dict[str, tuple[Any, Counter | None]] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        counter = next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Counter)), None)
        found[name] = get_args(hint)[0] if counter is not None else hint, counter
    return found


# The declarations by their place, such as `l2[].hits`.
COUNTERS = {place: counter for place, counter in places() if counter is not None}
