"""A real engine behind a server that lies about one thing: a miss that is counted, no byte moved, nothing kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import msgspec
import pytest

from kvframework.api.transport import ArenaRange, StoreOutcome
from kvframework.client import KVClient
from kvframework.errors import ProtocolError
from kvframework.wire import messages as m
from tests.support.engines import PagedEngine
from tests.support.lazy import torch
from tests.support.lying_proxy import LyingProxy
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.torch


PATIENCE_S = 30.0
TOKENS = 512
BLOCKS, OTHERS = [list(range(32))], [list(range(63, 31, -1))]
MIB = 1 << 20
CAPACITY = 4 * MIB

Places = tuple[ArenaRange, ...]
replaced = msgspec.structs.replace


def first(**changes: int) -> Callable[[Places], Places]:
    """The first range, changed."""
    return lambda places: (replaced(places[0], **changes), *places[1:])


# What no transfer of this engine can have: 2 chunks of one layer group.
RANGES: dict[str, Callable[[Places], Places]] = {
    "just beyond the arena": lambda places: (replaced(places[0], offset=CAPACITY - places[0].length + 1), *places[1:]),
    "far beyond the arena": first(offset=1 << 63),
    "before the arena": first(offset=-64),
    "empty": first(length=0),
    "of a negative length": first(length=-64),
    "of a shorter object": lambda places: (replaced(places[0], length=places[0].length - 1), *places[1:]),
    "of a longer object": lambda places: (replaced(places[0], length=places[0].length + 64), *places[1:]),
    "of a later chunk": first(chunk=2),
    "of an earlier chunk": first(chunk=-1),
    "of an unknown group": first(group=1),
    "of a negative group": first(group=-1),
    "of another object's place": lambda places: (replaced(places[0], offset=places[1].offset), *places[1:]),
    "of a part of another object": lambda places: (replaced(places[0], offset=places[1].offset - 64), *places[1:]),
    "named twice": lambda places: (*places, places[0]),
    "of one object at two places": lambda places: (*places, replaced(places[0], offset=CAPACITY - places[0].length)),
}
# A load needs every object; a store may have fewer.
LACKING: dict[str, Callable[[Places], Places]] = {
    "none": lambda _: (),
    "one too few": lambda places: places[1:],
    "one in the other's stead": lambda places: (replaced(places[1], offset=places[0].offset), places[1]),
}


class Lab:
    """The engine, the proxy that it is connected to, and the server behind both."""

    def __init__(self, server: ServerProcess, proxy: LyingProxy, client: KVClient) -> None:
        self.server = server
        self.proxy = proxy
        self.engine = PagedEngine(client)
        self._requests = count()

    def new_request(self) -> Any:
        number = next(self._requests)
        return self.engine.request([number, *range(TOKENS)], f"r{number}")

    def store(self, request: Any) -> StoreOutcome:
        return self.engine.worker.submit_store(request, 0, TOKENS, BLOCKS).result(PATIENCE_S)

    def load(self, request: Any, skip: int = 0) -> Any:
        return self.engine.worker.submit_retrieve(request, 0, TOKENS, OTHERS, skip_first_n_tokens=skip).result(
            PATIENCE_S
        )

    def content(self) -> dict[str, Any]:
        return {name: tensor.clone() for name, tensor in self.engine.kv.items()}

    def arena(self) -> bytes:
        with self.server.client() as client:
            assert client.arena is not None
            return bytes(client.arena)

    def held(self) -> tuple[int, ...]:
        l1 = self.server.status()["l1"]
        return l1["pins"], l1["write_leases"], l1["pin_leases"], l1["quarantined_bytes"]

    def losses(self) -> int:
        lost = self.server.status()["losses"]
        return int(lost["stores"] + lost["loads"])


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with (
        ServerProcess(capacity=str(CAPACITY)) as server,
        LyingProxy(server.endpoint) as proxy,
        KVClient(proxy.endpoint, deadline_scale=20.0) as client,
    ):
        assert client.wait_up(60)
        assert client.maps_arena
        yield Lab(server, proxy, client)


@pytest.fixture(autouse=True)
def honest_again(lab: Lab) -> Iterator[None]:
    yield
    lab.proxy.lies.clear()
    request = lab.new_request()
    assert lab.store(request).stored == 2
    assert lab.load(request).ok
    assert all(torch.equal(kv[:, OTHERS[0]], kv[:, BLOCKS[0]]) for kv in lab.engine.kv.values())
    with lab.server.client() as client:
        client.call("CLEAR", m.Clear())


def check_store_fails(lab: Lab, name: str, lie: Callable[[Any], Any]) -> None:
    request, arena, losses = lab.new_request(), lab.arena(), lab.losses()
    lab.proxy.lies[name] = lie
    outcome = lab.store(request)
    assert lab.proxy.lies.pop(name)
    assert (outcome.ok, outcome.stored, outcome.dropped) == (False, 0, 2)
    assert outcome.error == ProtocolError.code
    assert lab.arena() == arena
    wait_until(lambda: not any(lab.held()), PATIENCE_S, "the end of the lease")
    wait_until(lambda: lab.losses() > losses, PATIENCE_S, "the count")
    assert not lab.load(request).ok


def check_load_fails(lab: Lab, lie: Callable[[Any], Any]) -> None:
    request = lab.new_request()
    assert lab.store(request).ok
    before, losses = lab.content(), lab.losses()
    lab.proxy.lies["PREPARE_RETRIEVE"] = lie
    outcome = lab.load(request)
    del lab.proxy.lies["PREPARE_RETRIEVE"]
    assert (outcome.ok, outcome.error) == (False, ProtocolError.code)
    assert all(torch.equal(lab.engine.kv[name], tensor) for name, tensor in before.items())
    wait_until(lambda: not any(lab.held()), PATIENCE_S, "the end of the pins")
    wait_until(lambda: lab.losses() > losses, PATIENCE_S, "the count")


@pytest.mark.parametrize("lie", RANGES.values(), ids=RANGES)
def test_a_store_takes_no_range(lab: Lab, lie: Callable[[Places], Places]) -> None:
    check_store_fails(lab, "PREPARE_STORE", lambda plan: replaced(plan, ranges=lie(plan.ranges)))


@pytest.mark.parametrize(
    "outcome", [StoreOutcome(present=1), StoreOutcome(dropped=-1), StoreOutcome(present=-2, stored=2)]
)
def test_a_store_believes_no_count_of_other_objects_than_its_own(lab: Lab, outcome: StoreOutcome) -> None:
    check_store_fails(lab, "PREPARE_STORE", lambda plan: replaced(plan, outcome=outcome))


def test_a_store_whose_ranges_are_too_few_is_not_called_stored(lab: Lab) -> None:
    check_store_fails(lab, "PREPARE_STORE", lambda plan: replaced(plan, ranges=plan.ranges[1:]))


@pytest.mark.parametrize("lie", (RANGES | LACKING).values(), ids=RANGES | LACKING)
def test_a_load_reads_no_range(lab: Lab, lie: Callable[[Places], Places]) -> None:
    check_load_fails(lab, lambda plan: replaced(plan, ranges=lie(plan.ranges)))


def test_a_plan_without_a_lease_is_no_hit_and_no_store(lab: Lab) -> None:
    request = lab.new_request()
    lab.proxy.lies["PREPARE_STORE"] = lambda plan: replaced(plan, lease="unknown")
    assert lab.store(request).dropped == 2
    assert lab.store(lab.new_request()).dropped == 2
    lab.proxy.lies.clear()
    request = lab.new_request()
    assert lab.store(request).ok
    lab.proxy.lies["PREPARE_RETRIEVE"] = lambda plan: replaced(plan, lease="unknown", lease_s=0.0)
    assert not lab.load(request).ok


def test_pins_that_did_not_last_make_a_miss(lab: Lab) -> None:
    request = lab.new_request()
    assert lab.store(request).ok
    lab.proxy.lies["PREPARE_RETRIEVE"] = lambda plan: replaced(plan, lease_s=0.0)  # so that the engine asks
    lab.proxy.lies["COMMIT_RETRIEVE"] = lambda _: m.RetrieveCommitted(False)
    assert not lab.load(request).ok
