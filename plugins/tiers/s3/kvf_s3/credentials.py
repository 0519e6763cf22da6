"""Credentials from files as the AWS tools have them: which file and section, read again every few minutes."""

from __future__ import annotations

import configparser
import os
from datetime import datetime, timedelta, timezone

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
            raise KeyError("another form than [SECTION] and NAME = VALUE") from None
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
