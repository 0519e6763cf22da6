"""The driver's half in an engine process: exported memory and events, streams that wait for a transfer.

Works in the primary contexts of the GPUs that the engine uses, as torch does, and makes none of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvf_cuda_ipc.driver import DEFAULT_STREAM, Context, Driver, Event, RawStream, name_of
from kvf_devices import Allocation, EngineDriver, Exported
from kvframework.errors import DeviceError, DeviceLost

_WORD = 4
_CYCLE = 1 << 32


class Words:
    """The words of one page at `address` here and `device_address` on the device, which the owner frees."""

    NBYTES = 4096

    def __init__(self, address: int, device_address: int) -> None:
        ctypes.memset(address, 0, self.NBYTES)
        count = self.NBYTES // _WORD
        self._memory = (ctypes.c_uint32 * count).from_address(address)
        self._device_address = device_address
        self._lock = threading.Lock()
        self._spare = list(range(count))

    def take(self) -> Word:
        """Return a free word. Raises `DeviceError` if all are in use."""
        with self._lock:
            if not self._spare:
                raise DeviceError(
                    f"{len(self._memory)} transfers have waiting streams, which is the maximum", where="cuda_ipc"
                )
            index = self._spare.pop()
        return Word(self, index, (self._memory[index] + 1) % _CYCLE, self._device_address + index * _WORD)

    def release(self, index: int, value: int) -> None:
        self._memory[index] = value
        with self._lock:
            self._spare.append(index)


class Word:
    """The condition of one wait: the word at `device_address` is `value`."""

    def __init__(self, words: Words, index: int, value: int, device_address: int) -> None:
        self._words = words
        self._index = index
        self._lock = threading.Lock()
        self._released = False
        self.value = value
        self.device_address = device_address

    def release(self) -> None:
        """Release the stream. Idempotent, from any thread."""
        with self._lock:
            if self._released:
                return
            self._released = True
        self._words.release(self._index, self.value)


def event_of(ready: object) -> Event:
    """Return the `CUevent` of the event that an engine gave with a submit: `torch.cuda.Event`, `torch.Event`, an event
    of cuda.core, or an integer. Raises `DeviceError` for anything else, and for one without a handle, which torch makes
    at the first record. An event with a handle that was never recorded cannot be recognised: it is reached at once, a
    copy too early."""
    for attribute in ("cuda_event", "event_id", "handle"):
        found = getattr(ready, attribute, None)
        if found is not None:
            return Event(_recorded(found, ready))
    if isinstance(ready, int) and not isinstance(ready, bool):
        return Event(_recorded(ready, ready))
    raise DeviceError(
        f"the engine's event is a {type(ready).__name__}",
        where="cuda_ipc",
        available="None, torch.cuda.Event, torch.Event, an event of cuda.core, a CUevent as an integer",
    )


def stream_of(stream: object) -> RawStream:
    """Return the `CUstream` of `torch.cuda.Stream`, of anything with `__cuda_stream__`, or of an integer; 0 is the
    legacy default stream. Raises `DeviceError` for anything else."""
    found = getattr(stream, "cuda_stream", None)
    if found is not None:
        return RawStream(_handle(found, stream))
    protocol = getattr(stream, "__cuda_stream__", None)
    if callable(protocol):
        _version, handle = protocol()
        return RawStream(_handle(handle, stream))
    if isinstance(stream, int) and not isinstance(stream, bool):
        return RawStream(_handle(stream, stream))
    raise DeviceError(
        f"the stream is a {type(stream).__name__}",
        where="cuda_ipc",
        available="None, torch.cuda.Stream, a stream of cuda.core, a CUstream as an integer",
    )


def _recorded(found: object, event: object) -> int:
    handle = _handle(found, event)
    if handle == 0:
        raise DeviceError(
            f"the engine's {type(event).__name__} was never recorded",
            where="cuda_ipc",
            hint="record the event after the work that fills the blocks, then submit",
        )
    return handle


def _handle(found: object, of: object) -> int:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        handle = int(found)  # type: ignore[call-overload]
        if 0 <= handle < 1 << 64:
            return handle  # type: ignore[no-any-return]
    raise DeviceError(
        f"the handle of the engine's {type(of).__name__} is not a handle of the driver",
        where="cuda_ipc",
        available="0 to 2**64 - 1",
    )


_EXPORT_HINT = (
    "take expandable_segments:True out of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF, start vLLM without sleep mode"
    " (enable_sleep_mode); or use cpu_gather"
)


class PooledEvent:
    """An interprocess event. `behind` is a separate stream that waits for the engine's event, created on demand: with
    one stream for all events, a transfer would wait for another one's engine."""

    __slots__ = ("behind", "event", "ordinal")

    def __init__(self, ordinal: int, event: Event) -> None:
        self.ordinal = ordinal
        self.event = event
        self.behind: RawStream | None = None


