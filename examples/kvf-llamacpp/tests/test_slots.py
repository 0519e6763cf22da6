"""Slots of a real llama.cpp server, on the CPU: what one process has computed, the next one does not compute."""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import torch
from kvf_llamacpp.slot_file import SlotForm, built, parsed
from kvf_llamacpp.slots import Slots

from kvframework.errors import BadLayout

CHUNK = 256
PATIENCE_S = 60.0
PROGRAM = Path(__file__).with_name("llama_server.py")
MISSING = [name for name in ("xllamacpp", "gguf") if importlib.util.find_spec(name) is None]
engine = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; tox run -e engines has them")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # Not below pytest's own folder: the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="kvf-") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def endpoint(folder: Path) -> Iterator[str]:
    address = f"ipc://{folder}/s.sock"
    with serving(address):
        yield address


@contextmanager
def serving(address: str) -> Iterator[None]:
    """A server of kvframework that begins to start."""
    command = [str(Path(sys.executable).with_name("kvframework")), "serve"]
    for setting in (f"server.endpoint={address}", f"server.chunk_size={CHUNK}", "l1.capacity=64MiB"):
        command += ["--set", setting]
    with subprocess.Popen(command) as server:
        try:
            yield
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    from llama_server import write_model

    write_model(folder / "tiny.gguf")
    return folder / "tiny.gguf"


@contextmanager
def llama(model: Path, endpoint: str, *, slots: int = 1, values: str = "rows") -> Iterator[Slots]:
    """A server process of its own, and its last slot."""
    with ExitStack() as stack:
        saved = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(running(model, str(saved), slots=slots, values=values))
        connected = Slots(
            url, saved, model, slot=slots - 1, settings=values, endpoint=endpoint, connect_timeout_s=PATIENCE_S,
            deadline_scale=20.0,
        )  # fmt: skip
        stack.callback(connected.close)
        yield connected


@contextmanager
def running(model: Path, saved: str, *, slots: int = 1, values: str = "rows") -> Iterator[str]:
    """The address of a llama.cpp server."""
    command = [sys.executable, str(PROGRAM), str(model), saved, str(slots), values]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        try:
            yield process.stdout.readline().decode().strip()
        finally:
            process.kill()


