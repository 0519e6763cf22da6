"""What stands in examples/vllm runs."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from kvframework.config.load import load_config
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import complete_config
from tests.support.ports import free_port
from tests.support.processes import ran
from tests.support.redis_server import RedisServer
from tests.vllm.model import cached
from tests.vllm.rows import server_for

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "vllm"


def python(*arguments: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    run = ran(sys.executable, *arguments, env=environment)
    return run.stdout


@pytest.fixture
def model() -> str:
    return str(cached("tiny"))


def test_the_servers_configuration_is_accepted() -> None:
    complete_config(load_config(EXAMPLES / "redis.toml"), PluginRegistry())


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_scripts_compile_and_are_listed(script: Path) -> None:
    compile(script.read_text(), script.name, "exec")
    assert f"`{script.name}`" in (EXAMPLES / "README.md").read_text()


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_offline_twice(model: str) -> None:
    engine = json.dumps({"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 28})
    with server_for() as server:
        script = [str(EXAMPLES / "offline.py"), model, "--endpoint", server.endpoint, "--engine", engine]
        printed = [python(*script) for _ in range(2)]
    cached = [int(re.findall(r"(\d+) of 2048 tokens were cached", text)[0]) for text in printed]
    tokens = [re.findall(r"tokens: \[.*\]", text) for text in printed]
    assert cached == [0, 2048]
    assert tokens[0] == tokens[1] != []


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_two_engines_with_redis(model: str, tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        config = tmp_path / "kvf.toml"
        text = (EXAMPLES / "redis.toml").read_text().replace("redis://127.0.0.1:6379/0", redis.url)
        config.write_text(text.replace("8GiB", "256MiB"))
        printed = python(
            str(EXAMPLES / "two_engines.py"),
            model,
            "--config",
            str(config),
            "--ports",
            str(free_port()),
            str(free_port()),
            f"--engine=--dtype float32 --max-model-len 4096 --enforce-eager --kv-cache-memory-bytes {1 << 28}",
        )
        with redis.client() as client:
            assert client.dbsize()
    assert re.findall(r"engine (\w): (\d+) of 2048", printed) == [("A", "0"), ("B", "2048")]