class CudaEngine(EngineDriver[PooledEvent]):
    """The half of one instance. `driver` is this process's. Thread-safe, as far as the contract asks for it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._contexts: dict[int, Context] = {}
        self._ordinals: dict[str, int] = {}
        self._proofs: dict[int, tuple[Event, bytes]] = {}
        self._lock = threading.Lock()
        self._events = 0
        self._closed = False
        if not driver.devices():
            raise DeviceError("this process sees no GPU", where="cuda_ipc", hint="check CUDA_VISIBLE_DEVICES")

    def export(self, address: int) -> Exported:
        with self._any_context():
            ordinal = self._driver.ordinal_of(address)
        with self._context(ordinal):
            base, nbytes = self._driver.allocation_of(address)
            if self._driver.is_exportable(address) is False:
                raise _not_exportable(address, "the memory is virtual or managed")
            proof = self._proof(ordinal)
            try:
                handle = self._driver.export_memory(base) + proof
            except DeviceLost:
                raise
            except DeviceError as error:
                raise _not_exportable(address, error.fact) from None
            with contextlib.suppress(DeviceError):
                _words_of_process(self._driver, ordinal)  # so that no first `block_stream` allocates in mid work
        return Exported(Allocation(self._name(ordinal), handle, nbytes), address - base)

    def create_event(self, device: str) -> PooledEvent:
        ordinal = self._ordinal(device)
        with self._context(ordinal):
            event = PooledEvent(ordinal, self._driver.create_event(interprocess=True))
        with self._lock:
            self._events += 1
        return event

    def export_event(self, event: PooledEvent) -> bytes:
        with self._context(event.ordinal):
            return self._driver.export_event(event.event)

    def record(self, event: PooledEvent, behind: object | None) -> None:
        with self._context(event.ordinal):
            if behind is None:
                stream = _current_stream(event.ordinal)
            else:
                if event.behind is None:
                    event.behind = self._driver.create_stream(0)
                stream = event.behind
                self._driver.wait_event(stream, event_of(behind))
            self._driver.record(event.event, stream)

    def destroy_event(self, event: PooledEvent) -> None:
        with self._context(event.ordinal):
            if event.behind is not None:
                self._driver.destroy_stream(event.behind)
            self._driver.destroy_event(event.event)
        with self._lock:
            self._events -= 1
        self._let_go()

    def block_stream(self, stream: object | None) -> Callable[[], None]:
        """Block the stream until a word of pinned host memory is written, which the release does. Its further work
        needs nothing else of the host."""
        if not self._ordinals:
            raise DeviceError("no GPU memory is registered", where="cuda_ipc")
        ordinal = next(iter(self._ordinals.values()))
        with self._context(ordinal):
            raw = _current_stream(ordinal) if stream is None else stream_of(stream)
            word = _words_of_process(self._driver, ordinal).take()
            try:
                self._driver.wait_word(raw, word.device_address, word.value)
            except BaseException:
                word.release()
                raise
        return word.release

    def _proof(self, ordinal: int) -> bytes:
        """Return the handle of an event for the copier to open before it takes memory: what either side cannot do with
        events costs this transport now, and not every transfer later. Raises `DeviceError`."""
        if ordinal not in self._proofs:
            try:
                event = self._driver.create_event(interprocess=True)
                try:
                    self._proofs[ordinal] = event, self._driver.export_event(event)
                except BaseException:
                    self._driver.destroy_event(event)
                    raise
            except DeviceLost:
                raise
            except DeviceError as error:
                model = self._driver.model(ordinal)
                raise DeviceError(f"{model} cannot share events: {error.fact}", where="cuda_ipc") from None
        return self._proofs[ordinal][1]

    def close(self) -> None:
        """Release the contexts, once the last event is destroyed; the engine keeps them."""
        with self._lock:
            self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            if not self._closed or self._events:
                return
            contexts, self._contexts = self._contexts, {}
            proofs, self._proofs = self._proofs, {}
        for ordinal, context in contexts.items():
            if ordinal in proofs:
                with contextlib.suppress(DeviceError), self._driver.current(context):
                    self._driver.destroy_event(proofs[ordinal][0])
            self._driver.release_context(ordinal)

    @contextmanager
    def _context(self, ordinal: int) -> Iterator[None]:
        with self._lock:
            context = self._contexts.get(ordinal)
            if context is None:
                if self._closed:
                    raise DeviceError("the instance is closed", where="cuda_ipc")
                context = self._contexts[ordinal] = self._driver.retain_context(ordinal)
        with self._driver.current(context):
            yield

    @contextmanager
    def _any_context(self) -> Iterator[None]:
        """Make current a context that the engine has anyway: a new one would take memory of a GPU that it does not
        use."""
        used = next((each for each in self._driver.devices() if self._driver.has_context(each)), None)
        if used is None:
            raise DeviceError("this process has not used a GPU yet, so the tensors are not on one", where="cuda_ipc")
        with self._context(used):
            yield

    def _name(self, ordinal: int) -> str:
        name = name_of(self._driver.uuid(ordinal), self._driver.model(ordinal))
        self._ordinals[name] = ordinal
        return name

    def _ordinal(self, device: str) -> int:
        if device not in self._ordinals:
            raise DeviceError(f"{device} is not a GPU of this instance", where="cuda_ipc")
        return self._ordinals[device]


def _not_exportable(address: int, reason: str) -> DeviceError:
    return DeviceError(
        f"memory at {address:#x} cannot be exported to other processes: {reason}",
        where="cuda_ipc",
        available="memory from cudaMalloc",
        hint=_EXPORT_HINT,
    )


_words: list[Words] = []
_words_lock = threading.Lock()


def _words_of_process(driver: Driver, ordinal: int) -> Words:
    """Return the words of one page for all instances, kept for the life of the process: streams may still read it when
    an instance has ended. The current context is kept too, since its end would free the page."""
    with _words_lock:
        if not _words:
            driver.retain_context(ordinal)
            address, on_device = driver.allocate_host(Words.NBYTES)
            if on_device is None:
                driver.free_host(address)
                raise DeviceError("the driver does not report the GPU's address of pinned memory", where="cuda_ipc")
            _words.append(Words(address, on_device))
        return _words[0]


def _current_stream(ordinal: int) -> RawStream:
    """Return the calling thread's stream, if torch is in use; the legacy default stream without."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return DEFAULT_STREAM
    return RawStream(int(torch.cuda.current_stream(ordinal).cuda_stream))
