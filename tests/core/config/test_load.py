"""From TOML files to `Config`: defaults, fall-backs, and an error with its place for every mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvframework.config.load import load_config
from kvframework.config.schema import Config, ServerConfig
from kvframework.errors import ConfigError, ConfigFieldError, ConfigFileError, EndpointError

Load = Callable[..., Config]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads a text as kvf.toml; its directory is cut off from the places in errors."""

    def loader(text: str, *overrides: str) -> Config:
        path = tmp_path / "kvf.toml"
        path.write_text(text)
        try:
            return load_config(path, overrides, environ={})
        except ConfigError as error:
            error.where = error.where.replace(f"{tmp_path}/", "")
            raise

    return loader


def test_no_file_is_the_embedded_default() -> None:
    config = load_config(environ={})
    assert config.source == "embedded default"
    assert config.server == ServerConfig()
    assert (config.server.chunk_size, config.server.endpoint) == (0, "")
    assert (config.l1.memory.use, config.l1.memory.options) == ("pinned", {"capacity": "1GiB"})
    assert (config.l1.eviction.use, config.hasher.use) == ("two_queues", "sha256")
    assert [table.use for table in config.transport] == ["cpu_gather"]
    assert [table.use for table in config.layout] == ["paged", "opaque", "dynamic_cache"]
    assert (config.l2, config.requests) == ((), ())
    assert (config.l1.keys.high_watermark, config.l1.keys.low_watermark) == (1.0, 0.9)


