"""The Redis tier's configuration: what is refused, and that no password comes out anywhere."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
from rich.pretty import pretty_repr

from kvf_redis.options import RedisOptions
from kvf_redis.tier import RedisTier, open_tier
from kvframework.api import Outcome, masked_url
from kvframework.errors import ConfigFieldError, KVFrameworkError, TierError
from tests.redis_server import RedisServer
from tests.resp_peer import RespPeer

SECRET = "hunter2 /?#@:é"
WRONG = "wr0ng-guess"


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def all_text(error: BaseException) -> str:
    """Everything that a log could show of `error`."""
    shown = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    chain: list[BaseException] = [error]
    while (nearest := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(nearest)
    return shown + "".join(f"{each!s} {each!r} {each.args!r}" for each in chain)


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
        tier = open_tier(options, where="[[l2]] 1")
        assert tier.contains([b"key"], deadline=soon()) == [Outcome.MISSING]
        tier.close()


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
        tier = open_tier(options, where="[[l2]] 1")
        with pytest.raises(TierError, match="refuses the user name or password") as caught:
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
            tier = open_tier(RedisOptions(url=peer.url.replace("//", f"//:{WRONG}@")), where="[[l2]] 1")
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
        open_tier(options, where="[[l2]] 1")
    assert WRONG not in all_text(caught.value)
    assert WRONG not in repr(options)
    assert caught.value.where == "[[l2]] 1.url"


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


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVF_TEST_PASSWORD", raising=False)
    with pytest.raises(ConfigFieldError, match="KVF_TEST_PASSWORD is not set") as caught:
        open_tier(RedisOptions(url="redis://host", password_env="KVF_TEST_PASSWORD"), where="[[l2]] 1")
    assert caught.value.where == "[[l2]] 1.password_env"


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"url": ""},
        {"url": "redis://host", "ttl_s": -1},
        {"url": "redis://host", "connections": 0},
        {"url": "redis://host", "password": WRONG},
    ],
)
def test_a_bad_table_is_refused(table: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(table, RedisOptions)
    assert WRONG not in str(caught.value)


def test_pool_parameters_of_a_shared_url_do_no_harm() -> None:
    tier = open_tier(RedisOptions(url="redis://h/1?max_connections=9&socket_timeout=3&protocol=3"), where="[[l2]] 1")
    assert isinstance(tier, RedisTier)
    tier.close()


def test_nobody_there_is_a_tier_error_that_says_where(tmp_path: Path) -> None:
    for url in ("redis://127.0.0.1:1/0", f"unix://{tmp_path}/none.sock"):
        tier = open_tier(RedisOptions(url=url), where="[[l2]] 1")
        with pytest.raises(KVFrameworkError, match=r"Connection refused|No such file") as caught:
            tier.contains([b"key"], deadline=soon())
        assert caught.value.where.startswith("[[l2]] 1: redis at ")
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
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == 'redis is not installed: pip install "kvframework[redis]"', done.stderr
