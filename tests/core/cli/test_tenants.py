"""`kvframework tenants digest`, and what `config check` and `config show` say of tenants."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvframework.api.keys import tenant_digest
from tests.core.cli.command import COMMAND, environment, run


def digest(salt: bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, "tenants", "digest", *arguments],
        input=salt,
        capture_output=True,
        env=environment(),
        timeout=240,
        check=False,
    )


def test_the_digest_of_a_salt_from_standard_input() -> None:
    done = digest("gehölz\n".encode())
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == tenant_digest("gehölz") + "\n"


@pytest.mark.parametrize(
    ("salt", "fact"), [(b"\n", b"empty"), (b"x" * 1025, b"1025 characters"), (b"\xff", b"not UTF-8 text")]
)
def test_what_is_no_salt(salt: bytes, fact: bytes) -> None:
    done = digest(salt)
    assert (done.returncode, done.stdout) == (2, b"")
    assert fact in done.stderr


def test_a_salt_is_no_argument() -> None:
    done = digest(b"", "s3cret")
    assert done.returncode == 2
    assert b"unexpected extra argument" in done.stderr


def test_config_show_and_check(tmp_path: Path) -> None:
    file = tmp_path / "kvf.toml"
    file.write_text(f'[l1]\ncapacity = "1MiB"\n[tenants.search]\nsalts = ["{tenant_digest("a")}"]\nmin = "512KiB"\n')
    shown = run("config", "show", "--config", str(file))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "[tenants.search]" in shown.stdout
    assert 'min = "512KiB"' in shown.stdout
    endpoint = f"server.endpoint=ipc://{tmp_path}/s.sock"
    assert run("config", "check", str(file), "--set", endpoint).returncode == 0
    refused = run("config", "check", str(file), "--set", endpoint, "--set", "tenants.search.min=2MiB")
    assert refused.returncode == 2
    assert "min 2MiB is more than max 100%" in refused.stderr
