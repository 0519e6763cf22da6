"""How much one launch may hold, and which limits can be asked for."""

from __future__ import annotations

import array

import pytest

from kvf_devices import DeviceOptions
from kvf_devices.copier import LAUNCH_FRAGMENTS, _split
from kvframework.api.copy_plans import CopyBatch, Step
from kvframework.api.plugin import ByteSize
from kvframework.config.load import load_config
from kvframework.errors import ConfigFieldError
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import complete_config
from tests.devices import rigs  # noqa: F401 - makes the example importable

from tests.devices import faulty  # isort: skip  it imports the example

LIMIT = 32 << 20


def batch(lanes: int, places: int, steps: tuple[Step, ...], run: int) -> CopyBatch:
    lane, place = array.array("Q", range(lanes)), array.array("Q", range(places))
    return CopyBatch(lane, lane, place, place, steps, run)


@pytest.mark.parametrize(
    ("lanes", "places", "pieces", "run"), [(3, 40_000, 8, 2), (64, 2000, 1, 2), (2, 100_000, 1, 1), (5, 7, 60_000, 2)]
)
def test_a_launch_of_small_fragments_is_bounded_by_their_number(lanes: int, places: int, pieces: int, run: int) -> None:
    whole = batch(lanes, places, (Step(pieces, 16, 32),), run)
    assert whole.nbytes < LIMIT
    parts = list(_split([whole], LIMIT))
    assert max(part.count for part in parts) <= LAUNCH_FRAGMENTS
    assert sum(part.count for part in parts) == whole.count


def test_one_place_of_one_lane_is_never_divided() -> None:
    parts = list(_split([batch(2, 3, (Step(2 * LAUNCH_FRAGMENTS, 16, 32),), 2)], LIMIT))
    assert [part.count for part in parts] == [2 * LAUNCH_FRAGMENTS] * 6


def test_large_fragments_are_bounded_by_their_bytes_as_before() -> None:
    parts = list(_split([batch(8, 64, (), 1 << 20)], LIMIT))
    assert [part.nbytes for part in parts] == [LIMIT] * 16


@pytest.mark.parametrize("option", ["in_flight", "launch", "pace"])
def test_sizes_that_no_number_of_a_message_holds_are_refused(option: str) -> None:
    registry = PluginRegistry()
    registry.register(faulty, distribution="tests")
    DeviceOptions(**{option: ByteSize((1 << 63) - 1)})
    for size in (1 << 63, 1 << 64, "99999999 TiB"):
        config = load_config(None, ("transport.0.use=sound", f'transport.0.{option}="{size}"'))
        with pytest.raises(ConfigFieldError, match=rf"{option} is \d+, expected less than 2"):
            complete_config(config, registry)
