"""`kvframework bench transport`: store and retrieve by any installed transport, next to a plain copy of as many bytes.

An author's `TransportRig` allocates and reads the memory; without one it is host memory. This process is the engine;
the server is another one. Imports the transport kit when the benchmark runs.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Mapping
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kvframework.registry.registry import PluginRegistry
from kvframework_bench.console import Stage, no_progress
from kvframework_bench.document import StoreFigures
from kvframework_bench.engine import chosen_blocks, dims_of, wrong_bytes
from kvframework_bench.errors import BenchUnavailable
from kvframework_bench.store import Measured, measure
from kvframework_bench.workload import BLOCK_TOKENS, Shape

if TYPE_CHECKING:
    from kvf_dev.testing.transport import TransportRig

_POISON = b"\xa5"
_LAYERS, _HEADS, _HEAD_DIM = 8, 4, 128
_TOKENS_OF_A_MIB = 64
_CHUNK_MIB = 4


def sized_shape(mebibytes: int, rounds: int) -> Shape:
    """Return a shape of 8 layers whose one request has so many bytes, whole chunks of 4 MiB."""
    chunks = mebibytes // _CHUNK_MIB
    name, tokens = f"{chunks * _CHUNK_MIB} MiB", chunks * _CHUNK_MIB * _TOKENS_OF_A_MIB
    return Shape(name, _LAYERS, _HEADS, _HEAD_DIM, tokens=tokens, target_ratio=0.0, rounds=rounds)


def bench_transport(
    name: str, shape: Shape, *, rig: str = "", arguments: Mapping[str, str], stage: Stage = no_progress
) -> StoreFigures:
    """Measure the transport `name` with memory of the rig that `rig`, "module:function", makes of `arguments`, or of
    `directory`, a new folder, without any. Takes some seconds. Raises `PluginNotFound`, `BenchUnavailable` for a rig
    that cannot be made, `BenchFailed`, and `WrongBytes` if a single retrieved byte is wrong."""
    PluginRegistry().resolve("transport", name, where="bench transport")
    with TemporaryDirectory(prefix="kvf-bench-") as directory:
        made = _rig(rig, arguments, name, directory)
        try:
            settings = [f"transport.0.use={name}"]
            settings += [f"transport.0.{option}={value}" for option, value in made.server_options.items()]
            measured = Measured(made.engine_options, lambda each: RigMemory(each, made), name, settings)
            return StoreFigures(name, "shuffled", [measure(shape, measured, wire=False, stage=stage)])
        finally:
            made.close()


def _rig(told: str, arguments: Mapping[str, str], name: str, directory: str) -> TransportRig:
    from kvf_dev.testing.transport.rig import HostRig, TorchRig, TransportRig

    if not told:  # cpu_gather needs tensors of torch; who needs none takes them as well
        return (TorchRig if importlib.util.find_spec("torch") else HostRig)(name, directory)
    module, _, function = told.partition(":")
    try:
        sys.path.insert(0, "")
        made = getattr(import_module(module), function)(**(arguments or {"directory": directory}))
    except (ImportError, AttributeError, TypeError) as error:
        raise BenchUnavailable(
            f"the rig {told!r} cannot be made: {error}",
            hint="give --rig MODULE:FUNCTION of an importable module, and its arguments with --rig-argument NAME=VALUE",
        ) from None
    if not isinstance(made, TransportRig):
        raise BenchUnavailable(f"the rig {told!r} made a {type(made).__name__}, not a TransportRig")
    if made.transport != name:
        raise BenchUnavailable(f"the rig {told!r} is for the transport {made.transport!r}, not for {name!r}")
    return made


class RigMemory:
    """One tensor a layer on the rig's device, of random bytes. Each block is whole in each of two planes."""

    def __init__(self, shape: Shape, rig: TransportRig) -> None:
        self._rig = rig
        self._planes, self._blocks = dims_of(shape)[:2]
        self._nbytes = 2 * shape.nbytes // shape.layers
        self.source, self.target = chosen_blocks(shape, shuffled=True)
        source = random.Random(1)
        self.kv = {f"layers.{layer}": rig.empty(dims_of(shape), shape.dtype) for layer in range(shape.layers)}
        for tensor in self.kv.values():
            # A random generator makes at most 256 MiB at once.
            rig.write(tensor, b"".join(source.randbytes(self._nbytes // self._blocks) for _ in range(self._blocks)))

    def poison(self) -> None:
        for tensor in self.kv.values():
            data = bytearray(self._rig.read(tensor))
            for plane in range(self._planes):
                for block in self.target:
                    place = self._place(plane, block)
                    data[place] = _POISON * (place.stop - place.start)
            self._rig.write(tensor, bytes(data))

    def verify(self) -> None:
        for name, tensor in self.kv.items():
            data = memoryview(self._rig.read(tensor))
            for plane in range(self._planes):
                for index, (stored, loaded) in enumerate(zip(self.source, self.target, strict=True)):
                    one, other = data[self._place(plane, stored)], data[self._place(plane, loaded)]
                    if one != other:
                        number = sum(a != b for a, b in zip(one, other, strict=True))
                        raise wrong_bytes(name, number, plane, index * BLOCK_TOKENS)

    def _place(self, plane: int, block: int) -> slice:
        nbytes = self._nbytes // self._planes // self._blocks
        start = (plane * self._blocks + block) * nbytes
        return slice(start, start + nbytes)
