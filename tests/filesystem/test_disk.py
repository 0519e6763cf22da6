"""A folder as L2 of a real server: killed in mid write, full, read-only, garbled underneath, at its capacity."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path

import pytest

from kvf_filesystem.form import path_of
from kvf_filesystem.root import MARKER
from kvframework.wire import messages as m
from tests.core.cli.command import run
from tests.core.tiers.damage import KINDS, damage_in_folder
from tests.core.tiers.engine import Engine
from tests.core.tiers.nodes import await_count, await_rest, await_state, await_written, count, tier
from tests.core.tiers.prompts import object_key, prompt
from tests.filesystem import remountable_server
from tests.filesystem.small_disk import remount, small_disk
from tests.support.observe_process import ObserveProcess, get
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

WIDE = 256  # objects of 1 MiB, which are written past the page cache where that is possible


def settings(folder: Path, **table: object) -> list[str]:
    # A disk that others keep busy may hold up a write for longer than the default of two seconds, which drops it.
    chosen = {"use": "filesystem", "path": folder, "timeout_s": 20, **table}
    return [f"l2.0.{name}={value}" for name, value in chosen.items()]


def values_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("??/*") if not path.name.endswith(".tmp")]


@pytest.mark.parametrize("kills", [2, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("hidden", [8, WIDE])
def test_a_server_killed_in_mid_write_finds_what_it_wrote(tmp_path: Path, seed: int, kills: int, hidden: int) -> None:
    chance = random.Random(f"{seed}/kills")
    folder, prompts = tmp_path / "kv", [prompt([number]) for number in range(128)]
    with ServerProcess("server.chunk_size=256", *settings(folder, timeout_s=20), capacity="192MiB") as server:
        for number in range(kills):
            with Engine(server.endpoint, hidden=hidden) as engine:
                before = count(engine.client, "stored")
                for each in prompts:
                    engine.store(each)
                await_count(engine.client, "stored", before + chance.randrange(1, 100))
                written = count(engine.client, "stored") - before
                left = tier(engine.client)["write_pending"]
            server.kill9()
            assert written > 0
            server.start()
            with Engine(server.endpoint, hidden=hidden) as engine:
                found = sum(engine.load(each) for each in prompts)
                # Counted with them: the record of the namespace.
                assert found >= written - 1, f"kill {number}: {written} written, {left} left, {found} found"
                assert count(engine.client, "corrupt") == count(engine.client, "errors") == 0
                wait_until(lambda: not list(folder.glob("??/.*.tmp")), what="the end of temporary files")
                engine.client.call("CLEAR", m.Clear(l2=True))
                await_rest(engine.client)


def test_a_full_disk_fails_no_store_and_is_seen_until_a_write_succeeds_again() -> None:
    reason = "No space left on device"
    with (
        small_disk("4m") as disk,
        ServerProcess(*settings(disk / "kv")) as server,
        ObserveProcess(server.endpoint) as observe,
        Engine(server.endpoint) as engine,
    ):
        seen = f"filesystem: {disk / 'kv'}: {reason}"
        told = lambda path: get(observe.url, path).text  # noqa: E731
        assert problems_of(engine) == []
        assert check(server) == 0
        others = disk / "others"
        with others.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        for number in range(1, 40):
            each = prompt(range(1000 * number, 1000 * number + 4))
            assert engine.store(each).stored == len(each)
            assert engine.load(each) == len(each)
        wait_until(lambda: problems_of(engine) == [{"where": "l2.0", "fact": seen}], 60, "the problem")
        assert tier(engine.client)["state"] == "closed", "a full disk can still be read"
        assert reason in tier(engine.client)["last_error"]
        done = run("status", "--endpoint", server.endpoint, "--check", COLUMNS="500")
        assert (done.returncode, seen in done.stdout + done.stderr) == (1, True)
        assert seen in run("status", "--endpoint", server.endpoint, COLUMNS="500").stdout
        wait_until(lambda: f"could not be stored in filesystem: {disk / 'kv'}: {reason}" in server.log, 60, "the log")
        assert ": 1 values" not in server.log
        wait_until(lambda: 'kvframework_problem{where="l2.0"} 1' in told("/metrics"), 60, "the metric")
        place = disk / "kv"
        words = f'kvframework_tier_problem{{tier="filesystem",problem="{place}: {reason}"}} 1'
        assert words in told("/metrics")
        assert seen in told("/readyz?verbose")
        assert seen in told("/status"), "what the page shows"

        await_written(engine.client)
        assert not list((disk / "kv").glob("??/.*.tmp"))
        others.unlink()
        fresh = prompt(range(50_000, 50_008))
        engine.store(fresh)
        wait_until(lambda: problems_of(engine) == [], 60, "the end of the problem")
        assert check(server) == 0
        wait_until(lambda: 'kvframework_problem{where="l2.0"} 0' in told("/metrics"), 60, "the metric")
        assert 'kvframework_tier_problem{tier="filesystem",problem=""} 0' in told("/metrics")
        await_written(engine.client)
        engine.clear()
        assert engine.load(fresh) == len(fresh)
        assert count(engine.client, "corrupt") == 0


def problems_of(engine: Engine) -> list[dict[str, str]]:
    found: list[dict[str, str]] = engine.client.status()["problems"]
    return found


def check(server: ServerProcess) -> int:
    return run("status", "--endpoint", server.endpoint, "--check").returncode


def test_a_disk_that_becomes_read_only_is_read_and_written_again_later() -> None:
    program = (remountable_server.__file__,)
    with (
        small_disk("16m") as disk,
        ServerProcess(*settings(disk / "kv"), program=program) as server,
        Engine(server.endpoint) as engine,
    ):
        kept, lost, fresh = (prompt(range(first, first + 8)) for first in (0, 100, 200))
        engine.store(kept)
        await_written(engine.client)
        os.kill(server.pid, signal.SIGUSR2)
        wait_until(lambda: not _is_open(server.pid, disk / "kv" / MARKER), what="the marker to be let go")
        remount(disk, "ro")
        try:
            assert engine.store(lost).stored == len(lost)
            await_state(engine.client, "down")
            assert "Read-only" in tier(engine.client)["last_error"]
            assert engine.load(lost) == len(lost), "L1 has it"
        finally:
            remount(disk, "rw")
        await_written(engine.client)
        engine.store(fresh)
        await_written(engine.client)
        assert tier(engine.client)["state"] == "closed"
        engine.clear()
        assert [engine.load(each) for each in (kept, lost, fresh)] == [8, 8, 8]


def test_a_folder_that_is_deleted_underneath_is_made_good(tmp_path: Path, seed: int) -> None:
    chance = random.Random(f"{seed}/folder")
    folder = tmp_path / "kv"
    prompts = {kind: prompt([1000 * number + chunk for chunk in range(6)]) for number, kind in enumerate(KINDS)}
    with ServerProcess(*settings(folder)) as server, Engine(server.endpoint) as engine:
        for each in prompts.values():
            engine.store(each)
        await_written(engine.client)
        engine.clear()
        # So that what is read next does not come to lie where it lay before.
        engine.store(prompt([10**6]))
        for kind, each in prompts.items():
            at = chance.randrange(1, 5)
            keys = [object_key(engine.namespace, digest) for digest in each.digests]
            damage_in_folder(folder, kind, keys[at], keys[5], chance)
            before = count(engine.client, "corrupt")
            wrong = 2 if kind == "swapped" else 1
            assert engine.load(each) == at, kind
            assert not os.path.lexists(folder / path_of(keys[at])), kind
            assert count(engine.client, "corrupt") - before == wrong, kind
            engine.store(each)
        await_written(engine.client)
        first, *_, last = (folder / path_of(object_key(engine.namespace, each)) for each in prompts[KINDS[0]].digests)
        for path in values_in(folder):
            # Something is found and something is missing whatever chance says.
            if path == last or (path != first and chance.random() < 0.5):
                path.unlink()
        engine.clear()
        assert 0 < sum(engine.load(each) for each in prompts.values()) < 6 * len(prompts)
        for each in prompts.values():
            engine.store(each)
        await_written(engine.client)
        engine.clear()
        assert [engine.load(each) for each in prompts.values()] == [6] * len(prompts)
        assert tier(engine.client)["state"] == "closed"
        await_rest(engine.client)


def _is_open(pid: int, path: Path) -> bool:
    links = Path(f"/proc/{pid}/fd").iterdir()
    return any(os.path.exists(link) and os.readlink(link) == str(path) for link in links)
