"""Texts and documents without what a bug report must not hold: secrets, digests, credentials, names of models. Pure."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from urllib.parse import quote, quote_plus

from kvframework.masking import HIDDEN

_CREDENTIALS = re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/@\"']*@[^\s\"',;)]*")
_DIGEST = re.compile(r"(?<![0-9A-Za-z])(?:(?=[0-9]*[a-fA-F])[0-9a-fA-F]{12,}|[0-9]{24,})(?![0-9A-Za-z])")
# A long word with letters and some digits, and without the marks between the words of a path: a token, or base64.
_LONG_WORD = re.compile(r"[A-Za-z0-9+=_-]{20,}")
_DIGITS_OF_A_TOKEN = 3
_PERCENT = re.compile("%[0-9A-F]{2}")
# A shorter secret is hidden only where it is a whole word: it is a part of too many others.
_SHORT = 4


class Redaction:
    """Hides `secrets` in any of their usual forms, credentials with the host that they are for, and whatever looks like
    a digest or a token. `models` get numbers in their place. The same digest has the same name within one report, and
    another one in the next."""

    def __init__(self, secret_words: Iterable[str] = (), models: Iterable[str] = ()) -> None:
        self._key = secrets.token_bytes(16)
        words = {form: HIDDEN for word in secret_words if word for form in _forms(word)}
        numbered = enumerate(sorted({model for model in models if model}), 1)
        self._words = {f"{model}": f"<model {number}>" for number, model in numbered} | words
        longest_first = sorted(self._words, key=len, reverse=True)
        self._pattern = re.compile(
            "|".join(
                re.escape(word) if word in words and len(word) >= _SHORT else rf"(?<!\w){re.escape(word)}(?!\w)"
                for word in longest_first
            )
        )

    def text(self, text: str) -> str:
        """Return the text without them."""
        if self._words:
            text = self._pattern.sub(lambda found: self._words[found[0]], text)
        text = _CREDENTIALS.sub(rf"\1{HIDDEN}", text)
        text = _DIGEST.sub(lambda found: f"<digest {self._named(found[0].lower())}>", text)
        return _LONG_WORD.sub(lambda found: self._token(found[0]), text)

    def document(self, value: object) -> object:
        """Return a document of mappings, lists and plain values without them, in keys as in values."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.document(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.document(each) for each in value]
        return value

    def _token(self, word: str) -> str:
        digits = sum(letter.isdigit() for letter in word)
        return f"<token {self._named(word)}>" if _DIGITS_OF_A_TOKEN <= digits < len(word) else word

    def _named(self, word: str) -> str:
        return hashlib.blake2s(word.encode(), key=self._key, digest_size=3).hexdigest()


def _forms(word: str) -> set[str]:
    raw = word.encode("utf-8", "surrogateescape")
    plain, urlsafe = base64.b64encode(raw).decode().rstrip("="), base64.urlsafe_b64encode(raw).decode().rstrip("=")
    in_quotes = (repr(word), ascii(word), repr(raw)[1:], json.dumps(word), json.dumps(word, ensure_ascii=False))
    in_urls = {quote(raw, safe=""), quote(raw), quote_plus(raw)}
    in_urls |= {_PERCENT.sub(lambda found: found[0].lower(), form) for form in in_urls}
    return {word, *(form[1:-1] for form in in_quotes), *in_urls, raw.hex(), raw.hex().upper(), plain, urlsafe}
