"""SGLang's real tree, controller, host pool and threads before a real server, without an engine: seconds a test."""

from __future__ import annotations

import array
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvf_hashers import SglangPages
from kvf_sglang.options import FINGERPRINT
from tests.sglang.model import make
from tests.sglang.test_engine import MODELS
from tests.support.lazy import torch
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.sglang.tree import Tree

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(600),
    # Warnings of SGLang's own imports and collectives are its own.
    pytest.mark.filterwarnings("ignore"),
]

PAGES, PAGE = 8, 16
PROMPT = [random.Random(1).randrange(32000) for _ in range(PAGES * PAGE)]
PATIENT = {f"kvframework.{name}_deadline_s": 10.0 for name in ("lookup", "load", "store")}


@pytest.fixture(scope="module")
def model() -> Path:
    return make(MODELS / "tiny", "tiny")


def tree(server: ServerProcess, model: Path, **options: Any) -> Tree:
    """A new tree, as of a new engine, once it is registered."""
    from tests.sglang.tree import Tree

    found = Tree(server.endpoint, model, **{"kvframework.deadline_scale": 20.0, **PATIENT, **options})
    wait_until(lambda: found.backend.cache._of("kv"), what="the registration")
    return found


def stored(server: ServerProcess, model: Path, **options: Any) -> Any:
    """Stores the prompt by a tree of its own; the content."""
    first = tree(server, model, **options)
    content = first.content(first.insert(PROMPT))

    def done() -> bool:
        first.step()
        return bool(server.status()["l1"]["objects"] == PAGES)

    wait_until(done, what="the stores")
    first.close()
    return content


def prefetched(second: Tree, tokens: list[int]) -> Any:
    handle = second.prefetch(tokens, "request")

    def done() -> bool:
        second.step()
        return bool(second.cache.check_prefetch_progress(handle))

    wait_until(done, what="the prefetch")
    return second.load_back(tokens)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"layout": "layer_first"}, {"layout": "page_first_direct"}),
        ({"layout": "page_first_direct", "allocator": "shm"}, {"layout": "layer_first", "allocator": "shm"}),
    ],
    ids=["private", "shm"],
)
def test_a_new_tree_loads_what_another_has_stored(
    server: ServerProcess, model: Path, first: dict[str, str], second: dict[str, str]
) -> None:
    content = stored(server, model, **first)
    other = tree(server, model, **second)
    places = prefetched(other, [*PROMPT, 1, 2, 3])
    assert torch.equal(other.content(places), content)
    assert not other.backend.errors
    other.close()


def test_a_host_pool_smaller_than_the_hit_takes_what_it_can(server: ServerProcess, model: Path) -> None:
    content = stored(server, model)
    small = tree(server, model, tokens=2 * PAGE)
    places = prefetched(small, PROMPT)
    assert len(places) < len(PROMPT)
    assert torch.equal(small.content(places), content[:, :, : len(places)])
    small.close()


def test_a_server_that_hangs_holds_neither_loads_nor_stores(server: ServerProcess, model: Path) -> None:
    """The tree goes on before the server does, and after it finds the pages."""
    stored(server, model)
    short = {**dict.fromkeys(PATIENT, 0.3), "kvframework.deadline_scale": 1.0}
    other = tree(server, model, **short)
    server.sigstop()
    assert len(prefetched(other, PROMPT)) == 0
    other.insert([7] * PAGE)
    controller = other.cache.cache_controller

    def drained() -> bool:
        other.step()
        return controller.backup_queue.empty() and not other.cache.ongoing_backup

    wait_until(drained, what="the end of the store")
    server.sigcont()
    wait_until(lambda: len(prefetched(other, PROMPT)) == len(PROMPT), what="a load")
    assert not other.backend.errors
    other.close()


def test_page_hashes_are_those_of_the_hasher(model: Path) -> None:
    from tests.sglang.tree import everything

    everything.install()
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    for page in (1, 16):
        tokens = PROMPT[: 3 * page + 1]
        theirs = get_storage_hash_str(tokens, None, page_size=page)
        ours = SglangPages().chunk_digests(array.array("I", tokens).tobytes(), page)
        whole = [ours[at : at + 32].hex() for at in range(0, len(ours), 32)]
        assert theirs[: len(whole)] == whole


def test_the_storage_interface_is_the_known_one(model: Path) -> None:
    from tests.sglang.tree import everything

    everything.install()
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    from kvf_sglang.options import interface_of

    assert interface_of(HiCacheStorage) == FINGERPRINT
