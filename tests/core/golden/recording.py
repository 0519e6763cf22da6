"""What is recorded of a release, as readable documents by file name, made by the code of today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kvframework
from kvframework import errors
from kvframework.api.requests import Message, RequestSpec
from kvframework.errors import KVFrameworkError
from kvframework.messaging.polling import WITH_ARENA, WITHOUT_ARENA
from kvframework.messaging.server.sessions import TOKEN_BYTES
from kvframework.wire import messages as m
from kvframework.wire.frames import ERROR_TYPE, ErrorPayload, join
from kvframework.wire.protocol import REQUESTS
from tests.core.golden.contents import envelopes, names, namespace_records
from tests.core.golden.samples import every_field, explicit, required_fields

Document = dict[str, Any]

FOLDER = Path(__file__).parent
RELEASED = "RELEASED"
REQUEST_ID = 0x0102030405060708
BUFFERS = (b"a raw buffer", b"")
# What carries buffers behind its payload.
WITH_BUFFERS = (m.StoreCpuChunks, m.ChunksSent)


def current() -> dict[str, Document]:
    documents = {f"wire/{name}.json": _request(spec) for name, spec in REQUESTS.items()}
    documents["wire/ERROR.json"] = {"messages": [_message(code, ERROR_TYPE, _error(code)) for code in error_codes()]}
    documents["wire/liveness.json"] = {
        "the client sends": f"0x{bytes(range(TOKEN_BYTES)).hex()}",
        "the server answers with one descriptor": f"0x{WITH_ARENA.hex()}",
        "the server answers without an arena": f"0x{WITHOUT_ARENA.hex()}",
    }
    documents["storage/envelope.json"] = envelopes()
    documents["storage/namespace_record.json"] = namespace_records()
    documents["names.json"] = names()
    return documents


def releases() -> list[str]:
    return sorted(path.name for path in FOLDER.iterdir() if path.is_dir() and (path / "names.json").exists())


def recorded(release: str) -> dict[str, Document]:
    folder = FOLDER / release
    return {str(path.relative_to(folder)): json.loads(path.read_bytes()) for path in sorted(folder.rglob("*.json"))}


def write(release: str, documents: dict[str, Document]) -> None:
    """Raises `PermissionError` if the recording is of a release that is out."""
    folder = FOLDER / release
    if (folder / RELEASED).exists() and recorded(release) != documents:
        raise PermissionError(f"{release} is released: what it wrote is what others have to read. Raise the version.")
    for path in folder.rglob("*.json"):
        path.unlink()
    for name, document in documents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def error_codes() -> list[str]:
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, KVFrameworkError)]
    return sorted({each.code for each in classes if each is not KVFrameworkError})


def _error(code: str) -> ErrorPayload:
    return ErrorPayload(code, "a fact ü", "a place", "what there is", "a hint")


def _request(spec: RequestSpec) -> Document:
    messages = []
    for side, struct in (("request", spec.payload), ("response", spec.response)):
        full, bare = every_field(struct), required_fields(struct)
        messages.append(_message(f"{side}, every field", spec.name, full))
        if bare != full:
            messages.append(_message(f"{side}, required fields", spec.name, bare))
    return {
        "protocol": m.PROTOCOL_VERSION,
        "request": spec.payload.__name__,
        "response": spec.response.__name__,
        "buffers": spec.buffers,
        "messages": messages,
    }


def _message(what: str, type_name: str, payload: Message) -> Document:
    buffers = BUFFERS if isinstance(payload, WITH_BUFFERS) else ()
    frames = join(REQUEST_ID, type_name, payload, buffers)
    return {"what": what, "value": explicit(payload), "frames": [f"0x{bytes(frame).hex()}" for frame in frames]}


def this_release() -> str:
    """The release that these sources are, or will be: its development versions record what it will write."""
    return kvframework.__version__.partition(".dev")[0]
