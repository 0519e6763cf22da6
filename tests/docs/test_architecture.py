"""The trips in docs/architecture.md against the files that a real STORE, LOOKUP, RETRIEVE and registration enter."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.processes import ran
from tests.support.redis_server import RedisServer

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.redis]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
ROOMS = PAGE.parents[1] / "kvframework"
PATH = re.compile(r"`([a-z_0-9]+(?:/[a-z_0-9]+)*\.py)`")
THREADS = ("engine", "serving", "storage")
# What every trip enters and no list names: types, error classes, clocks; and the package that tiers have beside them.
EVERYWHERE = ("api/", "errors.py", "logs/", "supervise/", "text.py", "kvf_quota/")


def sections() -> dict[str, str]:
    """Text by heading, of the third level."""
    parts = re.split(r"^### (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def listed(section: str) -> dict[str, list[str]]:
    """By thread: the files at the head of each numbered line, in order."""
    found: dict[str, list[str]] = {}
    for heading in re.split(r"^In the ", section, flags=re.MULTILINE)[1:]:
        thread = re.match(r"\w+", heading)
        items = re.split(r"^\d+\. ", heading, flags=re.MULTILINE)[1:]
        assert thread is not None
        found[thread[0]] = [file for item in items for file in PATH.findall(re.split(r":\s", item)[0])]
    return found


@pytest.fixture(scope="module")
def trips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as redis:
        run = ran(sys.executable, "-m", "tests.docs.trace_trips", redis.url, code=None)
    assert run.returncode == 0, run.stderr
    traced: dict[str, dict[str, list[str]]] = json.loads(run.stdout)
    return traced


@pytest.mark.parametrize("trip", ["registration", "STORE", "LOOKUP", "RETRIEVE"])
@pytest.mark.parametrize("thread", THREADS)
def test_a_trip_enters_the_files_that_the_page_lists(
    trips: dict[str, dict[str, list[str]]], trip: str, thread: str
) -> None:
    page = sections()
    here = listed(page[trip]).get(thread, [])
    any_request = listed(page["Any request"]).get(thread, [])
    ticks = PATH.findall(page["Ticks"])
    entered = trips[trip].get(thread, [])
    remaining = iter(entered)
    missing = [file for file in here if file not in remaining]
    assert not missing, f"not entered, or not in this order: {missing}; entered: {list(dict.fromkeys(entered))}"
    unlisted = {file for file in entered if not file.startswith(EVERYWHERE)} - {*here, *any_request, *ticks}
    assert not unlisted, f"entered and not listed: {sorted(unlisted)}"


def test_the_page_names_files_that_are_there() -> None:
    packages = [file.parent for place in ("*", "*/*") for file in ROOMS.parent.glob(f"plugins/{place}/pyproject.toml")]
    tops = [ROOMS, ROOMS.parent, ROOMS.parent / "plugins" / "defaults", *packages]
    for file in PATH.findall(PAGE.read_text()):
        assert any((top / file).exists() for top in tops), file