def test_the_environment_names_a_file_and_an_argument_wins(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(f'[hasher]\nuse = "{name}"\n')
    environ = {"KVFRAMEWORK_CONFIG": str(tmp_path / "one")}
    assert load_config(environ=environ).hasher.use == "one"
    assert load_config(tmp_path / "two", environ=environ).hasher.use == "two"
    assert load_config(environ={"KVFRAMEWORK_CONFIG": ""}).source == "embedded default"


def test_an_empty_file_is_the_default_with_its_own_name(load: Load) -> None:
    config = load("")
    assert config.source.endswith("kvf.toml")
    assert config.l1.memory.options == {"capacity": "1GiB"}


def test_every_table_reaches_its_struct(load: Load) -> None:
    config = load("""
        [server]
        endpoint = "ipc:///run/me/kvf.sock"
        chunk_size = 512
        store_lease_s = 5
        [l1]
        use = "huge"
        pages = "1GiB"
        high_watermark = 0.8
        low_watermark = 0.5
        [l1.eviction]
        use = "lfu"
        decay = 2
        [[l2]]
        use = "redis"
        url = "redis://a"
        codec = "zstd"
        [[l2]]
        use = "redis"
        url = "redis://b"
        timeout_s = 0.5
        write_queue = 7
        write_policy = "write_back"
        promote = false
        low_watermark = 0.5
        [codecs]
        allow = ["zstd", "other"]
        [codecs.zstd]
        level = 3
        [hasher]
        use = "blake3"
        [[transport]]
        use = "cuda_ipc"
        [[requests]]
        use = "blend"
    """)
    assert (config.server.chunk_size, config.server.store_lease_s) == (512, 5.0)
    assert (config.l1.memory.use, config.l1.memory.options) == ("huge", {"pages": "1GiB"})
    assert (config.l1.keys.high_watermark, config.l1.keys.low_watermark) == (0.8, 0.5)
    assert (config.l1.eviction.use, config.l1.eviction.options) == ("lfu", {"decay": 2})
    first, second = config.l2
    assert (first.keys.codec, first.keys.timeout_s, first.tier.options) == ("zstd", 2.0, {"url": "redis://a"})
    assert (second.keys.codec, second.keys.timeout_s, second.keys.write_queue) == ("none", 0.5, 7)
    assert (first.keys.write_policy, first.keys.promote) == ("write_through", True)
    assert (second.keys.write_policy, second.keys.promote, second.keys.low_watermark) == ("write_back", False, 0.5)
    assert config.codecs.allow == ("zstd", "other")
    assert [(table.use, table.options) for table in config.codecs.options] == [("zstd", {"level": 3})]
    assert second.tier.where.endswith("kvf.toml: [[l2]] #2")
    assert [table.use for table in config.transport] == ["cuda_ipc"]
    assert [table.use for table in config.layout] == ["paged", "opaque", "dynamic_cache"]
    assert [table.use for table in config.requests] == ["blend"]


def test_a_table_that_is_there_keeps_its_own_keys(load: Load) -> None:
    assert load('[l1]\nuse = "huge"').l1.memory.options == {}
    config = load('[l1]\ncapacity = "2GiB"')
    assert (config.l1.memory.use, config.l1.memory.options) == ("pinned", {"capacity": "2GiB"})
    assert config.l1.eviction.use == "two_queues"
    assert load("[l1.eviction]\ndecay = 1").l1.eviction.use == "two_queues"
    assert load("transport = []").transport == ()


FIELD_ERRORS = {
    "unknown table": ('[sever]\nendpoint = "x"', "kvf.toml", "unknown key 'sever'", "did you mean 'server'?"),
    "unknown key": ("[server]\nchunksize = 1", "kvf.toml: [server]", "unknown key", "did you mean 'chunk_size'?"),
    "wrong type": (
        '[server]\nchunk_size = "256"',
        "kvf.toml: [server] chunk_size",
        "expected an integer, found a string",
        "the number without quotes",
    ),
    "a word for a switch": (
        '[server]\nprice = "yes"',
        "kvf.toml: [server] price",
        "expected true or false",
        "true or false, without quotes",
    ),
    "no coercion": ("[server]\nchunk_size = 256.5", "kvf.toml: [server] chunk_size", "expected an integer", ""),
    "below zero": ("[server]\nchunk_size = -1", "kvf.toml: [server] chunk_size", ">= 0", ""),
    "too large": ("[server]\nchunk_size = 65537", "kvf.toml: [server] chunk_size", "<= 65536", ""),
    "beyond 64 bits": (f"[server]\nchunk_size = 1{'0' * 30}", "kvf.toml: [server] chunk_size", "", ""),
    "negative lease": ("[server]\nstore_lease_s = -1", "kvf.toml: [server] store_lease_s", "> 0", ""),
    "no number": ("[server]\nticket_s = nan", "kvf.toml: [server] ticket_s", "> 0", ""),
    "endless": ("[server]\nticket_s = inf", "kvf.toml: [server] ticket_s", "<= 31536000", ""),
    "no workers": ("[server]\nworkers = 0", "kvf.toml: [server] workers", ">= 1", ""),
    "watermark of 0": ("[l1]\nlow_watermark = 0", "kvf.toml: [l1] low_watermark", "> 0", ""),
    "watermark above 1": ("[l1]\nhigh_watermark = 1.1", "kvf.toml: [l1] high_watermark", "<= 1", ""),
    "crossed watermarks": ("[l1]\nhigh_watermark = 0.5", "kvf.toml: [l1]", "low_watermark 0.9 is above", ""),
    "no use": ('[[l2]]\nurl = "x"', "kvf.toml: [[l2]] #1", "`use` is missing", "plugins list"),
    "use of another type": ("[hasher]\nuse = 5", "kvf.toml: [hasher]", "must name a plugin", "plugins list"),
    "empty use": ('[hasher]\nuse = ""', "kvf.toml: [hasher]", "must name a plugin", "plugins list"),
    "no array": ('[l2]\nuse = "redis"', "kvf.toml: l2", "expected an array of tables, found a table", "write [[l2]]"),
    "array of values": ("transport = [1]", "kvf.toml: [[transport]] #1", "expected a table, found 1", ""),
    "no table": ('l1 = "pinned"', "kvf.toml: [l1]", "expected a table, found a string", ""),
    "eviction no table": ('[l1]\neviction = "lru"', "kvf.toml: [l1.eviction]", "expected a table", ""),
    "timeout": ('[[l2]]\nuse = "redis"\ntimeout_s = 0', "kvf.toml: [[l2]] #1 timeout_s", "> 0", ""),
    "calls at once": ('[[l2]]\nuse = "x"\nloads = 0', "kvf.toml: [[l2]] #1 loads", "expected an integer >= 1", ""),
    "what TOML cannot say": ('[[l2]]\nuse = "x"\nloads = "2"', "kvf.toml: [[l2]] #1 loads", "an integer, found", ""),
    "policy": ('[[l2]]\nuse = "redis"\nwrite_policy = "now"', "kvf.toml: [[l2]] #1 write_policy", "'now'", ""),
    "tier's watermarks": (
        '[[l2]]\nuse = "x"\nhigh_watermark = 0.5',
        "kvf.toml: [[l2]] #1",
        "low_watermark 0.85 is",
        "",
    ),
    "no room to evict": (
        '[[l2]]\nuse = "x"\nwrite_policy = "write_back"',
        "kvf.toml: [[l2]] #1",
        "before it is full",
        "high_watermark",
    ),
    "codecs": ('[codecs]\nallow = "zstd"', "kvf.toml: [codecs] allow", "expected a list", ""),
    "codec's name": ('[codecs]\nallow = ["%s"]' % ("z" * 17), "kvf.toml: [codecs] allow[0]", "length <= 16", ""),
    "codec's table": ("[codecs]\nzstd = 3", "kvf.toml: [codecs.zstd]", "expected a table, found 3", ""),
    "codec": ('[[l2]]\nuse = "redis"\ncodec = 1', "kvf.toml: [[l2]] #1 codec", "expected a string", ""),
}


@pytest.mark.parametrize("name", ["transport", "layout", "requests"])
def test_what_is_known_by_its_name_is_named_once(load: Load, name: str) -> None:
    with pytest.raises(ConfigFieldError, match=r"'a' is configured twice, first in .*\]\] #1"):
        load(f'[[{name}]]\nuse = "a"\n[[{name}]]\nuse = "b"\n[[{name}]]\nuse = "a"')


@pytest.mark.parametrize("case", FIELD_ERRORS)
def test_a_wrong_field_is_told_with_its_place(load: Load, case: str) -> None:
    text, where, fact, hint = FIELD_ERRORS[case]
    with pytest.raises(ConfigFieldError) as caught:
        load(text)
    assert caught.value.where == where
    assert fact in caught.value.fact
    assert hint in caught.value.hint


def test_an_endpoint_is_checked_with_the_rest(load: Load) -> None:
    with pytest.raises(EndpointError, match=r"kvf\.toml: \[server\] endpoint: a tcp:// endpoint needs"):
        load('[server]\nendpoint = "tcp://0.0.0.0:5555"')


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match="No such file") as caught:
        load_config(tmp_path / "none.toml", environ={})
    assert caught.value.where == str(tmp_path / "none.toml")
    with pytest.raises(ConfigFileError, match="directory"):
        load_config(tmp_path, environ={})


def test_toml_errors_name_file_and_line(load: Load, tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match="line 2") as caught:
        load("[server]\nchunk_size = \n")
    assert caught.value.where == "kvf.toml"
    (tmp_path / "latin.toml").write_bytes(b'# caf\xe9\nuse = "x"')
    with pytest.raises(ConfigFileError, match="UTF-8"):
        load_config(tmp_path / "latin.toml", environ={})
    with pytest.raises(ConfigFieldError, match="nested more than"):
        load("x = " + "[" * 100_000)
    with pytest.raises(ConfigFileError, match="not valid TOML"):
        load("x = " + "1" * 100_000)
