"""The schema of the configuration: frozen structs, created once at startup, read by any process."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvframework.api.codec import NO_CODEC
from kvframework.api.endpoint import ObserveConfig
from kvframework.api.plugin import ByteSize
from kvframework.api.tier import MAX_TIER_CALLS

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["human", "json"]
Keep = Literal["off", "auto"]
WritePolicyName = Literal["write_through", "write_through_selective", "write_back"]
Seconds = Annotated[float, Meta(gt=0, le=365 * 24 * 3600.0)]
# The last id means "no change" to the kernel.
Uid = Annotated[int, Meta(ge=0, le=(1 << 32) - 2)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
AtOnce = Annotated[int, Meta(ge=1, le=MAX_TIER_CALLS)]
# An envelope has as many bytes for the name.
CodecName = Annotated[str, Meta(min_length=1, max_length=16, pattern="^[A-Za-z0-9_.-]+$")]


class PluginTable(Struct, frozen=True):
    """One table that names a plugin. `options` are the keys unknown to the core: the plugin validates them.

    `where` is the table's place for error texts, such as "kvf.toml: [[l2]] #1"; `core_keys` are the keys of the same
    table that belong to the core, so that an error about an unknown key can name them.
    """

    use: str
    options: dict[str, object]
    where: str
    core_keys: tuple[str, ...] = ("use",)


class CurveConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[server.curve]`. `kvframework keys new` makes both."""

    secret_key: Annotated[str, Meta(min_length=1, description="file of the server's secret key")]
    clients: Annotated[
        str, Meta(min_length=1, description="folder with the public keys of the clients that may connect over TCP")
    ]


# The bounds of a chunk that the model's geometry decides, in tokens.
LEAST_CHUNK, MOST_CHUNK = 64, 256


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[server]`. `endpoint` "" means `default_endpoint()`. `pin_share`: see `kvframework.storage.l1.leases`."""

    endpoint: Annotated[str, Meta(description="the server's `ipc://` socket; empty: a private one of this user")] = ""
    chunk_size: Annotated[
        int,
        Meta(
            ge=0,
            le=65536,
            description="tokens in a stored object, rounded up to whole blocks of the engine; 0: the "
            "smallest of 64, 128 and 256 with which objects have at least 256 KiB",
        ),
    ] = 0
    tp_lcm: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="least common multiple of the tensor-parallel sizes that share objects; 1: only equal sizes do",
        ),
    ] = 1
    pp_lcm: Annotated[
        int, Meta(ge=1, le=64, description="least common multiple of the pipeline-parallel sizes that share objects")
    ] = 1
    store_lease_s: Annotated[Seconds, Meta(description="longest time an engine may take to copy a store")] = 30.0
    retrieve_lease_s: Annotated[Seconds, Meta(description="longest time an engine may take to copy a load")] = 30.0
    store_share: Annotated[
        Fraction, Meta(description="share of L1 for one client's unfinished stores while other engines are connected")
    ] = 0.5
    pin_share: Annotated[
        Fraction, Meta(description="share of L1 that one client may pin or reserve while other clients need room")
    ] = 0.5
    ticket_s: Annotated[Seconds, Meta(description="longest time a hit stays pinned for its engine")] = 60.0
    price: Annotated[bool, Meta(description="recompute tokens that the engine computes faster than a tier loads")] = (
        False
    )
    session_timeout_s: Annotated[Seconds, Meta(description="silence after which a TCP client's session ends")] = 30.0
    idle_stop_s: Annotated[
        float, Meta(ge=0, le=365 * 24 * 3600.0, description="time without an engine until the server ends; 0: never")
    ] = 0.0
    drain_s: Annotated[float, Meta(ge=0, le=3600.0, description="most time to write L1 to tiers after SIGTERM")] = 0.0
    workers: Annotated[int, Meta(ge=1, le=256, description="number of threads that copy KV for TCP clients")] = 2
    trace_memory: Annotated[
        ByteSize,
        Meta(description="most memory for lookups that `kvframework trace record` has not read yet; 0: no traces"),
    ] = ByteSize(32 << 20)
    tcp: Annotated[
        str, Meta(description="second endpoint, `tcp://ADDRESS:PORT`, for other hosts and users; empty: none")
    ] = ""
    insecure: Annotated[bool, Meta(description="serve `tcp://` without encryption to any client; for tests")] = False
    admit_uids: Annotated[
        tuple[Uid, ...], Meta(max_length=64, description="further users whose processes may use the `ipc://` socket")
    ] = ()
    curve: Annotated[CurveConfig | None, Meta(description="table with the CURVE keys that `tcp` needs")] = None

    @property
    def most_chunk(self) -> int:
        """The tokens of a chunk, those of the largest one where the model decides."""
        return self.chunk_size or MOST_CHUNK


class LogConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[log]`: the form of the server's log on standard error."""

    level: Annotated[LogLevel, Meta(description="lowest level of the log lines that are written")] = "info"
    format: Annotated[LogFormat, Meta(description="format of the log lines; `json`: one object per line")] = "human"


class L1Keys(Struct, frozen=True, forbid_unknown_fields=True):
    """The core's own keys of `[l1]`."""

    high_watermark: Annotated[Fraction, Meta(description="share of the capacity above which L1 begins to evict")] = 1.0
    low_watermark: Annotated[
        Fraction, Meta(description="share of the capacity down to which L1 then evicts; at most `high_watermark`")
    ] = 0.9
    ghosts: Annotated[
        int,
        Meta(ge=0, le=1 << 22, description="number of evicted objects that L1 remembers for `explain`, 256 bytes each"),
    ] = 65536
    keep: Annotated[
        Keep,
        Meta(
            description="`auto`: L1 outlives the server if systemd or `kvframework hold` started the server;"
            " `off`: L1 ends with the server"
        ),
    ] = "auto"


class L2Keys(Struct, frozen=True, forbid_unknown_fields=True):
    """The core's own keys of each `[[l2]]`. `codec` "none" stores bytes as they are."""

    codec: Annotated[CodecName, Meta(description="codec plugin that packs the stored values")] = NO_CODEC
    timeout_s: Annotated[Seconds, Meta(description="longest wait for one call of the tier")] = 2.0
    loads: Annotated[
        AtOnce | None, Meta(description="most batches loaded at once, also of one prompt; not set: the tier's default")
    ] = None
    writes: Annotated[AtOnce | None, Meta(description="most batches written at once; not set: the tier's default")] = (
        None
    )
    write_queue: Annotated[
        int, Meta(ge=1, le=1 << 20, description="most objects that wait to be written; more are not written")
    ] = 1024
    write_policy: Annotated[
        WritePolicyName,
        Meta(
            description="when objects are written: after their store, at their second use, or at their"
            " eviction from L1, which needs `high_watermark` of `[l1]` below 1"
        ),
    ] = "write_through"
    promote: Annotated[bool, Meta(description="also write objects to this tier that a later tier had")] = True
    high_watermark: Annotated[
        Fraction, Meta(description="share of the tier's capacity, if known, above which objects are deleted")
    ] = 0.95
    low_watermark: Annotated[
        Fraction, Meta(description="share of the capacity down to which objects are deleted; at most `high_watermark`")
    ] = 0.85


class TenantKeys(Struct, frozen=True, forbid_unknown_fields=True):
    """`[tenants.NAME]`; see `kvframework.config.tenants`."""

    salts: Annotated[
        tuple[str, ...],
        Meta(min_length=1, max_length=4096, description="digests of the tenant's salts: `kvframework tenants digest`"),
    ]
    min: Annotated[str, Meta(description="share (`20%`) or size (`4GiB`) of L1 that other tenants never evict")] = "0%"
    max: Annotated[str, Meta(description="the tenant's largest part of L1: a share or a size")] = "100%"
    l2_max: Annotated[
        str,
        Meta(pattern="^[^%]*$", description="most bytes in each tier that has `admit`, such as `40GiB`; 0: no limit"),
    ] = "0"
    load_bandwidth: Annotated[
        str, Meta(description="limit of the bytes per second that the tenant loads, such as `2GB/s`; empty: no limit")
    ] = ""


class TenantConfig(Struct, frozen=True):
    """One `[tenants.NAME]`."""

    name: str
    keys: TenantKeys
    where: str


class L1Config(Struct, frozen=True):
    """`[l1]` and `[l1.eviction]`."""

    memory: PluginTable
    eviction: PluginTable
    keys: L1Keys = L1Keys()


class L2Config(Struct, frozen=True):
    """One `[[l2]]`."""

    tier: PluginTable
    keys: L2Keys = L2Keys()


class CodecsConfig(Struct, frozen=True):
    """`[codecs]`: `allow` names further codecs that may be used for reading, beside those that an `[[l2]]` writes with;
    `options` are the tables `[codecs.NAME]`."""

    allow: tuple[CodecName, ...] = ()
    options: tuple[PluginTable, ...] = ()
    where: str = "[codecs]"


class Config(Struct, frozen=True):
    """The whole of one TOML file. `source` is the file's name, or "embedded default"."""

    server: ServerConfig
    l1: L1Config
    transport: tuple[PluginTable, ...]
    layout: tuple[PluginTable, ...]
    l2: tuple[L2Config, ...]
    hasher: PluginTable
    requests: tuple[PluginTable, ...]
    source: str
    log: LogConfig = LogConfig()
    codecs: CodecsConfig = CodecsConfig()
    tenants: tuple[TenantConfig, ...] = ()
    observe: ObserveConfig | None = None
    listener: tuple[PluginTable, ...] = ()


# With this limit, none of the tested crowds took the last descriptor between two checks; figures: docs/security.md.
SAFE_LIMIT = 4096
# The share of the limit from which no new session is accepted.
SESSIONS_SHARE = 0.65
