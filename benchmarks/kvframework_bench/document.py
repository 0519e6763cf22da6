"""The document of one run, which `--json` prints. Every figure of it comes from one run on one machine."""

from __future__ import annotations

import msgspec

from kvframework_bench.blend.figures import BlendFigures
from kvframework_bench.contention.figures import ContentionFigures
from kvframework_bench.cuda.figures import CudaFigures
from kvframework_bench.decode.figures import DecodeFigures
from kvframework_bench.disaggregated.figures import DisaggregatedFigures
from kvframework_bench.events.figures import EventsFigures
from kvframework_bench.l2.figures import L2Figures
from kvframework_bench.machine import Load, Machine
from kvframework_bench.node.figures import NodeFigures
from kvframework_bench.observe.figures import ObserveFigures
from kvframework_bench.outside.figures import OutsideFigures
from kvframework_bench.policy.figures import PolicyFigures
from kvframework_bench.rounds import Latency, Spread
from kvframework_bench.route.figures import RouteFigures
from kvframework_bench.scale.figures import ScaleFigures
from kvframework_bench.server import Resident
from kvframework_bench.serving.figures import ServingFigures
from kvframework_bench.shards.figures import ShardsFigures


class Throughput(msgspec.Struct, frozen=True):
    """`nbytes` moved once, in GB (10^9 bytes) a second."""

    name: str
    nbytes: int
    gb_s: Spread


class Echo(msgspec.Struct, frozen=True):
    """A bare message of `nbytes` there and back."""

    nbytes: int
    latency: Latency


class ServerAtRest(msgspec.Struct, frozen=True):
    """`memory` besides the arena is `anon` and `file`; `start_s` from the start of the process to its first answer."""

    memory: Resident
    torch_loaded: bool
    start_s: Spread
    idle_cores: float


class HostFigures(msgspec.Struct, frozen=True):
    """`copy` names the fastest of `copies`: the reference of all bulk figures."""

    copies: list[Throughput]
    copy: str
    echoes: list[Echo]
    transfers: list[Throughput]
    server: ServerAtRest


class RequestFigures(msgspec.Struct, frozen=True):
    """A request and its answer as the caller sees them, next to a bare echo of the request's size. `target_ratio` is
    the target, 0 for none."""

    name: str
    tokens: int
    request_bytes: int
    latency: Latency
    echo: Latency
    ratio: Spread
    target_ratio: float = 0.0


class HashFigures(msgspec.Struct, frozen=True):
    """Hashing a request once: from the engine's list of token ids, and `packed`, from bytes. The ratios are to one pass
    of the bare hash over the same bytes, None without one."""

    tokens: int
    hasher: str
    latency: Latency
    ratio: Spread | None
    packed: Latency
    packed_ratio: Spread | None


class LookupFigures(msgspec.Struct, frozen=True):
    requests: list[RequestFigures]
    hashing: list[HashFigures]


class TransferFigures(msgspec.Struct, frozen=True):
    """Stores or retrieves. `first_gb_s` is the speed of the first one of several engines, each with a new server, a
    second after its registration. `ratio_to_copy` and `ratio_to_zmq` are shares of the references' speed, the latter
    for the wire path only."""

    gb_s: Spread
    first_gb_s: Spread
    ratio_to_copy: Spread
    ratio_to_zmq: Spread | None = None


class ShapeFigures(msgspec.Struct, frozen=True):
    """One shape's figures. `verified` says that every byte was compared after the first and after the last retrieve."""

    shape: str
    summary: str
    bytes_per_token: int
    tokens: int
    nbytes: int
    rounds: int
    verified: bool
    copy: Throughput
    store: TransferFigures
    retrieve: TransferFigures
    target_ratio: float


class StoreFigures(msgspec.Struct, frozen=True):
    path: str
    blocks: str
    shapes: list[ShapeFigures]


class MemcachedFigures(msgspec.Struct, frozen=True):
    """memcached -e after an end: whether the last of the items is a hit, and the seconds from its start to its first
    answer."""

    end: str
    items: int
    hit: bool
    answer_s: float


class RestartFigures(msgspec.Struct, frozen=True):
    """Kills of a kept server. `first_hit` is the time from kill -9 on, `read_s` that part of it in which the server
    reads the journal and takes over its objects. `memcached` is empty where it is not installed."""

    objects: int
    object_bytes: int
    first_hit: Latency
    first_hit_s: Spread
    read_s: Spread
    target_s: float
    memcached: list[MemcachedFigures]


Figures = (
    HostFigures
    | LookupFigures
    | StoreFigures
    | L2Figures
    | ScaleFigures
    | ContentionFigures
    | ObserveFigures
    | EventsFigures
    | RouteFigures
    | CudaFigures
    | RestartFigures
    | ShardsFigures
    | PolicyFigures
    | BlendFigures
    | NodeFigures
    | ServingFigures
    | DecodeFigures
    | DisaggregatedFigures
    | OutsideFigures
)


# By the name of the bench.
FIGURES: dict[str, type[Figures]] = {
    "host": HostFigures,
    "lookup": LookupFigures,
    "store": StoreFigures,
    "transport": StoreFigures,
    "l2": L2Figures,
    "scale": ScaleFigures,
    "contention": ContentionFigures,
    "observe": ObserveFigures,
    "events": EventsFigures,
    "route": RouteFigures,
    "cuda": CudaFigures,
    "restart": RestartFigures,
    "shards": ShardsFigures,
    "policy": PolicyFigures,
    "node": NodeFigures,
    "blend": BlendFigures,
    "serving": ServingFigures,
    "decode": DecodeFigures,
    "disaggregated": DisaggregatedFigures,
    "outside": OutsideFigures,
}


class Document(msgspec.Struct, frozen=True):
    """One run of one bench. `quick` says that sizes and rounds were small: no figures to publish."""

    bench: str
    quick: bool
    machine: Machine
    load: Load
    figures: Figures

    def as_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self)).decode()
