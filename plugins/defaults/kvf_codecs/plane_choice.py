"""What to do with an object's planes, learned from a sample: which bytes an element has, and which planes shrink."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvf_codecs.plane_kernel import PlaneKernel

# The sample is this part of an object, but not less than `LEAST` nor more than `MOST` bytes of it.
_PART = 32
_LEAST = 16 << 10
_MOST = 128 << 10
_RUNS = 16
# A plane that shrinks by less than this part is not worth the time.
_WORTH = 32


class Choice(NamedTuple):
    """`shrinks[i]`: whether plane i is worth packing."""

    width: int
    shrinks: Sequence[bool]


def choose(
    data: memoryview, widths: Sequence[int], kernel: PlaneKernel, packed_bytes: Callable[[memoryview], int]
) -> Choice:
    """Return the best of `widths`, which ascend, for an object's bytes, by `packed_bytes`, the packed length of a
    plane. A wider one must be better by more than chance."""
    sample = sample_of(data)
    least, best = _tried(sample, widths[0], kernel, packed_bytes)
    for width in widths[1:]:
        held, choice = _tried(sample, width, kernel, packed_bytes)
        if held < least - least // _WORTH:
            least, best = held, choice
    return best


def sample_of(data: memoryview) -> memoryview:
    """Return runs of bytes from all over the object, whole elements of any width; all of a small object."""
    wanted = min(max(_LEAST, data.nbytes // _PART), _MOST)
    if data.nbytes <= wanted:
        return data
    run = wanted // _RUNS // 8 * 8
    step = (data.nbytes - run) // (_RUNS - 1) // 8 * 8
    return memoryview(b"".join(data[at : at + run] for at in range(0, _RUNS * step, step)))


def _tried(
    sample: memoryview, width: int, kernel: PlaneKernel, packed_bytes: Callable[[memoryview], int]
) -> tuple[int, Choice]:
    count = sample.nbytes // width
    planes = [memoryview(bytearray(count)) for _ in range(width)]
    kernel.split(sample[: count * width], planes)
    sizes = [packed_bytes(plane) for plane in planes]
    shrinks = [size < count - count // _WORTH for size in sizes]
    held = sum(size if shrink else count for size, shrink in zip(sizes, shrinks, strict=True))
    return held, Choice(width, shrinks)
