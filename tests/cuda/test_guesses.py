"""What the transport guesses of drivers, one by one, and a driver that says no: it goes without, or is left out with a
reason, and no byte is ever wrong."""

from __future__ import annotations

import contextlib
import logging
import re

import pytest

from kvf_dev.testing.transport.engine import PAGED, PATIENCE_S, KitEngine
from kvf_dev.testing.transport.node import status_of
from kvf_devices import Allocation, Exported
from kvframework.client import KVClient
from kvframework.errors import DeviceError
from tests.cuda.node import DEVICE_UNAVAILABLE, NOT_FOUND, CudaNode
from tests.cuda.rig import CudaRig
from tests.support.waiting import wait_until

NHD = PAGED["nhd"]
RANGE_SIZE = "cuPointerGetAttribute 12"


def lacks(client: KVClient) -> list[str]:
    (device,) = status_of(client)["transports"]["cuda_ipc"]["devices"]  # type: ignore[index]
    return list(device["lacks"])


def stores_and_loads(engine: KitEngine) -> None:
    request = engine.stored()
    engine.must_load(request)


def goes_without(client: KVClient, rig: CudaRig, caplog: pytest.LogCaptureFixture, told: str) -> None:
    """Works, and what it goes without is in the status, and once in the log, also when it is met again."""
    with caplog.at_level(logging.WARNING, logger="kvf_devices.supervisor"):
        for instance in (1, 2):
            engine = KitEngine(rig, client, instance, NHD)
            stores_and_loads(engine)
            engine.close()
    found = lacks(client)
    logged = [re.fullmatch(r"the copier of \S+ lacks a feature: (.*)", each.message) for each in caplog.records]
    assert [each[1] for each in logged if each] == found
    assert len(found) == bool(told)
    assert all(told in each for each in found)


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        (("cuMemGetAddressRange, opened",), ""),
        (("cuMemGetAddressRange, opened", f"{RANGE_SIZE}, opened"), "the size of opened memory is not verified:"),
        (("cuMemGetAddressRange",), ""),
        (("cuPointerGetAttribute 10",), ""),
    ],
    ids=["one way to ask is left", "an opened allocation has no size", "an own one has it otherwise", "exportable?"],
)
def test_memory_of_which_the_driver_does_not_tell_is_used(
    cuda_node: CudaNode,
    rig: CudaRig,
    client: KVClient,
    caplog: pytest.LogCaptureFixture,
    calls: tuple[str, ...],
    told: str,
) -> None:
    with cuda_node.refusing(*calls, result=NOT_FOUND):
        goes_without(client, rig, caplog, told)


@pytest.mark.parametrize("refused", [(), ("cuMemGetAddressRange, opened",)], ids=["by its call", "by its attributes"])
def test_memory_that_is_smaller_than_its_engine_says_is_refused(
    cuda_node: CudaNode, rig: CudaRig, client: KVClient, monkeypatch: pytest.MonkeyPatch, refused: tuple[str, ...]
) -> None:
    from kvf_cuda_ipc.engine_side import CudaEngine

    honest = CudaEngine.export

    def boasting(self: CudaEngine, address: int) -> Exported:
        allocation, offset = honest(self, address)
        return Exported(Allocation(allocation.device, allocation.handle, allocation.nbytes + 1), offset)

    monkeypatch.setattr(CudaEngine, "export", boasting)
    with (
        cuda_node.refusing(*refused),
        pytest.raises(DeviceError, match=r"the opened allocation has \d+ bytes, expected"),
    ):
        KitEngine(rig, client, 1, NHD)
    assert cuda_node.mappings() == 0


