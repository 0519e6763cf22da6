"""Options of `kvframework control`, from the command and from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvf_control.settings import configured
from kvframework.errors import ConfigError


@pytest.fixture
def token(tmp_path: Path) -> str:
    (tmp_path / "token").write_text("t")
    return str(tmp_path / "token")


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "control.toml"
    file.write_text(text)
    return file


def test_options_come_before_the_file(tmp_path: Path, token: str) -> None:
    file = written(tmp_path, f'[control]\nlisten = "127.0.0.1:0"\ntoken_file = "{token}"\n')
    assert configured(file, {}).token_file == token
    assert configured(file, {"listen": "[::1]:0"}).listen == "[::1]:0"


@pytest.mark.parametrize(
    ("text", "given", "words"),
    [
        ("[control]\nother = 1\n", {}, "other"),
        ("control = 1\n", {}, "control"),
        ("", {"tls_cert": "cert.pem"}, "tls_cert and tls_key must be set together"),
        ("", {"token_file": "/nowhere/token"}, "the token file /nowhere/token cannot be read"),
        ("", {"listen": "127.0.0.1"}, "is not a host and a port"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, token: str, text: str, given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configured(written(tmp_path, text), {"listen": "127.0.0.1:0", "token_file": token, **given})


def test_a_token_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no token is configured"):
        configured(written(tmp_path, "[control]\n"), {"listen": "127.0.0.1:0"})
