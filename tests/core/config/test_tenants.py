"""`[tenants.NAME]`: what is refused, with its place and never with a salt; and the bytes of a share."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvframework.api.keys import tenant_digest
from kvframework.config.load import load_config
from kvframework.config.schema import Config
from kvframework.config.tenants import bytes_of_tenants
from kvframework.errors import ConfigFieldError

A, B = tenant_digest("salt of a"), tenant_digest("salt of b")


def load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "kvf.toml"
    path.write_text(text)
    return load_config(path, environ={})


def test_a_digest_is_that_of_the_documentation() -> None:
    assert tenant_digest("s3cret") == "2da912e4dcb976b9df9fc10609089913"


def test_shares_are_percents_or_sizes(tmp_path: Path) -> None:
    text = f"""
        [tenants.search]
        salts = ["{A}"]
        min = "20%"
        max = "62.5 %"
        [tenants.chat-2]
        salts = ["{B}"]
        min = "1 KiB"
    """
    config = load(tmp_path, text)
    assert [tenant.name for tenant in config.tenants] == ["search", "chat-2"]
    assert bytes_of_tenants(config.tenants, 10_000) == [(2000, 6250), (1024, 10_000)]
    assert load(tmp_path, "").tenants == ()


@pytest.mark.parametrize(
    ("text", "place", "fact"),
    [
        ('[tenants.a]\nsalts = ["plain-text-salt"]', "[tenants.a] salts #1", "not the digest"),
        (f'[tenants.a]\nsalts = ["{A.upper()}"]', "[tenants.a] salts #1", "not the digest"),
        (f'[tenants.a]\nsalts = ["{A}"]\n[tenants.b]\nsalts = ["{B}", "{A}"]', "[tenants.b] salts #2", "[tenants.a]"),
        (f'[tenants.a]\nsalts = ["{A}"]\nmin = "30%"\nmax = "20%"', "[tenants.a]", "min 30% is more than max 20%"),
        (f'[tenants.a]\nsalts = ["{A}"]\nmin = "2GiB"\nmax = "1GiB"', "[tenants.a]", "min 2GiB is more"),
        (
            f'[tenants.a]\nsalts = ["{A}"]\nmin = "60%"\n[tenants.b]\nsalts = ["{B}"]\nmin = "40.5%"',
            "[tenants.b]",
            "100.5 %",
        ),
        (f'[tenants.a]\nsalts = ["{A}"]\nmax = "101%"', "[tenants.a] max", "not a share"),
        (f'[tenants.a]\nsalts = ["{A}"]\nmax = "much"', "[tenants.a] max", "not a share"),
        (f'[tenants.a]\nsalts = ["{A}"]\nload_bandwidth = "2GB"', "[tenants.a] load_bandwidth", "is not a rate"),
        (f'[tenants.a]\nsalts = ["{A}"]\nload_bandwidth = "0B/s"', "[tenants.a] load_bandwidth", "is not a rate"),
        (f'[tenants.a]\nsalts = ["{A}"]\nmaximum = "1%"', "[tenants.a]", "unknown key 'maximum'"),
        (f'[tenants.other]\nsalts = ["{A}"]', "[tenants.other]", "is not a tenant name"),
        (f'[tenants."a b"]\nsalts = ["{A}"]', "[tenants.a b]", "is not a tenant name"),
        (f'[tenants.{"a" * 33}]\nsalts = ["{A}"]', f"[tenants.{'a' * 33}]", "is not a tenant name"),
        ("[tenants.a]\nsalts = []", "[tenants.a] salts", "length"),
        ("[tenants.a]\nmin = '1%'", "[tenants.a]", "salts"),
        ("tenants = 3", "[tenants]", "expected a table"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, place: str, fact: str) -> None:
    with pytest.raises(ConfigFieldError) as caught:
        load(tmp_path, text)
    assert place in caught.value.where
    assert fact in caught.value.fact
    assert "plain-text-salt" not in str(caught.value)


def test_more_than_64_tenants_are_refused(tmp_path: Path) -> None:
    tables = [f'[tenants.t{number}]\nsalts = ["{tenant_digest(str(number))}"]' for number in range(65)]
    assert len(load(tmp_path, "\n".join(tables[:64])).tenants) == 64
    with pytest.raises(ConfigFieldError, match="65 tenants"):
        load(tmp_path, "\n".join(tables))


def test_with_the_capacity_sizes_and_percents_are_compared(tmp_path: Path) -> None:
    one = f'[tenants.a]\nsalts = ["{A}"]\nmin = "1KiB"\n'
    config = load(tmp_path, one + 'max = "10%"')
    assert bytes_of_tenants(config.tenants, 20_000) == [(1024, 2000)]
    with pytest.raises(ConfigFieldError, match="min 1KiB is more than max 10%"):
        bytes_of_tenants(config.tenants, 5000)
    two = load(tmp_path, one + f'[tenants.b]\nsalts = ["{B}"]\nmin = "50%"')
    with pytest.raises(ConfigFieldError, match="add up to"):
        bytes_of_tenants(two.tenants, 2000)
