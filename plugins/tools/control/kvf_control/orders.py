"""The orders as they arrive over HTTP, and the OpenAPI document of all paths. Pure."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvframework.client import Forget

MOST_TOKENS = 1 << 18
MOST_DIGESTS = 1 << 14
MOST_PINS, MOST_PIN_S = 256, 7 * 86400.0
# The longest that the eviction policy takes.
MOST_NEXT_S = 3600.0

Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Tokens = Annotated[tuple[Token, ...], msgspec.Meta(max_length=MOST_TOKENS, description="token ids from the first on")]
# A prompt as the engine sees it; a token has a byte at least.
Prompt = Annotated[str, msgspec.Meta(max_length=1 << 20, description="a text, where its model has a tokenizer here")]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Digests = Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MOST_DIGESTS, description="digests of the chunks")]
Text = Annotated[str, msgspec.Meta(max_length=256)]
Salt = Annotated[str, msgspec.Meta(max_length=1024, description="the requests' cache_salt")]
Namespace = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$", description="empty: all of the model")]


class Prefetch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Loads a run of chunks from the tiers into L1. It is named by `tokens`, `digests` or a `text`, or by the
    `conversation` of an earlier order that had one of them. `tenant` is whose pins it counts in; an empty `model`
    stands for all."""

    tokens: Tokens = ()
    digests: Digests = ()
    text: Prompt = ""
    conversation: Text = ""
    salt: Salt = ""
    tenant: Text = ""
    model: Text = ""
    namespace: Namespace = ""


class Pin(Prefetch, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Does as a prefetch, and keeps what L1 then has for `seconds`."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=MOST_PIN_S)]


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Begins a conversation, or says what it has come to, and that its next turn is expected within `seconds`: L1 keeps
    it longer than other KV, and loads what only tiers have."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=MOST_NEXT_S)]
    tokens: Tokens = ()
    digests: Digests = ()
    text: Prompt = ""
    salt: Salt = ""
    tenant: Text = ""
    model: Text = ""
    namespace: Namespace = ""


class End(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ends the orders of a conversation of `tenant`; what no other conversation shares leaves L1 first."""

    tenant: Text = ""


class Deletion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Deletes what all of the given fields name, from L1 and every tier, as `kvframework clear` does."""

    tenant: Text = ""
    salts: Annotated[tuple[Salt, ...], msgspec.Meta(max_length=4096)] = ()
    model: Text = ""
    namespace: Namespace = ""
    conversation: Text = ""
    tokens: Tokens = ()
    digests: Digests = ()
    text: Prompt = ""
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 5.0

    def forget(self) -> Forget:
        tokens = b"".join(token.to_bytes(4, "little") for token in self.tokens)
        digests = bytes.fromhex("".join(self.digests))
        packed = bytes.fromhex(self.namespace)
        return Forget(self.tenant, self.salts, self.model, packed, self.conversation, tokens, digests, self.wait_s)


class Directive(msgspec.Struct, frozen=True, kw_only=True):
    """An order and what became of it: `loading`, `held` (a pin), `waiting` (for the server), `done`, or `ended`. Of the
    `asked_tokens`, `l1_tokens` were in L1 at the last look. Times are Unix seconds, `until` 0 for no time."""

    id: str
    do: str
    state: str
    asked_tokens: int
    l1_tokens: int
    nbytes: int
    tenant: str
    at: float
    until: float


class Problem(msgspec.Struct, frozen=True):
    """Why an order was not carried out."""

    error: str


def openapi() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the paths that `kvframework control` answers."""
    kinds = (Prefetch, Pin, Turn, End, Deletion, Directive, Problem)
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")

    def body(kind: str) -> dict[str, Any]:
        return {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind}"}}}}

    def path(summary: str, answer: str, asked: str = "") -> dict[str, Any]:
        failed = {**body("Problem"), "description": "refused"}
        said = {"description": "the answer", **(body(answer) if answer else {})}
        said = {"summary": summary, "responses": {"200": said, "400": failed, "429": failed, "503": failed}}
        return {**said, "requestBody": {"required": True, **body(asked)}} if asked else said

    def of(name: str) -> list[dict[str, Any]]:
        return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]

    ends = path("End a conversation, with its prefetches and pins", "Directive", "End")
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvframework control", "version": "1"},
        "security": [{"token": []}],
        "paths": {
            "/v1/prefetch": {"post": path("Load KV into L1 before its request", "Directive", "Prefetch")},
            "/v1/pin": {"post": path("Keep KV in L1 for a while", "Directive", "Pin")},
            "/v1/forget": {"post": path("Delete KV, with a receipt", "", "Deletion")},
            "/v1/conversations/{id}/turn": {
                "parameters": of("id"),
                "post": path("Begin a conversation, or announce its next turn", "Directive", "Turn"),
            },
            "/v1/conversations/{id}/end": {"parameters": of("id"), "post": ends},
            "/v1/directives": {"get": path("List the orders", "")},
            "/v1/directives/{id}": {"parameters": of("id"), "delete": path("End a prefetch or a pin", "Directive")},
        },
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }
