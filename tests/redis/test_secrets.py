"""The Redis tier's configuration: what is refused, and that no password comes out anywhere."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from rich.pretty import pretty_repr

from kvf_redis import RedisOptions
from kvf_redis.tier import RedisTier, open_tier
from kvframework.api.installing import install_command
from kvframework.api.plugin import ByteSize
from kvframework.api.tier import Outcome
from kvframework.errors import ConfigFieldError, KVFrameworkError, TierError
from kvframework.masking import masked_url
from tests.support.processes import ran
from tests.support.redis_server import RedisServer
from tests.support.redis_tier import soon
from tests.support.resp_peer import RespPeer
from tests.support.shown_errors import all_text

SECRET = "hunter2 /?#@:é"
WRONG = "wr0ng-guess"


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path, password=SECRET) as server:
        yield server


@pytest.mark.redis
def test_both_ways_to_give_the_password_work(locked: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVF_TEST_PASSWORD", SECRET)
    in_url = locked.url.replace("//", f"//:{quote(SECRET, safe='')}@")
    for options in (
        RedisOptions(url=in_url),
        RedisOptions(url=locked.url, password_env="KVF_TEST_PASSWORD"),
        RedisOptions(url=locked.url, username="default", password_env="KVF_TEST_PASSWORD"),
    ):
        tier = open_tier(options, where="[[l2]] #1")
        assert tier.contains([b"key"], deadline=soon()) == [Outcome.MISSING]
        tier.close()


@pytest.mark.redis
def test_a_password_file_is_read_for_each_connection(locked: RedisServer, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("the first\n")
    with locked.client() as client:
        client.acl_setuser("rotated", enabled=True, passwords=["+the first"], keys=["*"], commands=["+@all"])
        options = RedisOptions(url=locked.url, username="rotated", password_file=str(file))
        tier = open_tier(options, where="[[l2]] #1")
        assert tier.contains([b"key"], deadline=soon()) == [Outcome.MISSING]
        client.acl_setuser("rotated", enabled=True, reset_passwords=True, passwords=[f"+{SECRET}"])
        client.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(TierError, match="refuses the user name or password"):
            tier.contains([b"key"], deadline=soon())
        file.write_bytes(SECRET.encode() + b"\r\n")
        assert tier.contains([b"key"], deadline=soon()) == [Outcome.MISSING]
        client.client_kill_filter(_type="normal", skipme=True)
        file.write_text("\n")
        with pytest.raises(TierError, match="the file contains no password") as caught:
            tier.contains([b"key"], deadline=soon())
        assert caught.value.where == "[[l2]] #1.password_file"
        file.unlink()
        with pytest.raises(TierError, match="cannot be read: No such file"):
            tier.contains([b"key"], deadline=soon())
        tier.close()
        assert SECRET not in all_text(caught.value) + repr(tier) + repr(options)


@pytest.mark.parametrize("harm", ["missing", "empty", "only a newline", "directory", "permission"])
def test_a_password_file_of_no_use_is_told_at_the_start(tmp_path: Path, harm: str) -> None:
    file = tmp_path / "password"
    if harm == "directory":
        file.mkdir()
    elif harm != "missing":
        file.write_text({"empty": "", "only a newline": "\n"}.get(harm, WRONG))
    if harm == "permission":
        if os.geteuid() == 0:
            pytest.skip("root may read everything")
        file.chmod(0)
    with pytest.raises(ConfigFieldError, match=r"cannot be read: |contains no password") as caught:
        open_tier(RedisOptions(url="redis://host", password_file=str(file)), where="[[l2]] #1")
    assert caught.value.where == "[[l2]] #1.password_file"
    assert caught.value.hint
    assert caught.value.__context__ is None


@pytest.mark.redis
def test_a_refused_login_says_so_and_shows_no_password(
    locked: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("KVF_TEST_PASSWORD", WRONG)
    for options in (
        RedisOptions(url=locked.url),
        RedisOptions(url=locked.url, password_env="KVF_TEST_PASSWORD"),
        RedisOptions(url=locked.url.replace("//", f"//somebody:{WRONG}@")),
    ):
        tier = open_tier(options, where="[[l2]] #1")
        with pytest.raises(TierError, match=r"refuses the user name or password|NOAUTH") as caught:
            tier.ping(deadline=soon())
        shown = all_text(caught.value) + repr(tier) + repr(options) + pretty_repr(options) + caplog.text
        assert WRONG not in shown
        assert str(locked.port) in shown
        assert caught.value.hint
        tier.close()


def test_a_server_that_repeats_the_password_does_not_get_it_shown() -> None:
    echo = f"-ERR unknown command `AUTH`, with args beginning with: `{WRONG}`\r\n".encode()
    for login in (echo, f"+{WRONG}\r\n".encode(), f"HTTP {WRONG}\r\n".encode(), f":{WRONG}\r\n".encode()):
        with RespPeer(login=login) as peer:
            tier = open_tier(RedisOptions(url=peer.url.replace("//", f"//:{WRONG}@")), where="[[l2]] #1")
            with pytest.raises(TierError) as caught:
                tier.ping(deadline=soon(1.0))
            assert WRONG not in all_text(caught.value)
            tier.close()


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{WRONG}/more@host:6379/0",
        f"redis://:12#{WRONG}@host:6379/0",
        f"redis://:12?{WRONG}@host:6379/0",
        f"redis://:{WRONG}@host:port/0",
        f"redis://:{WRONG}@[::1/0",
        f"redis://:{WRONG}@host:6379/0?db=x{WRONG}",
        f"redis://:{WRONG}@host:6379/0?no_such_parameter={WRONG}",
        f"http://:{WRONG}@host:6379/0",
        f"unix://:{WRONG}@/path?db=x#@",
        f":{WRONG}@host",
    ],
)
def test_a_bad_url_is_refused_without_being_shown(url: str) -> None:
    options = RedisOptions(url=url)
    with pytest.raises(ConfigFieldError) as caught:
        open_tier(options, where="[[l2]] #1")
    assert WRONG not in all_text(caught.value)
    assert WRONG not in repr(options)
    assert caught.value.where == "[[l2]] #1.url"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        (f"redis://me:{WRONG}@host/0?x=1", "redis://***@host/0"),
        (f"unix://:{WRONG}@/run/redis.sock?db=2", "unix://***@/run/redis.sock"),
        (f"redis://host?password={WRONG}@{WRONG}", "***"),
        (f"me:{WRONG}@host", "***"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert masked_url(url) == shown
    assert shown in repr(RedisOptions(url=url))


@pytest.mark.parametrize("field", ["password_env", "sentinel_password_env"])
def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    monkeypatch.delenv("KVF_TEST_PASSWORD", raising=False)
    options = RedisOptions(url="redis://host", topology="sentinel", master_name="m", **{field: "KVF_TEST_PASSWORD"})
    with pytest.raises(ConfigFieldError, match="KVF_TEST_PASSWORD is not set") as caught:
        open_tier(options, where="[[l2]] #1")
    assert caught.value.where == f"[[l2]] #1.{field}"


@pytest.mark.parametrize(
    ("field", "said", "options"),
    [
        ("nodes", "nodes is set, but topology is a single server", {"nodes": ["host:1"]}),
        ("master_name", "needs the name", {"topology": "sentinel"}),
        ("master_name", "topology cluster does not use sentinels", {"topology": "cluster", "master_name": "m"}),
        ("sentinel_password_env", "topology single does not use sentinels", {"sentinel_password_env": "NAME"}),
        ("password_file", "password_env and password_file are", {"password_env": "NAME", "password_file": "/file"}),
        ("tls_key", "tls_cert and tls_key need each other", {"url": "rediss://host", "tls_cert": __file__}),
        ("tls_cert", "tls_cert and tls_key need each other", {"url": "rediss://host", "tls_key": __file__}),
        ("tls_ca", "the TLS options need a url with TLS", {"tls_ca": __file__}),
        ("tls_ca", "/nonexistent cannot be read: No such file", {"url": "rediss://host", "tls_ca": "/nonexistent"}),
        ("tls_ca", "url already sets ssl_ca_certs", {"url": "rediss://host?ssl_ca_certs=/file", "tls_ca": __file__}),
        ("url", "only database 0", {"topology": "cluster", "url": "redis://host/3"}),
        ("url", "not a Unix socket", {"topology": "cluster", "url": "unix:///run/redis.sock"}),
        ("url", "not a Unix socket", {"topology": "sentinel", "master_name": "m", "url": "unix:///run/redis.sock"}),
        ("nodes", "node 2 is not an address", {"topology": "cluster", "nodes": ["host:1", f"me:{WRONG}@host:1"]}),
        ("nodes", "node 1 is not an address", {"topology": "cluster", "nodes": [f"redis://:{WRONG}@host:1"]}),
    ],
)
def test_options_that_contradict_each_other_are_refused(field: str, said: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigFieldError, match=said) as caught:
        open_tier(RedisOptions(**{"url": "redis://host", **options}), where="[[l2]] #1")
    assert caught.value.where == f"[[l2]] #1.{field}"
    assert caught.value.hint or "cannot be read" in said
    assert WRONG not in all_text(caught.value)


def test_options_that_go_together_are_accepted() -> None:
    for options in (
        {"url": "rediss://host:7000", "topology": "cluster", "nodes": ["host:7001", "[::1]:7002"], "tls_ca": __file__},
        {"url": "redis://host/3", "topology": "sentinel", "master_name": "m", "nodes": ["other:26379"]},
        {"url": "rediss://host?ssl_cert_reqs=none", "tls_cert": __file__, "tls_key": __file__},
    ):
        open_tier(RedisOptions(**options), where="[[l2]] #1").close()


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"url": ""},
        {"url": "redis://host", "ttl_s": -1},
        {"url": "redis://host", "connections": 0},
        {"url": "redis://host", "topology": "ring"},
        {"url": "redis://host", "max_value_bytes": 1000},
        {"url": "redis://host", "max_value_bytes": 1 << 30},
        {"url": "redis://host", "nodes": "host:1"},
        {"url": "redis://host", "password": WRONG},
    ],
)
def test_a_bad_table_is_refused(table: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(table, RedisOptions, dec_hook=lambda _, value: ByteSize.parse(value))
    assert WRONG not in str(caught.value)


def test_pool_parameters_of_a_shared_url_do_no_harm() -> None:
    tier = open_tier(RedisOptions(url="redis://h/1?max_connections=9&socket_timeout=3&protocol=3"), where="[[l2]] #1")
    assert isinstance(tier, RedisTier)
    tier.close()


def test_nobody_there_is_a_tier_error_that_says_where(tmp_path: Path) -> None:
    for url in ("redis://127.0.0.1:1/0", f"unix://{tmp_path}/none.sock"):
        tier = open_tier(RedisOptions(url=url), where="[[l2]] #1")
        with pytest.raises(KVFrameworkError, match=r"Connection refused|No such file") as caught:
            tier.contains([b"key"], deadline=soon())
        assert caught.value.where.startswith("[[l2]] #1: redis at ")
        tier.close()


def test_listing_the_plugin_imports_no_redis_and_a_missing_one_is_told() -> None:
    program = (
        "import sys, importlib.abc\n"
        "import kvf_redis\n"
        "assert 'redis' not in sys.modules\n"
        "(provider,) = kvf_redis.kvf_tiers()\n"
        "assert provider.probe() is None\n"
        "assert 'redis' not in sys.modules\n"
        "sys.modules['redis'] = None\n"
        "import importlib.util\n"
        "print(provider.probe())\n"
    )
    done = ran(sys.executable, "-W", "error", "-c", program, code=None)
    assert done.stdout.strip() == f"redis is not installed: {install_command(distribution='kvframework-redis')}", (
        done.stderr
    )
