"""The parts of the transport's engine half that need no driver: identities, words that streams wait for, accepted
events and streams."""

from __future__ import annotations

import ctypes
import os
import threading
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings", reason="needs cuda-bindings")

from kvf_cuda_ipc.driver import name_of, same, show_only
from kvf_cuda_ipc.engine_side import Word, Words, event_of, stream_of
from kvframework.errors import DeviceError

UUID = uuid.UUID("6f2e5ac0-22b4-4a0e-9b3c-0123456789ab")


@pytest.mark.parametrize(
    ("model", "prefix"), [("NVIDIA H100 80GB HBM3", "GPU"), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "MIG")]
)
def test_a_gpu_is_named_as_its_driver_names_it(model: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = name_of(UUID.bytes, model)
    assert name == f"{prefix}-{UUID}"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    show_only(name)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == name


@pytest.mark.parametrize("name", ["", "0", "GPU-", f"GPU-{UUID},GPU-{UUID}", f"GPU-{str(UUID).upper()}", "GPU-\0"])
def test_what_is_no_name_of_a_gpu_gets_no_further(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(DeviceError, match="is not the name of a GPU"):
        show_only(name)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_devices_are_compared_by_their_uuids() -> None:
    other = f"GPU-{uuid.UUID(int=UUID.int ^ 1)}"
    assert same(f"GPU-{UUID}", f"MIG-{UUID}")
    assert not same(f"GPU-{UUID}", other)


class Page:
    """Memory as a driver would pin it; the device sees it a gigabyte further."""

    def __init__(self, filled: int = 0) -> None:
        self.memory = ctypes.create_string_buffer(bytes([filled]) * Words.NBYTES, Words.NBYTES)
        self.address = ctypes.addressof(self.memory)
        self.words = Words(self.address, self.address + (1 << 30))

    def at(self, device_address: int) -> int:
        return ctypes.c_uint32.from_address(device_address - (1 << 30)).value


def reached(found: int, value: int) -> bool:
    """As cuStreamWaitValue32 compares: (int32_t)(*addr - value) >= 0."""
    return (found - value) % (1 << 32) < 1 << 31


@given(st.lists(st.booleans(), max_size=60))
def test_a_stream_waits_until_its_release_and_never_again(turns: list[bool]) -> None:
    page = Page(filled=0xFF)
    held: list[Word] = []
    passed: list[Word] = []
    for take in turns:
        if take or not held:
            held.append(page.words.take())
        else:
            word = held.pop(0)
            word.release()
            word.release()
            passed.append(word)
        assert not any(reached(page.at(word.device_address), word.value) for word in held)
        assert all(reached(page.at(word.device_address), word.value) for word in passed)
        assert len({word.device_address for word in held}) == len(held)


def test_a_word_goes_on_beyond_32_bits() -> None:
    page = Page()
    ctypes.memset(page.address, 0xFF, Words.NBYTES)
    word = page.words.take()
    assert word.value == 0
    assert not reached(page.at(word.device_address), word.value)
    word.release()
    assert reached(page.at(word.device_address), word.value)


def test_all_words_taken_is_told_and_one_release_mends_it() -> None:
    page = Page()
    held = [page.words.take() for _ in range(Words.NBYTES // 4)]
    with pytest.raises(DeviceError, match="1024 transfers have waiting streams"):
        page.words.take()
    held[5].release()
    assert page.words.take().device_address == held[5].device_address


def test_threads_that_release_one_word_free_it_once() -> None:
    page = Page()
    word = page.words.take()
    together = threading.Barrier(8)

    def release() -> None:
        together.wait()
        word.release()

    threads = [threading.Thread(target=release) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    addresses = [page.words.take().device_address for _ in range(Words.NBYTES // 4)]
    assert len(set(addresses)) == len(addresses)


class Has:
    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


def test_events_of_all_kinds_are_taken() -> None:
    assert event_of(Has(cuda_event=7)) == 7
    assert event_of(Has(event_id=8)) == 8
    assert event_of(Has(handle=9)) == 9
    assert event_of(10) == 10


@pytest.mark.parametrize("ready", [Has(cuda_event=0), Has(event_id=0), 0])
def test_an_event_that_was_never_recorded_is_refused(ready: object) -> None:
    with pytest.raises(DeviceError, match="was never recorded"):
        event_of(ready)


@pytest.mark.parametrize("ready", ["event", object(), True, 1.5, Has(stream=3)])
def test_what_is_no_event_is_refused(ready: object) -> None:
    with pytest.raises(DeviceError, match="the engine's event is a"):
        event_of(ready)


def test_the_driver_gets_no_handle_that_it_cannot_have() -> None:
    top = (1 << 64) - 1
    assert (event_of(top), stream_of(top)) == (top, top)
    for wrong in (-1, 1 << 64, 1 << 70, 10**5000):
        for ready in (wrong, Has(event_id=wrong)):
            with pytest.raises(DeviceError, match=r"the handle of the engine's \w+ is not a handle of the driver"):
                event_of(ready)
        for stream in (wrong, Has(cuda_stream=wrong), Has(__cuda_stream__=lambda wrong=wrong: (0, wrong))):
            with pytest.raises(DeviceError, match=r"the handle of the engine's \w+ is not a handle of the driver"):
                stream_of(stream)
    for no_number in ("a pointer", object(), float("inf")):
        with pytest.raises(DeviceError, match="the handle of the engine's Has is not"):
            event_of(Has(handle=no_number))
        with pytest.raises(DeviceError, match="the handle of the engine's Has is not"):
            stream_of(Has(cuda_stream=no_number))


def test_streams_of_all_kinds_are_taken() -> None:
    assert stream_of(Has(cuda_stream=7)) == 7
    assert stream_of(Has(__cuda_stream__=lambda: (0, 8))) == 8
    assert stream_of(0) == 0
    for wrong in ("stream", object(), False, Has(event_id=1)):
        with pytest.raises(DeviceError, match="the stream is a"):
            stream_of(wrong)
