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
# The bounds of a tier's threads.
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
            description="tokens of a stored object, rounded up to whole blocks of the engine; 0: by the model, the "
            "fewest of 64, 128 and 256 at which a rank's object has 256 KiB",
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
        int, Meta(ge=1, le=64, description="the same of their pipeline-parallel sizes, beside `tp_lcm`")
    ] = 1
    store_lease_s: Annotated[
        Seconds, Meta(description="how long an engine may take from a reservation to its commit")
    ] = 30.0
    retrieve_lease_s: Annotated[Seconds, Meta(description="how long an engine may take to copy what it loads")] = 30.0
    store_share: Annotated[
        Fraction, Meta(description="share of L1 that one client may have reserved at once while others have instances")
    ] = 0.5
    pin_share: Annotated[
        Fraction,
        Meta(description="share of L1 that one client keeps from eviction, pinned or reserved, while others need room"),
    ] = 0.5
    ticket_s: Annotated[Seconds, Meta(description="how long a hit stays pinned for its engine at most")] = 60.0
    price: Annotated[
        bool,
        Meta(description="what an engine computes sooner than a tier loads it is computed, if it says how fast it is"),
    ] = False
    session_timeout_s: Annotated[Seconds, Meta(description="longest silence of a client without a liveness socket")] = (
        30.0
    )
    idle_stop_s: Annotated[
        float, Meta(ge=0, le=365 * 24 * 3600.0, description="so long without an engine it drains and ends; 0: never")
    ] = 0.0
    drain_s: Annotated[float, Meta(ge=0, le=3600.0, description="most time to write the rest of L1 after SIGTERM")] = (
        0.0
    )
    workers: Annotated[int, Meta(ge=1, le=256, description="threads that copy the KV of clients over TCP")] = 2
    trace_memory: Annotated[
        ByteSize,
        Meta(description="most memory for lookups that `kvframework trace record` has yet to fetch; 0: it is refused"),
    ] = ByteSize(32 << 20)
    tcp: Annotated[
        str, Meta(description="a second endpoint, `tcp://ADDRESS:PORT`, for other hosts and users; empty: none")
    ] = ""
    insecure: Annotated[bool, Meta(description="serves `tcp://` in plain text to any client, for tests")] = False
    admit_uids: Annotated[
        tuple[Uid, ...], Meta(max_length=64, description="further users whose processes may use the `ipc://` socket")
    ] = ()
    curve: Annotated[CurveConfig | None, Meta(description="the table `[server.curve]`, which `tcp` needs")] = None

    @property
    def most_chunk(self) -> int:
        """The tokens of a chunk, those of the largest one where the model decides."""
        return self.chunk_size or MOST_CHUNK


class LogConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[log]`: the form of the server's log on standard error."""

    level: Annotated[LogLevel, Meta(description="least level of a line that is written")] = "info"
    format: Annotated[LogFormat, Meta(description="form of the lines on standard error; `json`: one object a line")] = (
        "human"
    )


class L1Keys(Struct, frozen=True, forbid_unknown_fields=True):
    """The core's own keys of `[l1]`."""

    high_watermark: Annotated[
        Fraction, Meta(description="share of the capacity above which L1 evicts, before it is full")
    ] = 1.0
    low_watermark: Annotated[
        Fraction, Meta(description="share down to which it evicts then; never above `high_watermark`")
    ] = 0.9
    ghosts: Annotated[
        int, Meta(ge=0, le=1 << 22, description="objects that left L1 and why, remembered in about 256 bytes each")
    ] = 65536
    keep: Annotated[
        Keep,
        Meta(
            description="`auto`: systemd or `kvframework hold`, where one started the server, keeps L1 over its end;"
            " `off`: L1 ends with the server"
        ),
    ] = "auto"


class L2Keys(Struct, frozen=True, forbid_unknown_fields=True):
    """The core's own keys of each `[[l2]]`. `codec` "none" stores bytes as they are."""

    codec: Annotated[CodecName, Meta(description="how values are packed, a codec plugin")] = NO_CODEC
    timeout_s: Annotated[Seconds, Meta(description="longest wait for one call of the tier")] = 2.0
    loads: Annotated[
        AtOnce | None,
        Meta(description="how many batches are loaded at once, also of one prompt; not set: as the tier says"),
    ] = None
    writes: Annotated[
        AtOnce | None, Meta(description="how many batches are written at once; not set: as the tier says")
    ] = None
    write_queue: Annotated[
        int, Meta(ge=1, le=1 << 20, description="objects that may wait to be written; further ones are not written")
    ] = 1024
    write_policy: Annotated[
        WritePolicyName,
        Meta(
            description="which objects are written, and when: all after their commit, at their second use, or at their"
            " eviction from L1, which needs `high_watermark` of `[l1]` below 1"
        ),
    ] = "write_through"
    promote: Annotated[bool, Meta(description="whether it also gets what a later tier had")] = True
    high_watermark: Annotated[
        Fraction, Meta(description="share of its capacity above which a tier that knows it is emptied")
    ] = 0.95
    low_watermark: Annotated[
        Fraction, Meta(description="share down to which it is emptied then; never above `high_watermark`")
    ] = 0.85


class TenantKeys(Struct, frozen=True, forbid_unknown_fields=True):
    """`[tenants.NAME]`; see `kvframework.config.tenants`."""

    salts: Annotated[
        tuple[str, ...],
        Meta(min_length=1, max_length=4096, description="digests of its salts, of `kvframework tenants digest`"),
    ]
    min: Annotated[
        str, Meta(description="what others never evict, as a share of L1 such as `20%` or a size such as `4GiB`")
    ] = "0%"
    max: Annotated[str, Meta(description="the most that it gets of L1, in the same form")] = "100%"


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
    events: PluginTable | None = None
    listener: tuple[PluginTable, ...] = ()

    @property
    def listeners(self) -> tuple[PluginTable, ...]:
        """Every table of a listener: `[events]` is that of the one of this name."""
        return (self.events, *self.listener) if self.events else self.listener


# With at least this limit, none of the tested crowds took the last descriptor between two checks; docs/security.md has
# the figures.
SAFE_LIMIT = 4096
# The share of the limit from which no new session is accepted.
SESSIONS_SHARE = 0.65