def prompt(tokens: int, seed: int) -> list[int]:
    return torch.randint(3, 259, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def answered(slots: Slots, tokens: list[int]) -> tuple[list[int], int, dict[str, int]]:
    answer = slots.complete(tokens, n_predict=12, temperature=0)
    return answer["tokens"], answer["timings"]["cache_n"], answer["kvframework"]


@engine
@pytest.mark.parametrize(("slots", "values"), [(1, "rows"), (1, "transposed"), (2, "rows")])
def test_a_new_server_goes_on_from_what_another_one_has_computed(
    model: Path, endpoint: str, slots: int, values: str
) -> None:
    tokens = prompt(4 * CHUNK + 1, seed=slots + len(values))
    with llama(model, endpoint, slots=slots, values=values) as first:
        cold, cached, moved = answered(first, tokens)
        assert cached <= 1  # the token by which the form of a slot's file was learnt
        assert moved == {"restored": 0, "stored": 4 * CHUNK}
        # The slot holds more of it than its whole chunks.
        assert answered(first, tokens)[1:] == (4 * CHUNK, {"restored": 0, "stored": 4 * CHUNK})
    with llama(model, endpoint, slots=slots, values=values) as second:
        warm, cached, moved = answered(second, tokens)
        assert (cached, moved["restored"]) == (4 * CHUNK, 4 * CHUNK)
        assert warm == cold
        # A prefix alone, with another end.
        _, cached, _ = answered(second, [*tokens[: 2 * CHUNK], 5, 6, 7])
        assert cached == 2 * CHUNK


@engine
def test_other_kv_gives_other_tokens(model: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above compares does depend on the restored bytes."""
    tokens = prompt(2 * CHUNK + 1, seed=9)
    with llama(model, endpoint) as first:
        cold, _, _ = answered(first, tokens)
    with llama(model, endpoint) as second:

        def spoiled(form: SlotForm, tokens: list[int], layers: list[tuple[torch.Tensor, torch.Tensor]]) -> bytes:
            return built(form, tokens, [(-keys, -values) for keys, values in layers])

        monkeypatch.setattr("kvf_llamacpp.slots.built", spoiled)
        warm, cached, _ = answered(second, tokens)
        assert cached == 2 * CHUNK
        assert warm != cold


@engine
def test_without_kvframework_the_server_answers(model: Path, folder: Path) -> None:
    with llama_alone(model, folder) as alone:
        _, cached, moved = answered(alone, prompt(40, seed=3))
        assert cached <= 1
        assert moved == {"restored": 0, "stored": 0}


@engine
def test_the_first_prompt_is_stored_in_a_server_that_has_just_started(model: Path, folder: Path) -> None:
    address = f"ipc://{folder}/late.sock"
    with ExitStack() as stack:
        saved = stack.enter_context(tempfile.TemporaryDirectory())
        url = stack.enter_context(running(model, saved))
        stack.enter_context(serving(address))
        slots = Slots(url, Path(saved), model, endpoint=address, connect_timeout_s=PATIENCE_S, deadline_scale=20.0)
        stack.callback(slots.close)
        assert slots._client.wait_up(0.0)
        assert answered(slots, prompt(CHUNK + 1, seed=7))[2] == {"restored": 0, "stored": CHUNK}


@engine
def test_while_an_adapter_is_on_nothing_is_named(model: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the server lists it; the model has none."""
    tokens = prompt(2 * CHUNK + 1, seed=11)
    with llama(model, endpoint) as slots:
        called = slots._called

        def with_adapter(path: str, body: object = None) -> object:
            return [{"id": 0, "scale": 1.0}] if path == "/lora-adapters" else called(path, body)  # type: ignore[arg-type]

        answered(slots, tokens)
        monkeypatch.setattr(slots, "_called", with_adapter)
        assert answered(slots, [5, *tokens])[2] == {"restored": 0, "stored": 0}
        assert slots.restore(tokens) == 0
        monkeypatch.undo()
        # What it computed with the adapter is in the slot, and is not stored without.
        assert slots.store() == 0
        assert slots.restore(tokens) == 2 * CHUNK
        assert answered(slots, [5, *tokens])[1:] == (0, {"restored": 0, "stored": 2 * CHUNK})


@engine
def test_a_request_with_adapters_of_its_own_goes_past_the_cache(model: Path, endpoint: str) -> None:
    """The server lists those of all requests only; an adapter that it does not have is on for the request, too."""
    tokens = prompt(2 * CHUNK + 1, seed=12)
    with llama(model, endpoint) as slots:
        adapted = slots.complete(tokens, n_predict=1, lora=[{"id": 0, "scale": 1.0}])
        assert adapted["kvframework"] == {"restored": 0, "stored": 0}
        # Nor is it stored, or gone on from, by the next one.
        assert slots.store() == 0
        _, cached, moved = answered(slots, tokens)
        assert cached <= 1  # see above
        assert moved == {"restored": 0, "stored": 2 * CHUNK}


@engine
def test_a_part_of_another_prompt_is_computed_where_it_stands(model: Path, endpoint: str) -> None:
    """The server would move what its slot holds to other positions."""
    tokens = prompt(3 * CHUNK, seed=13)
    with llama(model, endpoint) as slots:
        answered(slots, tokens)
        assert answered(slots, tokens[CHUNK // 2 :])[1:] == (0, {"restored": 0, "stored": 2 * CHUNK})


def test_every_shard_names_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one may hold no weights at all."""
    monkeypatch.setattr(Slots, "_called", lambda *_given: [{"n_ctx": 64}])
    shards = [folder / f"model-0000{number}-of-00002.gguf" for number in (1, 2)]
    names = []
    for weights in ("first", "second"):
        for shard in shards:
            shard.write_text(weights if shard is shards[1] else "the head")
        with closing(Slots("http://x", folder, shards[0], endpoint=f"ipc://{folder}/nobody.sock")) as slots:
            names.append(slots._digest)
    assert names[0] != names[1]
    with pytest.raises(OSError, match="nowhere"):
        Slots("http://x", folder, folder / "nowhere.gguf", endpoint=f"ipc://{folder}/nobody.sock")


@contextmanager
def llama_alone(model: Path, folder: Path) -> Iterator[Slots]:
    with tempfile.TemporaryDirectory() as saved, running(model, saved) as url:
        slots = Slots(url, Path(saved), model, endpoint=f"ipc://{folder}/nobody.sock", connect_timeout_s=0.1)
        yield slots
        slots.close()


# the file, without a server


def form(*, v_trans: bool = False, streams: int = 1, stream: int = 0) -> SlotForm:
    return SlotForm(streams, stream, stream, v_trans, ((1, 1), (0, 30)), ((8, 8), (4, 6)))


def layers(cells: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (torch.randn(cells, 8).half(), torch.randn(cells, 8).half()),
        (torch.randn(cells, 4), torch.randn(cells, 6).bfloat16()),
    ]


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize(("streams", "stream"), [(1, 0), (3, 0), (3, 1), (3, 2)])
def test_what_was_built_is_parsed(v_trans: bool, streams: int, stream: int) -> None:
    made, held = form(v_trans=v_trans, streams=streams, stream=stream), layers(7)
    found = parsed(bytearray(built(made, [5, 6, 7, 8, 9], held)))
    assert (found.form, found.tokens) == (made, [5, 6, 7, 8, 9])
    for mine, theirs in zip(found.layers, held, strict=True):
        assert all(torch.equal(one, other[:5]) for one, other in zip(mine, theirs, strict=True))


CHANGES: dict[str, Callable[[bytearray], bytes]] = {
    "magic": lambda data: b"q" + data,
    "version": lambda data: data[:4] + struct.pack("<I", 5) + data[8:],
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "other positions": lambda data: data[:60] + struct.pack("<i", 3) + data[64:],
    "quantised": lambda data: data.replace(struct.pack("<iQ", 1, 16), struct.pack("<iQ", 8, 16)),
    "absurd rows": lambda data: data.replace(struct.pack("<iQ", 1, 16), struct.pack("<iQ", 1, 1 << 62)),
    "empty": lambda _data: b"",
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_other_form_is_refused(change: str) -> None:
    whole = bytearray(built(form(), [5, 6, 7, 8, 9], layers(5)))
    parsed(whole)
    with pytest.raises(BadLayout, match="slot's file"):
        parsed(bytearray(CHANGES[change](whole)))
