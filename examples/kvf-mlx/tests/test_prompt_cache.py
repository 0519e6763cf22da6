"""mlx-lm itself, on the CPU: what one process has computed, the next one does not compute."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHUNK = 64
PROGRAM = Path(__file__).with_name("mlx_program.py")
MISSING = [name for name in ("mlx", "mlx_lm") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; tox run -e engines has them"
)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    # Not below pytest's own folder: the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        address = f"ipc://{folder}/s.sock"
        command = [str(Path(sys.executable).with_name("kvframework")), "serve"]
        for setting in (f"server.endpoint={address}", f"server.chunk_size={CHUNK}", "l1.capacity=64MiB"):
            command += ["--set", setting]
        with subprocess.Popen(command) as server:
            yield address
            server.terminate()


@pytest.fixture(scope="module")
def processes(endpoint: str) -> list[Any]:
    """The answers of two engine processes, one after the other."""
    answers = []
    for _ in range(2):
        command = [sys.executable, str(PROGRAM), endpoint, str(CHUNK)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    return answers


@pytest.mark.parametrize("family", ["llama", "llama-bf16", "lfm2"])
def test_a_new_process_goes_on_from_what_another_one_has_computed(processes: list[Any], family: str) -> None:
    first, second = (answers[family] for answers in processes)
    assert first["cached"] == first["plain"] == second["plain"] == second["cached"]
    assert (first["restored"], second["restored"]) == (0, 3 * CHUNK)
    assert second["spoiled"] != second["plain"]


def test_a_prefix_is_restored_for_another_prompt(processes: list[Any]) -> None:
    """Of attention alone: a state is there only where it was stored."""
    assert [processes[1][family]["part"] for family in ("llama", "llama-bf16", "lfm2")] == [2 * CHUNK, 2 * CHUNK, 0]


def test_without_a_server_it_is_mlx_lms_own_cache(tmp_path: Path) -> None:
    import mlx.core as mx
    from kvf_mlx import SharedPromptCache
    from mlx_program import made

    from kvframework.client import KvIdentity

    shared = SharedPromptCache(
        made("llama"), KvIdentity("m", "r"), endpoint=f"ipc://{tmp_path}/n", connect_timeout_s=0.1
    )
    caches, rest = shared.prefill("key", list(range(2, 96)) * 3)
    assert (len(rest), mx.array(rest).shape) == (282 - 256, (26,))
    assert shared.fetch_nearest_cache("key", [*list(range(2, 96)) * 3][:256])[1] == []
    assert caches is not None
    shared.close()


def test_caches_of_other_kinds_are_refused() -> None:
    from kvf_mlx.arrays import learnt
    from mlx_lm.models import llama
    from mlx_program import SIZES

    from kvframework.errors import BadLayout

    arguments = llama.ModelArgs(
        model_type="llama",
        num_hidden_layers=2,
        intermediate_size=96,
        rms_norm_eps=1e-5,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=16,
        **SIZES,
    )
    with pytest.raises(BadLayout, match="RotatingKVCache"):
        learnt(llama.Model(arguments))


def test_a_model_is_named_by_the_content_of_its_files(tmp_path: Path) -> None:
    from kvf_mlx import by_content

    from kvframework.errors import RequestError

    with pytest.raises(RequestError, match="no weights"):
        by_content(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1")
    first = by_content(tmp_path)
    assert by_content(tmp_path) == first
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapters.safetensors").write_bytes(b"2")
    adapted = by_content(tmp_path, adapter)
    (adapter / "adapters.safetensors").write_bytes(b"3")
    assert len({first, adapted, by_content(tmp_path, adapter)}) == 3
    # As `mlx_lm.load` is called.
    assert by_content(str(tmp_path)) == first
    (tmp_path / "custom_model.py").write_text("class Model: ...")
    assert by_content(tmp_path) != first
