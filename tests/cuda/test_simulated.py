"""The simulated CUDA driver does what the real one does with devices, memory and copies, as `cuda.bindings` sees it in
processes of their own; and it notes what a device would let pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda.building import driver_library
from tests.cuda.node import CudaNode
from tests.cuda.peers import DATA, LAZY, NON_BLOCKING, STALE, Peer, Refused, kinds

# devices


@pytest.mark.parametrize(
    ("told", "seen"),
    [(None, [0, 1, 2]), ("1,0", [1, 0]), ("{1}", [1]), ("GPU-03,{0}", [2, 0]), ("1,9,0", [1]), ("0,GPU-,1", [0])],
)
def test_a_process_sees_the_devices_that_it_is_told(tmp_path: Path, told: str | None, seen: list[int]) -> None:
    driver_library()
    with CudaNode(tmp_path / "node", devices=3) as node:
        names = [each.removeprefix("GPU-").replace("-", "") for each in node.devices]
        variables = {} if told is None else {"CUDA_VISIBLE_DEVICES": told.format(*node.devices)}
        with Peer(node, **variables) as peer:
            assert peer("uuids") == [names[at] for at in seen]


@pytest.mark.parametrize("told", ["", "GPU-ff", "7", "MIG-01000000"])
def test_a_process_that_sees_none_is_told_so(node: CudaNode, told: str) -> None:
    with pytest.raises(Refused, match="NO_DEVICE"):
        Peer(node, CUDA_VISIBLE_DEVICES=told)


def test_where_there_is_no_node_there_is_no_device(node: CudaNode) -> None:
    with pytest.raises(Refused, match="NO_DEVICE"):
        Peer(node, KVF_SIMULATED_CUDA=str(node.path / "none"))


def test_an_instance_of_a_divided_gpu_is_seen_by_its_own_name(tmp_path: Path) -> None:
    driver_library()
    with CudaNode(tmp_path / "node", mig=True) as node:
        names = [each.removeprefix("MIG-").replace("-", "") for each in node.devices]
        with Peer(node, CUDA_VISIBLE_DEVICES=node.devices[1]) as peer:
            assert peer("uuids") == names[1:]
        with Peer(node) as peer:
            assert peer("uuids") == names[:1], "a process has one"
        with pytest.raises(Refused, match="NO_DEVICE"):
            Peer(node, CUDA_VISIBLE_DEVICES=node.devices[1].replace("MIG", "GPU"))


def test_a_vanished_device_refuses_every_call_and_no_other_does(node: CudaNode, peer: Peer) -> None:
    with Peer(node, ordinal=1) as other:
        node.vanish(node.devices[0])
        with pytest.raises(Refused, match="UNKNOWN"):
            peer("cuMemAlloc", 1)
        other("cuMemAlloc", 1)
        node.vanish(node.devices[0], back=True)
        peer("cuMemAlloc", 1)


def test_an_old_driver_has_no_batched_copies(tmp_path: Path) -> None:
    driver_library()
    with CudaNode(tmp_path / "node", driver_version=12040) as node, Peer(node) as peer:
        assert peer("cuDriverGetVersion") == 12040
        with pytest.raises(Refused, match=r"cuMemcpyBatchAsync\w* is not found"):
            peer("batch", [0], [0], [0], 0)


# memory


def test_memory_is_one_for_all_who_have_it_open(node: CudaNode, peer: Peer, other: Peer) -> None:
    address = peer("cuMemAlloc", 1000, keep="a")
    assert peer("read", "$a+999", 1) == STALE.hex()
    handle = peer("cuIpcGetMemHandle", address)
    assert peer("cuIpcGetMemHandle", address) == handle
    opened = other("cuIpcOpenMemHandle", f"mem:{handle}", LAZY, keep="a")
    assert other("cuIpcOpenMemHandle", f"mem:{handle}", LAZY) == opened
    peer("cuMemcpyHtoD", "$a+744", DATA, 256)
    assert other("read", "$a+744", 256) == DATA.hex()
    assert (node.mappings(), node.allocated(node.devices[0])) == (1, 1000)
    other("cuIpcCloseMemHandle", "$a")
    assert other("read", "$a+744", 1) == DATA[:1].hex()
    other("cuIpcCloseMemHandle", "$a")
    assert node.mappings() == 0
    with pytest.raises(Refused, match="INVALID_VALUE"):
        other("cuIpcCloseMemHandle", "$a")
    peer("cuMemFree", "$a")
    assert node.allocated(node.devices[0]) == 0


def test_a_handle_opens_only_where_it_means_something(node: CudaNode, peer: Peer) -> None:
    peer("cuMemAlloc", 1000, keep="a")
    handle = peer("cuIpcGetMemHandle", "$a")
    with pytest.raises(Refused, match="INVALID_CONTEXT"):
        peer("cuIpcOpenMemHandle", f"mem:{handle}", LAZY)
    with pytest.raises(Refused, match="INVALID_VALUE"):
        peer("cuIpcGetMemHandle", "$a+1")
    with Peer(node, ordinal=1) as other:
        with pytest.raises(Refused, match="INVALID_DEVICE"):
            other("cuIpcOpenMemHandle", f"mem:{handle}", LAZY)
        for wrong in (handle[:-80] + "0" * 80, "00" * 64, "ff" * 64):
            with pytest.raises(Refused, match="INVALID_VALUE"):
                other("cuIpcOpenMemHandle", f"mem:{wrong}", LAZY)
    assert node.mappings() == 0


@pytest.mark.parametrize("how", ["freed", "dead"])
def test_memory_stays_while_somebody_has_it_open(node: CudaNode, other: Peer, how: str) -> None:
    with Peer(node) as peer:
        peer("cuMemAlloc", 1000, keep="a")
        peer("cuMemcpyHtoD", "$a", DATA, 256)
        handle = peer("cuIpcGetMemHandle", "$a")
        other("cuIpcOpenMemHandle", f"mem:{handle}", LAZY, keep="a")
        peer("cuMemFree", "$a") if how == "freed" else peer.kill()
        assert other("read", "$a", 256) == DATA.hex()
        assert node.allocated(node.devices[0]) == 1000
        with Peer(node) as third, pytest.raises(Refused, match="INVALID_VALUE"):
            third("cuIpcOpenMemHandle", f"mem:{handle}", LAZY)
        other.kill()
        assert (node.mappings(), node.allocated(node.devices[0])) == (0, 0)
    with Peer(node) as fourth:
        fourth("cuMemAlloc", 1 << 20)
        assert node.allocated(node.devices[0]) == 1 << 20


def test_what_cannot_be_had_is_refused(node: CudaNode, peer: Peer) -> None:
    peer("cuMemAlloc", 1 << 19)
    with pytest.raises(Refused, match="OUT_OF_MEMORY"):
        peer("cuMemAlloc", (1 << 19) + 1)
    with pytest.raises(Refused, match="INVALID_CONTEXT"):
        peer("elsewhere", "cuMemAlloc", 1)
    with node.virtual_memory():
        peer("cuMemAlloc", 100, keep="a")
    peer("cuMemAlloc", 100, keep="b")
    assert (peer("is_lendable", "$a"), peer("is_lendable", "$b+99")) == (False, True)
    with pytest.raises(Refused, match="INVALID_VALUE"):
        peer("cuIpcGetMemHandle", "$a")


# copies


def test_copies_need_one_range_that_is_pinned_and_one_allocation(node: CudaNode, peer: Peer) -> None:
    peer("cuMemAlloc", 1000, keep="a")
    peer("page", 8192, keep="h")
    peer("cuStreamCreate", NON_BLOCKING, keep="s")
    peer("cuMemHostRegister", "$h", 4096, 3)
    with pytest.raises(Refused, match="ALREADY_REGISTERED"):
        peer("cuMemHostRegister", "$h+4000", 100, 3)
    peer("cuMemHostRegister", "$h+4096", 4096, 3)
    peer("cuMemcpyHtoDAsync", "$a", "$h", 1000, "$s")
    peer("cuMemcpyHtoDAsync", "$a", "$h+4096", 1000, "$s")
    assert kinds(node) == []
    for to, source, nbytes in (("$a", "$h+4000", 200), ("$a", "$h+8190", 8), ("$a+999", "$h", 2)):
        with pytest.raises(Refused, match="INVALID_VALUE"):
            peer("cuMemcpyHtoDAsync", to, source, nbytes, "$s")
        with pytest.raises(Refused, match="INVALID_VALUE"):
            peer("batch", ["$a", to], ["$h", source], [10, nbytes], "$s")
    assert kinds(node) == ["not_pinned"] * 4 + ["out_of_bounds"] * 2
    peer("cuMemHostUnregister", "$h")
    with pytest.raises(Refused, match="INVALID_VALUE"):
        peer("cuMemcpyDtoHAsync", "$h", "$a", 10, "$s")


def test_a_batch_copies_all_its_fragments(node: CudaNode, peer: Peer) -> None:
    peer("cuMemAlloc", 1000, keep="a")
    peer("cuMemHostAlloc", 4096, 3, keep="h")
    peer("cuStreamCreate", NON_BLOCKING, keep="s")
    peer("poke", "$h", DATA)
    peer("batch", ["$a+10", "$a+100", "$a+500"], ["$h", "$h+50", "$h+200"], [5, 40, 56], "$s")
    peer("batch", ["$h+1000", "$h+2000"], ["$a+500", "$a+9"], [56, 7], "$s")
    peer("cuStreamSynchronize", "$s")
    assert peer("read", "$a+100", 41) == (DATA[50:90] + STALE).hex()
    assert peer("peek", "$h+1000", 56) == DATA[200:].hex()
    assert peer("peek", "$h+2000", 7) == (STALE + DATA[:5] + STALE).hex()
    assert kinds(node) == []


def test_a_batch_is_refused_as_the_real_one_is(node: CudaNode, peer: Peer) -> None:
    peer("cuMemAlloc", 1000, keep="a")
    peer("cuMemHostAlloc", 4096, 3, keep="h")
    peer("cuStreamCreate", NON_BLOCKING, keep="s")
    for wrong in ([["$a"], ["$h"], [5], 0], [["$a"], ["$h"], [5], "$s", 0], [["$h"], ["$h+100"], [5], "$s"]):
        with pytest.raises(Refused, match="INVALID_VALUE"):
            peer("batch", *wrong)
    assert kinds(node) == []
    peer("batch", ["$a", "$a+4"], ["$h", "$h"], [5, 5], "$s")
    peer("batch", ["$a"], ["$h"], [5], "$s", 3)
    assert kinds(node) == ["overlap", "source_order"]


def test_memory_of_another_device_is_not_copied(node: CudaNode, peer: Peer) -> None:
    peer("cuMemAlloc", 1000, keep="a")
    peer("cuMemHostAlloc", 4096, 3, keep="h")
    peer("start", 1)
    peer("cuStreamCreate", NON_BLOCKING, keep="s")
    with pytest.raises(Refused, match="INVALID_VALUE"):
        peer("cuMemcpyHtoDAsync", "$a", "$h", 5, "$s")
    assert kinds(node) == ["wrong_device"]
