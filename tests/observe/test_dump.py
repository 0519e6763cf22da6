"""`kvframework dump`: a bug report with all that helps, and no secret in any form."""

from __future__ import annotations

import base64
import json
import os
import resource
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvf_observe.dump import OF_THE_SERVER, BundleFile
from kvframework.errors import ConfigFileError, KVFrameworkError
from kvframework.messaging.curve import read_secret, write_curve_pair
from kvframework.wire import messages as m
from tests.core.cli.command import run
from tests.support.ports import free_port
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import key_for

SALT = "tenant-acme-salt-7f3a9c"
MODEL = "acme/unreleased-7f3a9c-model"
TOKENS = [123454321, 987656789] * 128
PASSWORD, FILE_PASSWORD, USER = "hunter2-in-url", "hunter2-in-file", "redis-user-7f3a9c"
HOST = "127.0.0.1"


class Secrets:
    """A server with a secret in every place, and what of them a report must not hold."""

    def __init__(self, folder: Path) -> None:
        keys = folder / "keys"
        keys.mkdir(mode=0o700)
        write_curve_pair(keys / "server.secret", keys / "engine.public")
        (folder / "password").write_text(FILE_PASSWORD)
        (folder / "password").chmod(0o600)
        secret_key = read_secret(keys / "server.secret").decode()
        self.words = [SALT, MODEL, PASSWORD, FILE_PASSWORD, USER, *map(str, set(TOKENS)), secret_key]
        self.raw: list[bytes] = []
        self.settings = (
            f"server.tcp=tcp://{HOST}:{free_port()}",
            f"server.curve.secret_key={keys / 'server.secret'}",
            f"server.curve.clients={keys}",
            "l2.0.use=redis",
            f"l2.0.url=redis://{USER}:{PASSWORD}@{HOST}:{free_port()}/0",
            "l2.1.use=redis",
            f"l2.1.url=redis://{HOST}:{free_port()}/1",
            f"l2.1.password_file={folder / 'password'}",
        )

    def found_in(self, text: str) -> list[str]:
        raw = [*self.raw, *(word.encode() for word in self.words)]
        forms = [*self.words, *(form for each in raw for form in _forms(each))]
        return [form for form in forms if form in text]


def _forms(raw: bytes) -> Iterator[str]:
    yield raw.hex()
    yield raw.hex().upper()
    yield base64.b64encode(raw).decode().rstrip("=")
    yield base64.urlsafe_b64encode(raw).decode().rstrip("=")
    yield repr(raw)[2:-1]


def unpacked(bundle: Path) -> dict[str, str]:
    with tarfile.open(bundle) as archive:
        files = {name: archive.extractfile(name) for name in archive.getnames()}
        return {name.partition("/")[2]: file.read().decode() for name, file in files.items() if file is not None}


def dump(bundle: Path, endpoint: str, *settings: str, timeout: str = "60") -> tuple[str, dict[str, str]]:
    arguments = [part for setting in settings for part in ("--set", setting)]
    done = run("dump", "--endpoint", endpoint, "--out", str(bundle), "--timeout", timeout, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout, unpacked(bundle)


@pytest.fixture
def secrets(tmp_path: Path) -> Secrets:
    return Secrets(tmp_path)


def test_a_report_holds_what_helps_and_no_secret(secrets: Secrets, tmp_path: Path) -> None:
    with ServerProcess(*secrets.settings, "log.level=debug") as server, server.client() as client:
        registered = client.register(model_name=MODEL)
        key = key_for(registered, TOKENS, model_name=MODEL, cache_salt=SALT, request_id=SALT)
        client.store(key, b"x")
        assert client.lookup(key).hit_tokens == len(TOKENS)
        secrets.raw += [registered.namespace, client.hello.session, client.hello.boot_id]
        with pytest.raises(KVFrameworkError):
            client.call("LOOKUP", m.Lookup(key_for(registered, TOKENS, model_name="other", cache_salt=SALT)))
        wait_until(lambda: client.status()["l2"][0]["errors"], what="an error of the tier, which is logged")
        said, files = dump(tmp_path / "report.tar.gz", server.endpoint, *secrets.settings)
        pid = server.pid

    for name, text in files.items():
        assert secrets.found_in(text) == [], name
    status, config = json.loads(files["status.json"]), json.loads(files["config.json"])
    assert status["server"]["pid"] == pid
    assert "<model 1>" in files["status.json"]
    assert config["l1.capacity"] == 64 << 20
    assert config["l2.0.url"] == "redis://***"
    assert "serving at" in files["log.txt"]
    assert "serve_forever" in files["threads.txt"]
    assert json.loads(files["versions.json"])["distributions"]["kvframework"]
    assert json.loads(files["doctor.json"])["findings"]
    assert {each["kind"] for each in json.loads(files["plugins.json"])} > {"tier", "transport"}
    assert os.uname().nodename not in files["versions.json"]
    assert [name for name in OF_THE_SERVER.values() if name not in files or name in said] == []
    lookup = next(each for each in json.loads(files["requests.json"]) if each["request"] == "LOOKUP")
    assert (lookup["outcome"], lookup["request_id"], lookup["model"]) == ("hit", "request 1", "<model 1>")
    assert stat.S_IMODE((tmp_path / "report.tar.gz").stat().st_mode) == 0o600


def test_of_a_dead_server_it_holds_the_rest_and_says_what_is_missing(secrets: Secrets, tmp_path: Path) -> None:
    said, files = dump(tmp_path / "report.tar.gz", f"ipc://{tmp_path}/none.sock", *secrets.settings, timeout="0.2")
    for name, text in files.items():
        assert secrets.found_in(text) == [], name
    assert {"versions.json", "doctor.json", "plugins.json", "config.json", "missing.txt"} == files.keys()
    assert "redis://***" in files["config.json"]
    for name in OF_THE_SERVER.values():
        assert f"{name}: " in files["missing.txt"]
        assert name in said
    assert "no server answers" in said


def test_a_broken_configuration_is_no_reason_for_no_report(tmp_path: Path) -> None:
    (tmp_path / "kvf.toml").write_text('[l1]\nuse = "nothing"\npassword = "hunter2hunter2"\n')
    bundle = tmp_path / "report.tar.gz"
    where = ("--endpoint", f"ipc://{tmp_path}/s", "--timeout", "0.2")
    done = run("dump", "--config", str(tmp_path / "kvf.toml"), "--out", str(bundle), *where)
    assert done.returncode == 0, done.stderr
    files = unpacked(bundle)
    assert "config.json" not in files
    assert "plugin.not_found" in files["doctor.json"]
    assert "hunter2" not in "".join(files.values())


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    bundle = tmp_path / "report.tar.gz"
    bundle.write_text("mine")
    done = run("dump", "--endpoint", f"ipc://{tmp_path}/s", "--out", str(bundle))
    assert done.returncode == 2
    assert bundle.read_text() == "mine"


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    place = tmp_path / "report.tar.gz"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        with pytest.raises(ConfigFileError, match="cannot be written: File too large"), BundleFile(place) as bundle:
            bundle.write({"log.txt": "a line\n"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not place.exists()