@pytest.mark.parametrize(("refused", "fact"), [((), ""), (("cuPointerGetAttribute 10",), ".*: cuIpcGetMemHandle")])
def test_memory_whose_export_alone_says_no_is_refused_with_the_setting(
    cuda_node: CudaNode, rig: CudaRig, client: KVClient, refused: tuple[str, ...], fact: str
) -> None:
    with (
        cuda_node.refusing(*refused),
        cuda_node.virtual_memory(),
        pytest.raises(DeviceError, match=f"cannot be exported{fact}") as raised,
    ):
        KitEngine(rig, client, 1, NHD)
    assert "expandable_segments:True out of" in raised.value.hint
    KitEngine(rig, client, 1, NHD).close()


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("engine_option", ["auto"])
@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("cuMemcpyBatchAsync", "the copy engines cannot copy: cuMemcpyBatchAsync: CUDA_ERROR_NOT_SUPPORTED"),
        ("cuMemcpyBatchAsync, its bytes", "the copy engines cannot copy: bytes changed when they were copied"),
        ("cuLaunchKernel", "the copy engines copy small fragments, slowly, because the kernel cannot: cuLaunchKernel"),
        ("cuLaunchKernel, its bytes", "because the kernel cannot: bytes changed when they were copied"),
        ("cuMemHostGetDevicePointer", "the driver does not report the GPU's address of pinned memory"),
        ("cuMemHostGetDevicePointer, registered", "this GPU maps the arena at another address"),
        ("cuMemHostGetDevicePointer, registered, same", "this GPU maps the arena at another address"),
        ("cuMemcpyBatchAsync, flags", ""),
    ],
)
def test_what_copies_wrongly_or_not_at_all_is_left_out(
    cuda_node: CudaNode, rig: CudaRig, client: KVClient, caplog: pytest.LogCaptureFixture, call: str, told: str
) -> None:
    with cuda_node.refusing(call):
        goes_without(client, rig, caplog, told)


@pytest.mark.parametrize("call", ["cuMemcpyBatchAsync", "cuMemcpyBatchAsync, its bytes"])
def test_where_nothing_copies_the_transport_is_refused(
    cuda_node: CudaNode, rig: CudaRig, client: KVClient, call: str
) -> None:
    with cuda_node.refusing(call), pytest.raises(DeviceError, match="the copy engines cannot copy"):
        KitEngine(rig, client, 1, NHD)


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("engine_option", ["kernel"])
def test_a_kernel_that_is_asked_for_and_does_not_reach_the_arena_is_refused(
    cuda_node: CudaNode, rig: CudaRig, client: KVClient
) -> None:
    with (
        cuda_node.refusing("cuMemHostGetDevicePointer, registered, same"),
        pytest.raises(DeviceError, match=", and no copy engine is in use") as refused,
    ):
        KitEngine(rig, client, 1, NHD)
    assert "dma" in refused.value.hint


@pytest.mark.parametrize("call", ["cuCtxGetStreamPriorityRange", "cuStreamCreateWithPriority"])
def test_without_priorities_streams_have_none(
    cuda_node: CudaNode, rig: CudaRig, client: KVClient, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    with cuda_node.refusing(call):
        goes_without(client, rig, caplog, "loads get no priority over stores:")


def test_a_stream_that_cannot_wait_has_the_thread_wait(cuda_node: CudaNode, rig: CudaRig, client: KVClient) -> None:
    engine = KitEngine(rig, client, 1, NHD)
    request = engine.stored()
    with cuda_node.refusing("cuStreamWaitValue32"):
        future = engine.load(request, engine.target())
        future.to_cuda_future().wait(rig.stream())
        assert future.wait(0), "the thread did not wait"
    engine.expect_loaded(engine.snapshot(), engine.source(), engine.target())
    engine.must_be_right()
    engine.close()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        ("cuIpcGetEventHandle", "cannot share events: cuIpcGetEventHandle"),
        ("cuIpcOpenEventHandle", "cuIpcOpenEventHandle: CUDA_ERROR_NOT_SUPPORTED"),
    ],
)
def test_events_that_cannot_be_shared_are_known_at_registration(
    cuda_node: CudaNode, rig: CudaRig, client: KVClient, call: str, match: str
) -> None:
    before = cuda_node.events()
    with cuda_node.refusing(call), pytest.raises(DeviceError, match=match):
        KitEngine(rig, client, 1, NHD)
    assert (cuda_node.mappings(), cuda_node.events()) == (0, before)
    engine = KitEngine(rig, client, 1, NHD)
    stores_and_loads(engine)
    engine.close()
    wait_until(lambda: cuda_node.events() == before, what="the end of all events")


