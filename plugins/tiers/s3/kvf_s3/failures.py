"""What a failure of the object store means: a fact, a hint, and what it says about the value. Pure.

The errors of obstore quote requests, answers and settings, so nothing of their text is shown but the code of an S3
error and the status of HTTP, each of a known form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvframework.errors import TierError

_CODE = re.compile(r"<Code>([A-Za-z]{1,48})</Code>|\"reason\": ?\"([A-Za-z]{1,48})\"")
_STATUS = re.compile(r"status code: (\d{3})\b")

_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or credentials_file, or give the machine a role"
_RIGHTS = "grant s3:GetObject, PutObject, DeleteObject and ListBucket on the bucket"
_BUCKET = "create the bucket, or correct url, endpoint and region"

# Code of the store's error: (fact, hint).
_CODES = {
    "AccessDenied": ("the store refuses the access", _RIGHTS),
    "AccountProblem": ("the store has closed the account", ""),
    "AllAccessDisabled": ("the store has closed the bucket", ""),
    "AuthenticationFailed": (
        "the store refuses the credentials",
        "check the account of the credentials, and the clock",
    ),
    "AuthorizationHeaderMalformed": ("the bucket is in another region", "set region"),
    "ContainerNotFound": ("the container does not exist", _BUCKET),
    "ExpiredToken": ("the credentials have expired", "renew the credentials"),
    "InvalidAccessKeyId": ("the store does not know the access key", _KEYS),
    "InvalidBucketName": ("the store does not allow the bucket's name", "correct url"),
    "InvalidToken": ("the store refuses the session token", _KEYS),
    "NoSuchBucket": ("the bucket does not exist", _BUCKET),
    "NotImplemented": ("the store does not support the request", ""),
    "PermanentRedirect": ("the bucket is at another endpoint", "set region, or endpoint"),
    "RequestTimeTooSkewed": (
        "the clocks of the store and of this machine differ",
        "set the clocks by NTP (chronyc tracking)",
    ),
    "SignatureDoesNotMatch": ("the store refuses the secret key", _KEYS),
    "SlowDown": ("the store asks for fewer requests", "lower concurrency, or spread the load over more time"),
    "TemporaryRedirect": ("the bucket is at another endpoint", "set region, or endpoint"),
}
# Codes of a store that takes this value, or any more, no longer.
_FULL = (
    "EntityTooLarge",
    "InsufficientStorage",
    "QuotaExceeded",
    "QuotaExceededException",
    "RequestBodyTooLarge",
    "StorageQuotaExceeded",
    "XMinioAdminBucketQuotaExceeded",
    "XMinioStorageFull",
)
_STATUSES = {
    "301": _CODES["PermanentRedirect"],
    "307": _CODES["TemporaryRedirect"],
    "400": ("the store refuses the request", "check that endpoint, region and bucket match"),
    "401": ("the store wants other credentials", _KEYS),
    "403": ("the store refuses the access", f"check the credentials and the clock; {_RIGHTS}"),
    "404": ("no bucket answers at the endpoint", "check that endpoint is the address of the S3 API"),
    "405": ("the store does not support the request", ""),
    "413": ("a value is too large for the store", ""),
    "429": _CODES["SlowDown"],
    "501": _CODES["NotImplemented"],
    "503": ("the store is busy, or asks for fewer requests", "lower concurrency, or spread the load over more time"),
    "507": ("the store is full", ""),
}
# What is looked for in a text without a status, first of all that fits: (words, fact, hint).
_WORDS = (
    ("External AWS credential provider", "the credentials file has no credentials", "see profile and credentials_file"),
    ("/latest/api/token", "no credentials are set, and the machine has no role", _KEYS),
    ("BadScheme", "endpoint is http://, but obstore allows only https", ""),
    ("InvalidCertificate", "the certificate of the store is not trusted", "set tls_ca"),
    ("UnknownIssuer", "the certificate of the store is not trusted", "set tls_ca"),
    (
        "InvalidContentType",
        "endpoint is https://, but the server does not speak TLS",
        "write http://, or correct the port",
    ),
    ("dns error", "the host of the store has no address", "correct endpoint, region or bucket"),
    ("ConnectionRefused", "no store listens at the endpoint", "start the store, or correct endpoint"),
    ("NetworkUnreachable", "the store cannot be reached", ""),
    ("HostUnreachable", "the store cannot be reached", ""),
    ("redirect without LOCATION", *_CODES["PermanentRedirect"]),
    ("kind: Connect", "no connection to the store", "check that endpoint is the address of the store"),
    ("kind: Timeout", "the store does not answer", ""),
    ("error sending request", "the connection to the store broke", ""),
    ("error decoding response body", "the connection to the store broke within a value", ""),
    ("partial response", "the connection to the store broke within a value", ""),
    ("HTTP error", "the connection to the store broke", ""),
)


@dataclass(frozen=True)
class Failure:
    """Why there is no answer for a key. `full`: the store takes no more, which is the value's own failure; `bare`: the
    store gave a refusal without a code, as for HEAD, whose cause another request tells."""

    fact: str
    hint: str = ""
    full: bool = False
    bare: bool = False

    def error(self, where: str) -> TierError:
        return TierError(self.fact, where=where, hint=self.hint)


LATE = Failure("the call's deadline has passed")
CLOSED = Failure("the tier is closed")


def understood(error: BaseException) -> Failure:
    """What an error of obstore, or of its parsing, means."""
    text = str(error)
    found = _CODE.search(text)
    code = (found[1] or found[2]) if found else ""
    status = ((found := _STATUS.search(text)) and found[1]) or ""
    if "169.254." in text or "metadata.google.internal" in text:
        return Failure("no credentials are set, and the machine has no role", _KEYS)
    if code in _FULL or status in ("413", "507"):
        return Failure(
            f"the store is full ({code or status})", "raise the store's quota, or delete old values", full=True
        )
    if code in _CODES:
        fact, hint = _CODES[code]
        return Failure(f"{fact} ({code})", hint)
    if status:
        fact, hint = _STATUSES.get(
            status, ("the store failed" if status[0] == "5" else "the store refuses the request", "")
        )
        return Failure(f"{fact} ({f'{code}, ' if code else ''}status {status})", hint, bare=not code)
    for words, fact, hint in _WORDS:
        if words in text:
            return Failure(fact, hint)
    return Failure(f"the answer is not that of an object store ({type(error).__name__})", "check endpoint")


def no_bucket(error: BaseException) -> bool:
    """Whether a name was not found because its bucket is missing."""
    found = _CODE.search(str(error))
    return found is not None and found[1] in ("NoSuchBucket", "ContainerNotFound")
