"""The transport kit's tests of a driver's two halves alone: calls that the core makes at rare times, such as after
`close`."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvf_dev.testing.transport.cases import PAGED
from kvf_dev.testing.transport.engine import KitEngine, registry_for
from kvf_dev.testing.transport.kit import MakeEngine, TransportKit
from kvf_dev.testing.transport.node import wait_until
from kvf_dev.testing.transport.rig import TransportRig
from kvframework.api.driver import MAX_HANDLE_BYTES, Arena, DeviceTransportProvider, EngineDriver
from kvframework.errors import DeviceError
from kvframework.registry import PluginRegistry

NHD = PAGED["nhd"]


class Driver(TransportKit):
    """The halves as the core makes them, without a server."""

    def test_handles_are_short_and_stay_the_same(self, rig: TransportRig, make_engine: MakeEngine) -> None:
        driver, engine = self._driver(rig), make_engine(NHD)
        address = _address(engine)
        first, second = driver.export(address), driver.export(address)
        assert first == second, "`export` gives an allocation another handle the second time: give each one handle"
        event = driver.create_event(first.allocation.device)
        for what, handle in (("memory", first.allocation.handle), ("an event", driver.export_event(event))):
            assert type(handle) is bytes, f"the handle of {what} is a {type(handle).__name__}: handles are bytes"
            assert len(handle) <= MAX_HANDLE_BYTES, (
                f"the handle of {what} has {len(handle)} bytes, and MAX_HANDLE_BYTES is {MAX_HANDLE_BYTES}"
            )
        driver.destroy_event(event)
        driver.close()

    def test_events_are_destroyed_after_close(self, rig: TransportRig, make_engine: MakeEngine) -> None:
        """An event is given back once its request is answered, which may be after the end of its instance."""
        driver, engine = self._driver(rig), make_engine(NHD)
        device, before = driver.export(_address(engine)).allocation.device, rig.events()
        events = [driver.create_event(device) for _ in range(2)]
        driver.record(events[0], rig.event())
        for event in events:
            driver.export_event(event)
        _must_not_raise("close", driver.close)
        _must_not_raise("a second close", driver.close)
        for event in events:
            # `DeviceError` is fine: the events may have ended with the driver.
            _must_not_raise("destroy_event after close", partial(driver.destroy_event, event))
        left = rig.events() - before
        assert left <= 0, f"{left} events are left, though `destroy_event` was called after `close`"

    @pytest.mark.parametrize("when", ["twice", "after close", "twice by threads"])
    def test_a_blocked_stream_is_released(self, rig: TransportRig, make_engine: MakeEngine, when: str) -> None:
        """The core calls a release from any thread, perhaps twice, perhaps after `close`."""
        driver, engine = self._driver(rig), make_engine(NHD)
        driver.export(_address(engine))
        try:
            stream = rig.stream()
        except NotImplementedError as reason:
            pytest.skip(str(reason))
        release = driver.block_stream(stream)
        reads = [rig.read_later(tensor, stream) for tensor in engine.tensors.values()]
        try:
            if when == "after close":
                _must_not_raise("close while a stream is blocked", driver.close)
            for number in ("a", "a second"):
                call = partial(_must_not_raise, f"{number} call of the release, {when},", release)
                _in_a_thread(call) if when == "twice by threads" else call()
        finally:
            release_anyway(release)
        wait_until(
            lambda: all(read() is not None for read in reads),
            "the end of a stream's wait, which was released,",
            self.patience_s,
        )
        driver.close()

    @pytest.mark.parametrize("device", ["no such device", ""], ids=["another", "empty"])
    def test_a_copier_of_a_device_that_the_machine_lacks_is_refused(self, rig: TransportRig, device: str) -> None:
        provider, registry = self._provider(rig)
        options = registry.options(provider, dict(rig.server_options), where="the kit")
        view = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
        arena = Arena(view, ctypes.addressof(ctypes.c_char.from_buffer(view)))
        try:
            provider.create_copier(options, device, arena)
        except DeviceError:
            return
        except Exception as error:  # noqa: BLE001  any other is the bug
            pytest.fail(f"create_copier of {device!r} raises {type(error).__name__} instead of DeviceError: {error}")
        pytest.fail(f"create_copier takes the device {device!r}: raise DeviceError for one that this machine lacks")

    def _provider(self, rig: TransportRig) -> tuple[DeviceTransportProvider[Any], PluginRegistry]:
        registry = registry_for(rig)
        provider = registry.resolve("transport", rig.transport)
        if not isinstance(provider, DeviceTransportProvider):
            pytest.skip("the transport is none of a device driver")
        return provider, registry

    def _driver(self, rig: TransportRig) -> EngineDriver[Any]:
        provider, registry = self._provider(rig)
        made: EngineDriver[Any] = provider.create_engine(
            registry.options(provider, dict(rig.engine_options), where="the kit")
        )
        return made


def release_anyway(release: Callable[[], None]) -> None:
    """Have no stream stand still after a test that failed."""
    try:
        release()
    except Exception:  # noqa: BLE001  the test has failed by then
        return


def _address(engine: KitEngine) -> int:
    address: int = next(iter(engine.tensors.values())).data_ptr()
    return address


def _must_not_raise(what: str, call: Callable[[], object]) -> None:
    __tracebackhide__ = True
    try:
        call()
    except DeviceError:
        return
    except Exception as error:  # noqa: BLE001  any other is the bug
        pytest.fail(f"{what} raised {type(error).__name__}: {error}")


def _in_a_thread(call: Callable[[], object]) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  raised again in the test's own thread
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
