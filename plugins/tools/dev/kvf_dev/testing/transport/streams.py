"""The transport kit's tests of a driver's two halves alone, and of streams that wait for a transfer while the engine's
thread goes on."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from kvf_dev.testing.kit import must_refuse, wait_until
from kvf_dev.testing.transport.cases import NHD
from kvf_dev.testing.transport.engine import KitEngine, must_miss, must_succeed, registry_for
from kvf_dev.testing.transport.kit import MakeEngine, TransportKit, or_skip
from kvf_dev.testing.transport.rig import RigSpec, TransportRig
from kvframework.api.driver import MAX_HANDLE_BYTES, Arena, DeviceTransportProvider, EngineDriver
from kvframework.api.futures import Future
from kvframework.api.transport import LoadOutcome
from kvframework.errors import DeviceError
from kvframework.registry import PluginRegistry

_A_WHILE_S = 0.2
asynchronous = pytest.mark.usefixtures("asynchronous")


class Streams(TransportKit):
    """Work on the engine's own streams behind a transfer."""

    @asynchronous
    @pytest.mark.parametrize("which", ["its own", "the current"])
    def test_a_stream_waits_for_a_load_and_the_engines_thread_does_not(
        self, rig: TransportRig, engine: KitEngine, which: str
    ) -> None:
        stream = or_skip(rig.stream)
        stream = stream if which == "its own" else None
        request = engine.stored()
        with self.holding(rig) as held:
            future = engine.load(request, engine.target())
            wait_until(rig.held, "a copy that is held")
            self._wait(future, stream, held)
            reads = _read_later(engine, stream)
            until = time.monotonic() + _A_WHILE_S
            while time.monotonic() < until:
                assert not any(_happened(reads)), "a read came before the load that its stream waits for"
                time.sleep(0.005)
            held.close()
            must_succeed(future)
        self._goes_on(reads)
        engine.expect_loaded(engine.snapshot(), engine.source(), engine.target())
        late = sum(read() != bytes(engine.model.images[name]) for read, name in zip(reads, engine.tensors, strict=True))
        assert not late, f"{late} tensors were read before the load that the stream waits for had written them"

    @asynchronous
    def test_what_is_no_stream_is_not_taken_for_the_current_one(self, rig: TransportRig, engine: KitEngine) -> None:
        """Without a stream that can wait the engine's thread waits, which is safe."""
        or_skip(rig.stream)
        request = engine.stored()
        with self.holding(rig) as held:
            future = engine.load(request, engine.target())
            wait_until(rig.held, "a copy that is held")
            waiting = threading.Thread(target=lambda: future.to_cuda_future().wait(object()), daemon=True)
            waiting.start()
            waiting.join(_A_WHILE_S)
            returned = not waiting.is_alive()
            held.close()
            waiting.join(self.patience_s)
            assert not returned, "raise DeviceError for what is no stream: no stream of the engine waits now"
            must_succeed(future)

    @asynchronous
    @pytest.mark.parametrize("how", ["is cancelled", "fails"])
    def test_a_stream_goes_on_after_a_load_that_did_not_succeed(
        self, rig: TransportRig, make_engine: MakeEngine, how: str
    ) -> None:
        """The users of the blocks must check their content; but no stream may wait for ever."""
        streams = [or_skip(rig.stream) for _ in range(2)]
        # The load waits for an event of other memory: nothing but the load precedes the read here.
        engine, other = make_engine(NHD), make_engine(NHD)
        request = engine.stored()
        if how == "fails":
            or_skip(rig.fail_copy)
        with self.entered(rig.holding_writes()) as held:
            future = engine.load(request, engine.target(), event=other.overwrite(later=True))
            reads = []
            for stream in streams:
                self._wait(future, stream, held)
                reads += _read_later(engine, stream)
            if how == "is cancelled":
                future.cancel()
            held.close()
            must_miss(future, f"a load that {how} was answered as a hit")
        self._goes_on(reads)

    @asynchronous
    def test_a_stream_goes_on_when_its_server_is_killed(self, spec: RigSpec, rig: TransportRig) -> None:
        stream = or_skip(rig.stream)
        with self.doomed(spec, rig) as (server, _, engine):
            request = engine.stored()
            with self.holding(rig) as held:
                future = engine.load(request, engine.target())
                wait_until(rig.held, "a copy that is held")
                self._wait(future, stream, held)
                reads = _read_later(engine, stream)
                server.kill()
                must_miss(future)
                self._goes_on(reads)

    def _wait(self, future: Future[LoadOutcome], stream: object | None, held: ExitStack) -> None:
        """Wait in this thread, since it may be that thread's stream. Held work is released if the call does not
        return."""
        watchdog = threading.Timer(self.patience_s, held.close)
        watchdog.start()
        future.to_cuda_future().wait(stream)
        watchdog.cancel()
        watchdog.join()
        assert not future.query(), "the engine's thread waited for the transfer"

    def _goes_on(self, reads: list[Callable[[], bytes | None]]) -> None:
        wait_until(lambda: all(_happened(reads)), "the end of a stream's wait for its transfer", self.patience_s)


def _read_later(engine: KitEngine, stream: object | None) -> list[Callable[[], bytes | None]]:
    return [engine.rig.read_later(tensor, stream) for tensor in engine.tensors.values()]


def _happened(reads: list[Callable[[], bytes | None]]) -> list[bool]:
    return [read() is not None for read in reads]


class Driver(TransportKit):
    """The halves as the core makes them, without a server: calls at rare times, such as after `close`."""

    def test_handles_are_short_and_stay_the_same(self, rig: TransportRig, engine: KitEngine) -> None:
        driver, address = self._driver(rig), _address(engine)
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

    def test_events_are_destroyed_after_close(self, rig: TransportRig, engine: KitEngine) -> None:
        """An event is given back once its request is answered, which may be after the end of its instance."""
        driver = self._driver(rig)
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
    def test_a_blocked_stream_is_released(self, rig: TransportRig, engine: KitEngine, when: str) -> None:
        """The core calls a release from any thread, perhaps twice, perhaps after `close`."""
        driver = self._driver(rig)
        driver.export(_address(engine))
        stream = or_skip(rig.stream)
        release = driver.block_stream(stream)
        reads = _read_later(engine, stream)
        try:
            if when == "after close":
                _must_not_raise("close while a stream is blocked", driver.close)
            for number in ("a", "a second"):
                call = partial(_must_not_raise, f"{number} call of the release, {when},", release)
                self.in_threads(call) if when == "twice by threads" else call()
        finally:
            with contextlib.suppress(Exception):  # no stream stands still after a test that failed
                release()
        wait_until(lambda: all(_happened(reads)), "the end of a stream's wait, which was released,", self.patience_s)
        driver.close()

    @pytest.mark.parametrize("device", ["no such device", ""], ids=["another", "empty"])
    def test_a_copier_of_a_device_that_the_machine_lacks_is_refused(self, rig: TransportRig, device: str) -> None:
        provider, registry = self._provider(rig)
        options = registry.options(provider, dict(rig.server_options), where="the kit")
        view = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
        arena = Arena(view, ctypes.addressof(ctypes.c_char.from_buffer(view)))
        must_refuse(
            f"create_copier of the device {device!r}, which this machine lacks,",
            lambda: provider.create_copier(options, device, arena),
            DeviceError,
        )

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
