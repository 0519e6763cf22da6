"""A user's TOML and `--set`: a configuration, or an error that names its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.config.load import load_config
from kvframework.errors import ConfigError
from tests.core.fuzz.bounds import check_words
from tests.core.fuzz.effort import fuzzed

TABLES = [
    "[server]",
    "[server.curve]",
    "[log]",
    "[l1]",
    "[l1.eviction]",
    "[[transport]]",
    "[[layout]]",
    "[[l2]]",
    "[codecs]",
    "[codecs.zstd]",
    "[hasher]",
    "[[requests]]",
    "[l2]",
    "[[server]]",
    "[unknown]",
    "[l1.eviction.deeper]",
    "[server",
]
KEYS = [
    "endpoint",
    "tcp",
    "insecure",
    "chunk_size",
    "workers",
    "store_lease_s",
    "session_timeout_s",
    "level",
    "format",
    "use",
    "capacity",
    "high_watermark",
    "low_watermark",
    "codec",
    "timeout_s",
    "write_queue",
    "write_policy",
    "promote",
    "allow",
    "secret_key",
    "clients",
    "url",
    '""',
    '"a.b"',
    "l1.capacity",
    "ü",
]
VALUES = [
    "0",
    "1",
    "-1",
    "256",
    "1e309",
    "nan",
    "-nan",
    "inf",
    "9" * 5000,
    "0x" + "f" * 40,
    "true",
    '""',
    '"tcp://*:1"',
    '"ipc:///tmp/x"',
    '"ipc://' + "x" * 200 + '"',
    '"tcp://[::1"',
    '"tcp://host:99999"',
    '"pinned"',
    '"64MiB"',
    '"9e9GiB"',
    '"' + "9" * 400 + 'TiB"',
    '"\\u0000"',
    '"\\ud800"',
    '"write_through"',
    '"write_back"',
    "[]",
    "[[]]",
    "{}",
    "{use = 1}",
    "1979-05-27T07:32:00Z",
    "07:32:00",
    "[" * 2000 + "]" * 2000,
    '"zstd"',
    '["zstd"]',
    '["' + "z" * 99 + '"]',
    "'''\n'''",
    "0.9",
]
lines = st.sampled_from(TABLES) | st.builds("{} = {}".format, st.sampled_from(KEYS), st.sampled_from(VALUES))
texts = st.lists(lines, max_size=8).map("\n".join)
overrides = st.builds(
    "{}.{}={}".format,
    st.sampled_from(["server", "l1", "l2.0", "l2.7", "transport.0", "", "codecs"]),
    st.sampled_from(KEYS),
    st.sampled_from(VALUES) | st.text(max_size=20),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvf.toml"


def load(file: Path, text: bytes, settings: list[str]) -> None:
    file.write_bytes(text)
    try:
        config = load_config(file, settings, {})
    except ConfigError as error:
        check_words(error, 20_000)
        return
    server = config.server
    for seconds in (
        server.store_lease_s,
        server.ticket_s,
        server.session_timeout_s,
        *(t.keys.timeout_s for t in config.l2),
    ):
        assert 0 < seconds < 1e9
    for marks in (config.l1.keys, *(tier.keys for tier in config.l2)):
        assert 0 < marks.low_watermark <= marks.high_watermark <= 1


@fuzzed
@given(texts, st.lists(overrides, max_size=2))
def test_lines_that_look_like_a_configuration(file: Path, text: str, settings: list[str]) -> None:
    load(file, text.encode(), settings)


@fuzzed
@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes(file: Path, text: bytes) -> None:
    load(file, text, [])


@fuzzed
@given(st.text(max_size=30), st.sampled_from(KEYS), st.sampled_from(VALUES))
def test_any_override(file: Path, text: str, key: str, value: str) -> None:
    load(file, b"", [text])
    load(file, b"", [f"server.{key}={value}"])
    load(file, b"", [f"l1.{key}={value}"])


@pytest.mark.parametrize("value", ["9" * 5000, "nan", "-nan", "inf"])
@pytest.mark.parametrize("key", ["server.ticket_s", "l1.high_watermark", "server.chunk_size"])
def test_a_number_that_is_none(file: Path, key: str, value: str) -> None:
    table, _, name = key.partition(".")
    file.write_text(f"[{table}]\n{name} = {value}\n")
    with pytest.raises(ConfigError):
        load_config(file, (), {})
