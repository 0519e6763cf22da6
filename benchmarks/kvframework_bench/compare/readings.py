"""What each figure of a document means to a comparison: whether more of it is better, and whether it is a ratio.

A figure that is not here is not compared. Of every spread and every latency it has to be said, if only that it is a
reference: a test holds this table to the structs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from kvframework_bench.blend.figures import WayRow
from kvframework_bench.contention.figures import (
    HitRow,
    SpinningShape,
    SpinningTransfers,
    StoringFigures,
    StoringLookup,
)
from kvframework_bench.cuda.figures import MatmulFigures, MatmulRow, Moved, StepFigures, SubmitRow, SweepRow
from kvframework_bench.decode.figures import DecodeRow
from kvframework_bench.disaggregated.figures import DisaggregatedRow
from kvframework_bench.document import (
    Echo,
    HashFigures,
    RequestFigures,
    RestartFigures,
    ServerAtRest,
    ShapeFigures,
    Throughput,
    TransferFigures,
)
from kvframework_bench.events.figures import TellingCost
from kvframework_bench.l2.figures import (
    CodecRow,
    DiskRow,
    EngineRow,
    MemoryRow,
    MooncakeRow,
    NewRow,
    RedisRow,
    S3Row,
    StalledRow,
)
from kvframework_bench.node.figures import NodeRow
from kvframework_bench.observe.figures import ObservedLookup
from kvframework_bench.outside.figures import OutsideRow
from kvframework_bench.policy.figures import PolicyRow
from kvframework_bench.route.figures import RouteScore
from kvframework_bench.scale.figures import RatioToEcho, ScaleRow
from kvframework_bench.serving.figures import ServingRow
from kvframework_bench.shards.figures import ShardsRow


class Reading(NamedTuple):
    """`ratio`: to something measured in the same run, so that it holds on another machine and another day."""

    better: Literal["less", "more"]
    ratio: bool


LESS, MORE = Reading("less", False), Reading("more", False)
LESS_RATIO, MORE_RATIO = Reading("less", True), Reading("more", True)
# References, and loads that are only made: they say what the machine was like.
REFERENCE = None

READINGS: dict[type[msgspec.Struct], dict[str, Reading | None]] = {
    Throughput: {"gb_s": MORE},
    Echo: {"latency": LESS},
    ServerAtRest: {"start_s": LESS, "idle_cores": LESS},
    RequestFigures: {"latency": LESS, "echo": REFERENCE, "ratio": LESS_RATIO},
    HashFigures: {"latency": LESS, "ratio": LESS_RATIO, "packed": LESS, "packed_ratio": LESS_RATIO},
    TransferFigures: {
        "gb_s": MORE,
        "first_gb_s": MORE,
        "ratio_to_copy": MORE_RATIO,
        "ratio_to_zmq": MORE_RATIO,
    },
    ShapeFigures: {"copy": REFERENCE},
    RedisRow: {
        "reference_gb_s": REFERENCE,
        "tier_gb_s": MORE,
        "ratio_to_reference": MORE_RATIO,
        "tool_gb_s": REFERENCE,
    },
    S3Row: {
        "reference_gb_s": REFERENCE,
        "tier_gb_s": MORE,
        "ratio_to_reference": MORE_RATIO,
        "reference_processor_s": REFERENCE,
        "tier_processor_s": LESS,
    },
    MooncakeRow: {"reference_gb_s": REFERENCE, "tier_gb_s": MORE, "ratio_to_reference": MORE_RATIO},
    EngineRow: {
        "reference_gb_s": REFERENCE,
        "tier_gb_s": MORE,
        "to_l1_gb_s": MORE,
        "to_engine_gb_s": MORE,
        "ratio_to_reference": MORE_RATIO,
        "arriving_gb_s": MORE,
        "arriving_ratio_to_reference": MORE_RATIO,
        "arriving_ratio_to_tier": MORE_RATIO,
    },
    DiskRow: {"reference_gb_s": REFERENCE, "tier_gb_s": MORE, "ratio_to_reference": MORE_RATIO},
    StalledRow: {"without_l2": REFERENCE, "stalled": LESS, "ratio": LESS_RATIO},
    NewRow: {
        "tier": REFERENCE,
        "without_l2": REFERENCE,
        "new": LESS,
        "again": LESS,
        "ratio_to_tier": LESS_RATIO,
        "added_to_tier": LESS_RATIO,
    },
    MemoryRow: {"growth_bytes": LESS},
    CodecRow: {"pack_gb_s": MORE, "unpack_gb_s": MORE},
    ScaleRow: {
        "latency": LESS,
        "requests_s": MORE,
        "server_us": LESS,
        "cost_to_first": LESS_RATIO,
        "server_to_first": LESS_RATIO,
        "p50_to_first": LESS_RATIO,
    },
    RatioToEcho: {"rate": MORE_RATIO, "p50": LESS_RATIO},
    SpinningShape: {"spun_cores": REFERENCE, "copy_gb_s": REFERENCE, "copy_ratio_to_quiet": REFERENCE},
    SpinningTransfers: {
        "quiet_gb_s": MORE,
        "gb_s": MORE,
        "quiet_ratio_to_copy": MORE_RATIO,
        "ratio_to_copy": MORE_RATIO,
        "ratio_to_quiet": MORE_RATIO,
    },
    StoringFigures: {"stores": REFERENCE, "gb_s": MORE},
    StoringLookup: {"quiet": LESS, "storing": LESS, "p50_ratio": LESS_RATIO},
    HitRow: {
        "wall_us": LESS,
        "processor_us": LESS,
        "copy_us": REFERENCE,
        "overhead_us": LESS,
        "asking_us": LESS,
    },
    NodeRow: {
        "lookups": LESS,
        "loads": LESS,
        "requests_s": REFERENCE,
        "cores": LESS,
        "server_us": LESS,
        "ratio_to_echo": LESS_RATIO,
    },
    ObservedLookup: {"latency": LESS, "p50_ratio": LESS_RATIO, "p99_ratio": LESS_RATIO},
    TellingCost: {"us": LESS},
    RouteScore: {"whole_ms": LESS, "longest_step_ms": LESS},
    Moved: {"gb_s": MORE, "reference_gb_s": REFERENCE, "ratio_to_reference": MORE_RATIO},
    SubmitRow: {"latency": LESS},
    MatmulFigures: {"quiet_tflop_s": REFERENCE},
    StepFigures: {"quiet_s": REFERENCE},
    MatmulRow: {"slowdown": LESS_RATIO, "gb_s": MORE},
    SweepRow: {
        "dma_gb_s": MORE,
        "kernel_gb_s": MORE,
        "dma_ratio": MORE_RATIO,
        "kernel_ratio": MORE_RATIO,
    },
    RestartFigures: {"first_hit": LESS, "first_hit_s": LESS, "read_s": LESS},
    ShardsRow: {"store": LESS_RATIO, "load": LESS_RATIO},
    PolicyRow: {"us": LESS, "hit_rate": MORE},
    WayRow: {
        "recomputed": REFERENCE,
        "prefill_s": LESS,
        "same_first": MORE_RATIO,
        "same": MORE_RATIO,
        "agreement": MORE_RATIO,
        "first_divergence": LESS_RATIO,
        "divergence": LESS_RATIO,
        "right": MORE_RATIO,
    },
    ServingRow: {
        "p50_ms": LESS,
        "p90_ms": LESS,
        "p99_ms": LESS,
        "tokens_s": MORE,
        "hit": MORE,
        "engine_ms": LESS,
        "connector_ms": LESS,
        "scheduler_ms": LESS,
        "scheduler_clock_ms": LESS,
        "later_ms": LESS,
        "later": LESS_RATIO,
        "later_p50": LESS_RATIO,
        "server_ms": LESS,
        "equal": MORE_RATIO,
        "p50": LESS_RATIO,
        "p90": LESS_RATIO,
        "p99": LESS_RATIO,
        "tokens": MORE_RATIO,
        "engine": LESS_RATIO,
    },
    DecodeRow: {
        "p50_ms": LESS,
        "p99_ms": LESS,
        "p50": LESS_RATIO,
        "p99": LESS_RATIO,
        "p99_to_held": LESS_RATIO,
        "first_ms": LESS,
    },
    DisaggregatedRow: {"first_ms": LESS, "decoder_ms": LESS, "hit": MORE},
    OutsideRow: {
        "first_mean_ms": LESS,
        "first_p50_ms": LESS,
        "first_p99_ms": LESS,
        "latency_ms": LESS,
        "output_tokens_s": MORE,
        "hit": MORE,
        "computed_tokens": LESS,
        "first_mean": LESS_RATIO,
        "first_p50": LESS_RATIO,
        "latency": LESS_RATIO,
        "computed": LESS_RATIO,
    },
}

# Fields that name no row: what came out, or how often it was tried.
NOT_NAMING = frozenset(
    {
        "batches",
        "copy",
        "copy_name",
        "cross",
        "follows",
        "ghost_bytes",
        "hits",
        "profiled",
        "reference",
        "request_bytes",
        "rounds",
        "scrapes",
        "slot_bytes",
        "stored_bytes",
        "summary",
        "tier_state",
        "torch_loaded",
        "verified",
        "version",
        "write_pending",
    }
)
