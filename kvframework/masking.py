"""The values of a struct as they may be shown, without secrets and the credentials in URLs; and texts and documents
without what a bug report must not hold: those, digests and the names of models. Pure.

A field is secret by its type: `msgspec.Meta(extra={"secret": "value"})`, or `"url"` for one whose place may be shown.
The time of a redaction grows with the text, however many models there are: clients choose their names."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import quote, quote_plus, unquote

import msgspec

HIDDEN = "***"
# A value in a URL's query that is no number or flag.
_LONG = 6


def shown_options(options: msgspec.Struct) -> dict[str, object]:
    """Return the fields of a struct by name, as they may be shown: without secrets and the credentials in URLs."""
    return {name: shown(getattr(options, name), mark) for name, mark in _marks(options).items()}


def secrets_of(options: msgspec.Struct) -> set[str]:
    """Return the texts that `shown_options` hides: secret values, and the credentials of URLs."""
    return {text for name, mark in _marks(options).items() for text in _hidden(getattr(options, name), mark)}


def _marks(options: msgspec.Struct) -> dict[str, str | None]:
    struct = msgspec.inspect.type_info(type(options))
    assert isinstance(struct, msgspec.inspect.StructType)
    return {field.name: secret_mark(field.type) for field in struct.fields}


def secret_mark(kind: msgspec.inspect.Type) -> str | None:
    """Return the secret part of a field of this type: "value" for all of it, "url" for its credentials, or None. Looks
    through unions and containers: an optional secret, or one of many, counts as one."""
    if isinstance(kind, msgspec.inspect.Metadata):
        own: str | None = (kind.extra or {}).get("secret")
        return own or secret_mark(kind.type)
    inside: list[msgspec.inspect.Type] = []
    if isinstance(kind, msgspec.inspect.UnionType):
        inside += kind.types
    elif isinstance(kind, msgspec.inspect.TupleType):
        inside += kind.item_types
    elif isinstance(kind, msgspec.inspect.DictType):
        inside += (kind.key_type, kind.value_type)
    elif isinstance(kind, msgspec.inspect.CollectionType):
        inside.append(kind.item_type)
    marks = {secret_mark(each) for each in inside} - {None}
    return "value" if "value" in marks else marks.pop() if marks else None


def _hidden(value: object, mark: str | None) -> Iterator[str]:
    if isinstance(value, msgspec.Struct):
        yield from secrets_of(value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _hidden(key, mark)
            yield from _hidden(each, mark)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _hidden(each, mark)
    elif isinstance(value, str) and "://" in value:
        user, _, place = value.partition("://")[2].rpartition("@")
        yield from filter(None, (user, unquote(user), unquote(user.rpartition(":")[2])))
        values = (each.partition("=")[2] for each in place.partition("?")[2].split("&"))
        yield from (unquote(each) for each in values if len(each) >= _LONG)
    elif isinstance(value, str) and mark == "value" and value:
        yield value


def masked_url(url: str) -> str:
    """Return `url` without user name, password and query, even if it is malformed."""
    scheme, separator, rest = url.partition("://")
    if not separator or "password" in rest.lower():
        return HIDDEN
    _, at, place = rest.rpartition("@")
    return f"{scheme}://{f'{HIDDEN}@' if at else ''}{place.partition('?')[0]}"


def shown(value: object, mark: object = None) -> object:
    """Return a value as it may be shown: hidden by its `mark`, and the credentials of URLs in any case."""
    if isinstance(value, Mapping):
        return {key: shown(each, mark) for key, each in value.items()}
    if isinstance(value, msgspec.Struct):
        return shown_options(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [shown(each, mark) for each in value]
    if not isinstance(value, str):
        return HIDDEN if mark and value is not None else value
    # A plugin may have forgotten to mark a URL.
    if mark == "url" or (not mark and "://" in value and "@" in value):
        return masked_url(value) if value else ""
    return HIDDEN if mark and value else value


_CREDENTIALS = re.compile(r"://[^\s/@\"']*@[^\s\"',;)]*")
_DIGEST = re.compile(r"(?<![0-9A-Za-z])(?:(?=[0-9]*[a-fA-F])[0-9a-fA-F]{12,}|[0-9]{24,})(?![0-9A-Za-z])")
# A long word with letters and some digits, and without the marks between the words of a path: a token, or base64.
_LONG_WORD = re.compile(r"[A-Za-z0-9+=_-]{20,}")
_DIGITS_OF_A_TOKEN = 3
# What a name of a model may be in a line: a whole value, or a word between these marks.
_WORD = re.compile(r"[^\s\"'`,;=()\[\]{}<>]+")
# A shorter secret is hidden only where it is a whole word: it is a part of too many others.
_SHORT = 4


def hiding(secret_words: Iterable[str]) -> re.Pattern[str]:
    """Return the expression that finds secrets as they are, and as they are quoted or encoded."""
    forms = sorted({form for word in secret_words if word for form in _forms(word)}, key=len, reverse=True)
    patterns = [re.escape(form) if len(form) >= _SHORT else rf"\b{re.escape(form)}\b" for form in forms]
    return re.compile("|".join(patterns) or "(?!)")


class Redaction:
    """Hides secrets, credentials with the host that they are for, and whatever looks like a digest or a token. A value
    or a word that is one of `models` becomes a number. A digest has one name in a report, another in the next."""

    def __init__(self, secret_words: Iterable[str] = (), models: Iterable[str] = ()) -> None:
        self._key = secrets.token_bytes(16)
        self._secrets = hiding(secret_words)
        self._models = {model: f"<model {number}>" for number, model in enumerate(sorted(filter(None, models)), 1)}
        self._key_text = functools.cache(self.text)  # the records of a list have the same keys

    def text(self, text: str) -> str:
        if text in self._models:
            return self._models[text]
        text = self._secrets.sub(HIDDEN, text)
        if self._models:
            text = _WORD.sub(lambda found: self._word(found[0]), text)
        text = _CREDENTIALS.sub(f"://{HIDDEN}", text)
        text = _DIGEST.sub(lambda found: f"<digest {self._named(found[0].lower())}>", text)
        return _LONG_WORD.sub(lambda found: self._token(found[0]), text)

    def document(self, value: object) -> object:
        """Return a document of mappings, lists and plain values without them, in keys as in values."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self._key_text(str(key)): self.document(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.document(each) for each in value]
        return value

    def _word(self, word: str) -> str:
        name = word.rstrip(".:")
        return self._models.get(word) or self._models.get(name, name) + word[len(name) :]

    def _token(self, word: str) -> str:
        digits = sum(letter.isdigit() for letter in word)
        return f"<token {self._named(word)}>" if _DIGITS_OF_A_TOKEN <= digits < len(word) else word

    def _named(self, word: str) -> str:
        return hashlib.blake2s(word.encode(), key=self._key, digest_size=3).hexdigest()


def _forms(word: str) -> set[str]:
    raw = word.encode("utf-8", "surrogateescape")
    encoded = (base64.b64encode(raw), base64.urlsafe_b64encode(raw))
    in_quotes = (repr(word), repr(raw)[1:], json.dumps(word), json.dumps(word, ensure_ascii=False))
    in_urls = (quote(raw, safe=""), quote(raw), quote_plus(raw))
    return {
        word,
        raw.hex(),
        *(each.decode().rstrip("=") for each in encoded),
        *(form[1:-1] for form in in_quotes),
        *in_urls,
    }
