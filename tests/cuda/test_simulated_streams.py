"""Streams, events, faults and kernels of the simulated CUDA driver, as `cuda.bindings` sees them in processes of their
own."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

from tests.cuda.building import KERNELS_VARIABLE, compiler
from tests.cuda.node import CudaNode
from tests.cuda.peers import DATA, LAZY, NON_BLOCKING, STALE, Peer, Refused, kinds
from tests.support.waiting import wait_until

NO_TIMING, INTERPROCESS = 2, 6

# order


def gated(peer: Peer, stream: str) -> None:
    """Hold the stream until `open_gate`."""
    peer("cuMemHostAlloc", 4096, 3, keep="gate")
    peer("cuStreamWaitValue32", stream, "$gate", 1, 0)


def open_gate(peer: Peer) -> None:
    peer("poke", "$gate", struct.pack("<I", 1))


def settle(peer: Peer) -> None:
    """Wait until all work that nothing holds is done: many times the delay of a piece of work."""
    peer("cuStreamCreate", NON_BLOCKING, keep="settling")
    peer("cuEventCreate", NO_TIMING, keep="settled")
    for _ in range(20):
        peer("cuEventRecord", "$settled", "$settling")
    peer("cuStreamSynchronize", "$settling")


def is_reached(peer: Peer, event: str) -> bool:
    try:
        peer("cuEventQuery", event)
    except Refused as answer:
        assert str(answer) == "CUDA_ERROR_NOT_READY"  # noqa: PT017 - it is no failure
        return False
    return True


def test_a_wait_is_bound_to_the_record_before_it(peer: Peer) -> None:
    for name in ("s", "t", "u"):
        peer("cuStreamCreate", NON_BLOCKING, keep=name)
    peer("cuEventCreate", NO_TIMING, keep="e")
    peer("cuEventCreate", NO_TIMING, keep="waited")
    assert is_reached(peer, "$e"), "one that was never recorded is complete"
    gated(peer, "$s")
    peer("cuEventRecord", "$e", "$s")
    assert not is_reached(peer, "$e")
    peer("cuStreamWaitEvent", "$t", "$e", 0)
    peer("cuEventRecord", "$waited", "$t")
    peer("cuEventRecord", "$e", "$u")
    wait_until(lambda: is_reached(peer, "$e"), what="the later record, on another stream")
    settle(peer)
    assert not is_reached(peer, "$waited"), "the wait is for the record that was made before it"
    open_gate(peer)
    wait_until(lambda: is_reached(peer, "$waited"), what="the wait's end")


def test_an_event_is_recorded_and_waited_for_by_two_processes(node: CudaNode, peer: Peer, other: Peer) -> None:
    with pytest.raises(Refused, match="INVALID_VALUE"):
        peer("cuEventCreate", INTERPROCESS - NO_TIMING)
    peer("cuEventCreate", INTERPROCESS, keep="e")
    handle = peer("cuIpcGetEventHandle", "$e")
    with pytest.raises(Refused, match="INVALID_CONTEXT"):
        peer("cuIpcOpenEventHandle", f"event:{handle}")
    other("cuIpcOpenEventHandle", f"event:{handle}", keep="e")
    assert node.events() == 2
    for one, two in ((peer, other), (other, peer)):
        for each in (one, two):
            each("cuStreamCreate", NON_BLOCKING, keep="s")
            each("cuEventCreate", NO_TIMING, keep="mine")
        gated(one, "$s")
        one("cuEventRecord", "$e", "$s")
        two("cuStreamWaitEvent", "$s", "$e", 0)
        two("cuEventRecord", "$mine", "$s")
        settle(two)
        assert not is_reached(two, "$e")
        assert not is_reached(two, "$mine")
        open_gate(one)
        wait_until(lambda two=two: is_reached(two, "$mine"), what="the other's wait")
        assert is_reached(one, "$e")
    other("cuEventDestroy", "$e")
    peer("cuEventDestroy", "$e")
    assert node.events() == 0
    assert kinds(node) == []
    with pytest.raises(Refused, match="INVALID_HANDLE"):
        peer("cuEventQuery", "$e")
    assert kinds(node) == ["use_after_free"]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_copy_that_runs_before_its_turn_is_noted(node: CudaNode, peer: Peer, other: Peer, ordered: bool) -> None:
    peer("cuMemAlloc", 1000, keep="a")
    peer("cuEventCreate", INTERPROCESS, keep="e")
    other("cuIpcOpenMemHandle", "mem:" + peer("cuIpcGetMemHandle", "$a"), LAZY, keep="a")
    other("cuIpcOpenEventHandle", "event:" + peer("cuIpcGetEventHandle", "$e"), keep="e")
    for each in (peer, other):
        each("cuStreamCreate", NON_BLOCKING, keep="s")
        each("cuMemHostAlloc", 4096, 3, keep="h")
    node.inject("hold", node.devices[0])
    peer("batch", ["$a", "$a+500"], ["$h", "$h"], [100, 100], "$s")
    peer("cuEventRecord", "$e", "$s")
    wait_until(lambda: node.hits("hold"), what="a copy that is held")
    if ordered:
        other("cuStreamWaitEvent", "$s", "$e", 0)
    other("cuMemcpyDtoHAsync", "$h", "$a+200", 300, "$s")
    other("cuMemcpyDtoHAsync", "$h", "$a+599", 1, "$s")
    if not ordered:
        wait_until(lambda: kinds(node), what="the violation")
    node.release()
    for each in (peer, other):
        each("cuStreamSynchronize", "$s")
    assert kinds(node) == ([] if ordered else ["unordered"]), "only one of them touches the same bytes"


def test_what_waits_for_the_host_has_its_turn_after_it(node: CudaNode, peer: Peer) -> None:
    peer("cuMemAlloc", 1000, keep="a")
    peer("cuMemHostAlloc", 4096, 3, keep="h")
    for name in ("s", "t"):
        peer("cuStreamCreate", NON_BLOCKING, keep=name)
    peer("poke", "$h", DATA)
    gated(peer, "$s")
    peer("cuMemcpyDtoHAsync", "$h+1000", "$a", 256, "$s")
    peer("cuMemcpyHtoDAsync", "$a", "$h", 256, "$t")
    peer("cuStreamSynchronize", "$t")
    settle(peer)
    with pytest.raises(Refused, match="NOT_READY"):
        peer("cuStreamQuery", "$s")
    open_gate(peer)
    peer("cuStreamSynchronize", "$s")
    assert peer("peek", "$h+1000", 256) == DATA.hex()
    assert kinds(node) == []


# faults


@pytest.fixture
def copying(peer: Peer) -> Peer:
    """`batch` of two fragments can be called."""
    peer("cuMemAlloc", 1000, keep="a")
    peer("cuMemHostAlloc", 4096, 3, keep="h")
    peer("cuStreamCreate", NON_BLOCKING, keep="s")
    peer("poke", "$h", DATA)
    return peer


FRAGMENTS = (["$a", "$a+500"], ["$h", "$h"], [100, 100], "$s")
BOTH, HALF, NONE = ((DATA[:100], DATA[:100]), (DATA[:100], STALE * 100), (STALE * 100, STALE * 100))


def fragments(peer: Peer) -> tuple[bytes, bytes]:
    return bytes.fromhex(peer("read", "$a", 100)), bytes.fromhex(peer("read", "$a+500", 100))


def test_a_copy_that_fails_has_done_half(node: CudaNode, copying: Peer) -> None:
    node.inject("copy_fails", node.devices[1])
    copying("batch", *FRAGMENTS)
    copying("cuStreamSynchronize", "$s")
    assert (fragments(copying), node.hits("copy_fails")) == (BOTH, 0), "it is another device's"
    copying("cuMemsetD8", "$a", STALE[0], 1000)
    node.inject("copy_fails", node.devices[0])
    copying("cuMemcpyHtoDAsync", "$a+900", "$h", 10, "$s")
    with pytest.raises(Refused, match="INVALID_VALUE"):
        copying("batch", *FRAGMENTS)
    copying("cuStreamSynchronize", "$s")
    assert (fragments(copying), node.hits("copy_fails")) == (HALF, 1)
    copying("batch", *FRAGMENTS)
    copying("cuStreamSynchronize", "$s")
    assert fragments(copying) == BOTH


def test_a_poisoned_context_is_useless_and_another_process_is_not(node: CudaNode, copying: Peer, other: Peer) -> None:
    copying("cuEventCreate", NO_TIMING, keep="e")
    node.inject("poison", node.devices[0])
    gated(copying, "$s")
    copying("batch", *FRAGMENTS)
    copying("cuEventRecord", "$e", "$s")
    open_gate(copying)
    wait_until(lambda: node.hits("poison"), what="the poisoning")
    for function, arguments in {"cuEventQuery": ["$e"], "cuMemAlloc": [10], "cuStreamCreate": [0]}.items():
        with pytest.raises(Refused, match="ILLEGAL_ADDRESS"):
            copying(function, *arguments)
    with pytest.raises(Refused, match="ILLEGAL_ADDRESS"):
        copying("cuStreamSynchronize", "$s")
    other("cuMemAlloc", 10)


def test_a_copy_is_held_in_its_middle(node: CudaNode, copying: Peer, other: Peer) -> None:
    other("cuIpcOpenMemHandle", "mem:" + copying("cuIpcGetMemHandle", "$a"), LAZY, keep="a")
    node.inject("hold", node.devices[0])
    copying("batch", *FRAGMENTS)
    wait_until(lambda: node.hits("hold"), what="the hold")
    assert sorted(fragments(other)) == sorted(HALF)
    settle(copying)
    with pytest.raises(Refused, match="NOT_READY"):
        copying("cuStreamQuery", "$s")
    node.release()
    copying("cuStreamSynchronize", "$s")
    assert fragments(other) == BOTH


# kernels

KERNEL = """
extern __thread unsigned kvf_block_x, kvf_blocks_x, kvf_thread_x, kvf_threads_x;
__thread unsigned kvf_block_x, kvf_blocks_x, kvf_thread_x, kvf_threads_x;
struct parameters { unsigned char *to; unsigned char add; };
const unsigned long count_params = sizeof(struct parameters);
void count(const struct parameters *told)
{
    unsigned at = kvf_block_x * kvf_threads_x + kvf_thread_x;
    told->to[at] = (unsigned char)(at + kvf_blocks_x + told->add);
}
"""


def test_a_kernel_runs_for_every_thread_of_every_block(node: CudaNode, tmp_path: Path) -> None:
    (tmp_path / "kernel.c").write_text(KERNEL)
    built = tmp_path / "kernel.so"
    subprocess.run([compiler("cc"), "-shared", "-fPIC", "-o", built, tmp_path / "kernel.c"], check=True)
    with Peer(node, **{KERNELS_VARIABLE: str(built)}) as peer:
        address = peer("cuMemAlloc", 1000, keep="a")
        peer("cuStreamCreate", NON_BLOCKING, keep="s")
        peer("cuModuleLoadData", b"image", keep="m")
        with pytest.raises(Refused, match="NOT_FOUND"):
            peer("cuModuleGetFunction", "$m", b"other")
        peer("cuModuleGetFunction", "$m", b"count", keep="f")
        parameters = struct.pack("<QB7x", address, 7)
        peer("launch", "$f", 4, 32, "$s", parameters)
        peer("cuStreamSynchronize", "$s")
        assert peer("read", "$a", 129) == (bytes(at + 4 + 7 for at in range(128)) + STALE).hex()
        with pytest.raises(Refused, match="INVALID_VALUE"):
            peer("launch", "$f", 4, 2048, "$s", parameters)
        peer("cuMemsetD8", "$a", STALE[0], 1000)
        node.inject("copy_fails", node.devices[0])
        with pytest.raises(Refused, match="INVALID_VALUE"):
            peer("launch", "$f", 4, 32, "$s", parameters)
        peer("cuStreamSynchronize", "$s")
        assert peer("read", "$a+63", 2) == (bytes([63 + 4 + 7]) + STALE).hex()