def test_an_engine_that_sends_no_event_with_its_memory_is_served(
    rig: CudaRig, client: KVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a former release."""
    from kvf_cuda_ipc.driver import MEMORY_HANDLE_BYTES
    from kvf_cuda_ipc.engine_side import CudaEngine

    honest = CudaEngine.export

    def as_before(self: CudaEngine, address: int) -> Exported:
        allocation, offset = honest(self, address)
        assert len(allocation.handle) > MEMORY_HANDLE_BYTES
        handle = allocation.handle[:MEMORY_HANDLE_BYTES]
        return Exported(Allocation(allocation.device, handle, allocation.nbytes), offset)

    monkeypatch.setattr(CudaEngine, "export", as_before)
    engine = KitEngine(rig, client, 1, NHD)
    stores_and_loads(engine)
    engine.close()


def test_an_event_that_the_copier_cannot_open_later_is_a_miss(
    cuda_node: CudaNode, rig: CudaRig, client: KVClient
) -> None:
    engine = KitEngine(rig, client, 1, NHD)
    request = engine.request()
    with cuda_node.refusing("cuIpcOpenEventHandle"):
        assert not engine.store(request, engine.source()).result(PATIENCE_S).ok
    stores_and_loads(engine)
    engine.close()


# what cannot be gone without: the engine's next transport, and a server that goes on


@pytest.mark.parametrize(
    ("call", "result", "match"),
    [
        ("cuMemHostRegister", 2, "cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuIpcOpenMemHandle", 201, "cuIpcOpenMemHandle: CUDA_ERROR_INVALID_CONTEXT"),
        ("cuDevicePrimaryCtxRetain, new", DEVICE_UNAVAILABLE, "cuDevicePrimaryCtxRetain: .*DEVICE_UNAVAILABLE"),
    ],
    ids=["the arena cannot be pinned", "memory cannot be opened", "the GPU admits one process"],
)
def test_what_nothing_replaces_is_the_next_transports_turn(
    cuda_node: CudaNode, rig: CudaRig, client: KVClient, call: str, result: int, match: str
) -> None:
    with cuda_node.refusing(call, result=result), pytest.raises(DeviceError, match=match) as refused:
        KitEngine(rig, client, 1, NHD)
    assert ("compute mode" in str(refused.value.hint)) == (result == DEVICE_UNAVAILABLE)

    engines: list[KitEngine] = []

    def registers() -> bool:
        with contextlib.suppress(DeviceError):  # its copier has just died, and pauses
            engines.append(KitEngine(rig, client, 1, NHD))
        return bool(engines)

    wait_until(registers, what="a registration after the driver says yes")
    stores_and_loads(engines[0])
    engines[0].close()


def test_a_driver_that_does_not_say_whether_it_shares_is_asked_by_trying(
    cuda_node: CudaNode, rig: CudaRig, client: KVClient
) -> None:
    from kvf_cuda_ipc import CudaOptions
    from kvf_cuda_ipc.advice import diagnose

    with cuda_node.refusing("cuDeviceGetAttribute 125"):
        engine = KitEngine(rig, client, 1, NHD)
        stores_and_loads(engine)
        engine.close()
        shown = [each for each in diagnose(CudaOptions(engine="dma")) if each.id == "cuda_ipc.devices"]
    assert {each.level for each in shown} == {"warn"}
    assert all("does not say whether it shares" in each.fact for each in shown)
