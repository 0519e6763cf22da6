"""The options, checked and turned into a store of obstore, with credentials from files as the AWS tools have them:
which file and section, read again every few minutes. Connects to nothing.

No error text of this module holds a credential.
"""

from __future__ import annotations

import configparser
import os
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from obstore.store import AzureStore, GCSStore, S3Store

from kvf_s3 import Address, S3Options
from kvf_s3.failures import understood
from kvframework.errors import ConfigFieldError

_AGAIN_AFTER = timedelta(minutes=5)
# Variables by which obstore itself finds credentials, before those of files.
_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")


class AwsFile:
    """A section of a credentials file. Calling it reads the file, so that it may be rotated; no error of it shows what
    the file holds."""

    def __init__(self, path: str, profile: str) -> None:
        self.path = path
        self.profile = profile

    def problem(self) -> str:
        """What is wrong with the file; empty: it has the section and the keys."""
        try:
            self._keys()
        except OSError as error:
            return f"{self.path} cannot be read: {error.strerror}"
        except KeyError as error:
            return f"{self.path} has {error.args[0]}"
        return ""

    def __call__(self) -> dict[str, object]:
        """As obstore wants it of a provider of credentials."""
        key, secret, token = self._keys()
        expires_at = datetime.now(timezone.utc) + _AGAIN_AFTER
        return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": expires_at}

    def _keys(self) -> tuple[str, str, str | None]:
        parser = configparser.RawConfigParser()
        try:
            with open(self.path, encoding="utf-8", errors="strict") as file:
                parser.read_string(file.read(1 << 20))
        except (configparser.Error, UnicodeError):
            raise KeyError("lines that are not [SECTION] or NAME = VALUE") from None
        if not parser.has_section(self.profile):
            raise KeyError(f"no section [{self.profile}]")
        section = parser[self.profile]
        key, secret = section.get("aws_access_key_id", ""), section.get("aws_secret_access_key", "")
        if not key or not secret:
            raise KeyError(f"no aws_access_key_id and aws_secret_access_key in section [{self.profile}]")
        return key, secret, section.get("aws_session_token") or None


def aws_file(path: str, profile: str) -> AwsFile | None:
    """The file with the credentials: the one that `path` or `profile` ask for; else, where no variable gives
    credentials, that of the AWS tools if it is there. None: obstore finds them, in variables or by a role."""
    asked = bool(path or profile)
    path = path or os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"
    file = AwsFile(os.path.expanduser(path), profile or os.environ.get("AWS_PROFILE") or "default")
    if asked:
        return file
    if any(os.environ.get(name) for name in _VARIABLES) or file.problem():
        return None
    return file


_CONNECT_S = 5
# A call ends by its own deadline; obstore's would end every request after 30 seconds.
_NEVER = timedelta(hours=1)
# 503 is an everyday answer of large stores, and a connection that was idle may be gone.
_RETRIES = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2},
}
# What obstore says of settings, and what it means; the first that fits.
_SETTINGS = {
    "MissingAccessKeyId": "AWS_SECRET_ACCESS_KEY is set, but AWS_ACCESS_KEY_ID is not",
    "MissingSecretAccessKey": "AWS_ACCESS_KEY_ID is set, but AWS_SECRET_ACCESS_KEY is not",
    "certificate": "the certificates cannot be used",
    "Missing": "an environment variable is missing",
}


@dataclass(frozen=True)
class Settings:
    """Checked options: the store of obstore, and where values lie in it. `shown` is the address for people."""

    store: Any
    address: Address
    shown: str


def read_settings(options: S3Options, *, where: str) -> Settings:
    """Raise `ConfigFieldError` for files and settings that cannot be used."""
    address = Address.parse(options.url)
    client: dict[str, object] = {
        "connect_timeout": timedelta(seconds=_CONNECT_S),
        "timeout": _NEVER,
        "user_agent": "kvframework",
        "allow_http": options.endpoint.startswith("http://"),
    }
    if options.tls_ca:
        client["root_certificate"] = _read(options.tls_ca, f"{where}.tls_ca")
    config: dict[str, Any] = {"client_options": client, "retry_config": _RETRIES}
    if options.endpoint:
        config["base_url" if address.scheme == "gs" else "endpoint"] = options.endpoint.rstrip("/")
    if options.anonymous:
        config["skip_signature"] = True
    make = {"s3": _s3, "gs": _gs, "az": _az}[address.scheme]
    problem = ""
    try:
        store = make(options, address, config, where)
    except ConfigFieldError:
        raise
    except Exception as error:  # noqa: BLE001  its text may hold what the environment says
        problem = f"obstore does not accept the settings ({type(error).__name__}): {_hint(error)}"
    if problem:
        raise ConfigFieldError(
            problem, where=where, hint="check the environment variables AWS_..., GOOGLE_... and AZURE_..."
        )
    return Settings(store, address, address.shown(options.endpoint))


def _s3(options: S3Options, address: Address, config: dict[str, Any], where: str) -> Any:
    region = options.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    config |= {"region": region, "unsigned_payload": not options.sign_payload}
    file = None if options.anonymous else aws_file(options.credentials_file, options.profile)
    if file is not None:
        problem = file.problem()
        if problem:
            place = "credentials_file" if options.credentials_file else "profile"
            unread = "cannot be read" in problem
            hint = "let the server's user read the file" if unread else "correct profile, or the file"
            raise ConfigFieldError(problem, where=f"{where}.{place}", hint=hint)
        config["credential_provider"] = file
    return S3Store(address.bucket, **config)


def _gs(options: S3Options, address: Address, config: dict[str, Any], where: str) -> Any:
    if options.credentials_file:
        _read(options.credentials_file, f"{where}.credentials_file")
        config["service_account"] = options.credentials_file
    return GCSStore(address.bucket, **config)


def _az(_options: S3Options, address: Address, config: dict[str, Any], _where: str) -> Any:
    return AzureStore(address.bucket, account_name=address.account, **config)


def _read(path: str, where: str) -> bytes:
    problem = ""
    try:
        with open(os.path.expanduser(path), "rb") as file:
            return file.read(1 << 20)
    except OSError as error:
        problem = error.strerror or type(error).__name__
    raise ConfigFieldError(f"{path} cannot be read: {problem}", where=where)


def _hint(error: Exception) -> str:
    for words, meaning in _SETTINGS.items():
        if words in str(error):
            return meaning
    return understood(error).fact
