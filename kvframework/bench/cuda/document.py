"""Owns the figures of `kvframework bench cuda`. Rates are GB (10^9 bytes) a second."""

from __future__ import annotations

import msgspec

from kvframework.bench.attempt import NotMeasured
from kvframework.bench.statistics import Latency, Spread


class Gpu(msgspec.Struct, frozen=True):
    """`cuda` is the version of CUDA that the driver speaks, `driver` the driver's own and `link` how the GPU is
    attached; "" where the kernel does not tell."""

    name: str
    memory_bytes: int
    multiprocessors: int
    compute_capability: str
    cuda: str
    driver: str
    bindings: str
    link: str


class Moved(msgspec.Struct, frozen=True):
    """Transfers of one kind, beside plain copies of as many bytes in the same direction (or both at once): `of_plain`
    is the share of their speed, taken round by round."""

    gb_s: Spread
    plain_gb_s: Spread
    of_plain: Spread


class TransferRow(msgspec.Struct, frozen=True):
    """One step of a shape. `fragment_bytes` is what lies together in one block and one layer; `both` is a store and a
    retrieve at once. `reach` is meant for the median of each `of_plain`."""

    engine: str
    shape: str
    block_tokens: int
    fragment_bytes: int
    chunks: int
    nbytes: int
    rounds: int
    store: Moved
    retrieve: Moved
    both: Moved
    reach: float


class SubmitRow(msgspec.Struct, frozen=True):
    """What a submit takes of the engine's thread; `reach_us` is meant for the p99."""

    operation: str
    chunks: int
    blocks: int
    latency: Latency
    reach_us: float


class MatmulRow(msgspec.Struct, frozen=True):
    """The loop's time beside transfers in units of its time without, by the GPU's clock; `gb_s` is what the transfers
    reached meanwhile. The engine "plain" is a plain pinned copy."""

    engine: str
    operation: str
    slowdown: Spread
    gb_s: Spread


class MatmulFigures(msgspec.Struct, frozen=True):
    """`quiet_tflop_s` is what the loop reaches alone, with square matrices of `size`."""

    size: int
    shape: str
    chunks: int
    quiet_tflop_s: Spread
    rows: list[MatmulRow]


class SweepRow(msgspec.Struct, frozen=True):
    """Fragments of one size, moved by copy engines and by the kernel: rates, and shares of a plain copy's speed."""

    operation: str
    fragment_bytes: int
    nbytes: int
    dma_gb_s: Spread
    kernel_gb_s: Spread
    dma_of_plain: Spread
    kernel_of_plain: Spread


class SweepFigures(msgspec.Struct, frozen=True):
    """`cross` is the smallest measured size from which on copy engines are at least as fast as the kernel both ways:
    what `kernel_below` should be. None: the kernel is faster to the end."""

    rows: list[SweepRow]
    cross: int | None


class CudaFigures(msgspec.Struct, frozen=True):
    """A part that was left out or not asked for is None or empty. `verified` says that every byte was compared, for
    each shape and each engine, before anything was measured and behind the last round of each step."""

    gpu: Gpu
    verified: bool
    transfers: list[TransferRow]
    submits: list[SubmitRow]
    matmul: MatmulFigures | None
    sweep: SweepFigures | None
    not_measured: list[NotMeasured]
