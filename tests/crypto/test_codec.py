"""The codec `aead`: the contract of codecs, what a seal binds, and keys that come, go and change under a server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvf_crypto import sealing
from kvf_crypto.codec import AeadCodec
from kvf_crypto.roots import KeyUnavailable
from kvf_crypto.sealing import DataKey, best_cipher
from kvf_dev.testing import CodecConformance
from kvframework.api.codec import ValueName, ValueRefused
from tests.crypto.keyrings import Keyrings, opened, refused, sealed
from tests.support.waiting import wait_until

NAME = ValueName(os.urandom(72), os.urandom(16), "")
OF_ACME = NAME._replace(tenant="acme")
DATA = os.urandom(5000)


@pytest.fixture
def keyrings(tmp_path: Path) -> Keyrings:
    made = Keyrings(tmp_path)
    made.run("rotate")
    return made


class Sealed(CodecConformance):
    use = "aead"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _keys(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        made = Keyrings(tmp_path_factory.mktemp("keys"))
        made.run("rotate")
        cls.options = {**made.options, **cls.options}
        with pytest.MonkeyPatch.context() as patch:
            # The kit makes a codec without options, too.
            patch.setenv("HOME", str(made.folder))
            (made.folder / ".config/kvframework").mkdir(parents=True)
            for file in ("keyring.json", "keyring.key"):
                os.link(made.folder / file, made.folder / ".config/kvframework" / file)
            yield


class TestAes(Sealed):
    options: ClassVar = {"cipher": "aes-256-gcm"}


class TestChaCha(Sealed):
    options: ClassVar = {"cipher": "chacha20-poly1305"}


class TestPacked(Sealed):
    options: ClassVar = {"compress": "zstd"}


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 5000 + 44 + 16 - 1), bit=st.integers(0, 7))
def test_no_bit_of_a_sealed_value_can_be_changed(at: int, bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    key = DataKey.derive(bytes(32), "", 1)
    packed = bytearray(sealing.seal(key, NAME, memoryview(DATA), cipher=1, packing=0, object_bytes=len(DATA)))
    packed[at] ^= 1 << bit
    with pytest.raises(ValueRefused):
        sealing.unseal(key, NAME, memoryview(packed), memoryview(bytearray(5000)), object_bytes=5000)


def test_a_value_says_nothing_of_its_content(keyrings: Keyrings) -> None:
    codec = keyrings.codec()
    data = b"the quick brown fox " * 200
    one, two = sealed(codec, NAME, data), sealed(codec, NAME, data)
    assert b"quick" not in one
    assert one[44:] != two[44:]
    assert opened(codec, NAME, one, len(data)) == opened(codec, NAME, two, len(data)) == data


def test_a_rotation_keeps_old_values_readable_and_asks_to_write_them_again(keyrings: Keyrings) -> None:
    codec, other_node = keyrings.codec(), keyrings.codec()
    old = sealed(codec, NAME, DATA)
    keyrings.run("rotate")
    place = bytearray(len(DATA))
    assert other_node.decode_named(memoryview(old), memoryview(place), NAME) is True
    assert place == DATA
    new = sealed(codec, NAME, DATA)
    assert other_node.decode_named(memoryview(new), memoryview(place), NAME) is False
    keyrings.run("rotate", "--drop-old")
    assert refused(codec, NAME, old, len(DATA)) == "no_key"
    assert opened(codec, NAME, new, len(DATA)) == DATA
    with pytest.raises(ValueRefused, match="its generation is retired"):
        opened(codec, NAME, old, len(DATA))


def test_a_tenants_key_opens_no_value_of_another(keyrings: Keyrings) -> None:
    keyrings.run("rotate", "--tenant", "acme")
    keyrings.run("rotate", "--tenant", "bolt")
    codec = keyrings.codec()
    packed = sealed(codec, OF_ACME, DATA)
    assert opened(codec, OF_ACME, packed, len(DATA)) == DATA
    for tenant in ("bolt", "", "unknown"):
        assert refused(codec, OF_ACME._replace(tenant=tenant), packed, len(DATA)) == "no_key"


def test_a_tenant_that_gets_a_key_keeps_what_it_had(keyrings: Keyrings) -> None:
    codec = keyrings.codec()
    before = sealed(codec, OF_ACME, DATA)
    keyrings.run("rotate", "--tenant", "acme")
    assert codec.decode_named(memoryview(before), memoryview(bytearray(len(DATA))), OF_ACME) is True


def test_a_destroyed_tenant_has_nothing_at_once_and_the_others_all(keyrings: Keyrings) -> None:
    keyrings.run("rotate", "--tenant", "acme")
    codec = keyrings.codec()
    packed, shared = sealed(codec, OF_ACME, DATA), sealed(codec, NAME, DATA)
    keyrings.run("destroy", "--tenant", "acme", "--yes", "--no-server")
    assert refused(codec, OF_ACME, packed, len(DATA)) == "no_key"
    with pytest.raises(ValueRefused, match="acme was destroyed"):
        sealed(codec, OF_ACME, DATA)
    assert opened(codec, NAME, shared, len(DATA)) == DATA
    # A key that it gets later is another one.
    keyrings.run("rotate", "--tenant", "acme")
    assert refused(codec, OF_ACME, packed, len(DATA)) == "no_key"
    assert opened(codec, OF_ACME, sealed(codec, OF_ACME, DATA), len(DATA)) == DATA


def test_two_nodes_with_different_keys_of_one_name_read_nothing_of_each_other(tmp_path: Path) -> None:
    nodes = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        keyrings = Keyrings(tmp_path / name)
        keyrings.run("rotate")
        nodes.append(keyrings.codec())
    packed = sealed(nodes[0], NAME, DATA)
    assert refused(nodes[1], NAME, packed, len(DATA)) == "no_key", "it is another's, so it is not deleted"


def test_keys_that_vanish_after_an_hour_are_kept_and_told(keyrings: Keyrings) -> None:
    codec = keyrings.codec()
    packed = sealed(codec, NAME, DATA)
    for file in ("keyring.json", "keyring.key"):
        (keyrings.folder / file).unlink()
    assert opened(codec, NAME, packed, len(DATA)) == DATA
    assert "is gone" in codec.problems()[0]
    with pytest.raises(KeyUnavailable, match="cannot be read"):
        keyrings.codec()


def test_a_keyring_that_is_damaged_later_changes_nothing_but_the_status(keyrings: Keyrings) -> None:
    codec = keyrings.codec()
    good = (keyrings.folder / "keyring.json").read_bytes()
    assert not codec.problems()
    (keyrings.folder / "keyring.json").write_bytes(good[: len(good) // 2])
    packed = sealed(codec, NAME, DATA)
    assert "damaged" in codec.problems()[0]
    (keyrings.folder / "keyring.json").write_bytes(good)
    assert opened(codec, NAME, packed, len(DATA)) == DATA
    assert not codec.problems()


def test_a_command_that_fails_seals_nothing_until_it_answers(tmp_path: Path) -> None:
    key, script = tmp_path / "root.hex", tmp_path / "root.sh"
    script.write_text(f"#!/bin/sh\ncat {key}\n")
    script.chmod(0o700)
    key.write_text("5a" * 32)
    keyrings = Keyrings(tmp_path, key_command=[str(script)])
    keyrings.run("rotate")
    key.rename(tmp_path / "away")
    codec = keyrings.codec()
    with pytest.raises(ValueRefused) as caught:
        sealed(codec, NAME, DATA)
    assert caught.value.reason == "no_key"
    wait_until(lambda: any("ended with status 1" in each for each in codec.problems()))
    (tmp_path / "away").rename(key)
    wait_until(lambda: not codec.problems())
    assert opened(codec, NAME, sealed(codec, NAME, DATA), len(DATA)) == DATA


def test_a_command_that_hangs_is_ended_and_keeps_nobody(tmp_path: Path) -> None:
    keyrings = Keyrings(tmp_path, key_env="KVF_TEST_ROOT")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVF_TEST_ROOT", "5a" * 32)
        keyrings.run("rotate")
    del keyrings.options["key_env"]
    codec = keyrings.codec(key_command=["sleep", "60"], root_timeout_s=0.2)
    assert refused(codec, NAME, bytes(5060), 5000) == "forged"
    with pytest.raises(ValueRefused):
        sealed(codec, NAME, DATA)
    wait_until(lambda: any("took more than 0.2 s" in each for each in codec.problems()))


_FORKED = """
import os, sys
from kvf_crypto.sealing import DataKey, Head, seal
from kvframework.api.codec import ValueName
key, name = DataKey.derive(bytes(32), "", 1), ValueName(bytes(72), bytes(16), "")
def make():
    sealed = seal(key, name, memoryview(b"x"), cipher=1, packing=0, object_bytes=1)
    print(Head.of(sealed).random.hex())
make()
sys.stdout.flush()
for _ in range(4):
    if os.fork() == 0:
        for _ in range(500): make()
        sys.stdout.flush()
        os._exit(0)
    os.wait()
for _ in range(500): make()
"""


def test_forks_and_restarts_repeat_no_nonce() -> None:
    drawn = [
        subprocess.run([sys.executable, "-c", _FORKED], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    both = drawn[0] + drawn[1]
    assert len(both) == len(set(both)) == 2 * 2501


def test_the_cipher_is_the_one_that_the_processor_helps_with(tmp_path: Path) -> None:
    told = tmp_path / "cpuinfo"
    for text, cipher in {
        "flags\t\t: fpu aes pclmulqdq sse4_2\n": "aes-256-gcm",
        "flags\t\t: fpu sse4_2\n": "chacha20-poly1305",
        "Features\t: fp asimd aes pmull sha1\n": "aes-256-gcm",
        "Features\t: fp asimd\n": "chacha20-poly1305",
    }.items():
        told.write_text(text)
        assert best_cipher(told) == cipher
    assert best_cipher(tmp_path / "none") == "chacha20-poly1305"


def test_values_of_either_cipher_are_opened_by_both(keyrings: Keyrings) -> None:
    codecs = [keyrings.codec(cipher=cipher) for cipher in ("aes-256-gcm", "chacha20-poly1305")]
    for writer in codecs:
        for reader in codecs:
            assert opened(reader, NAME, sealed(writer, NAME, DATA), len(DATA)) == DATA


def test_no_key_is_shown(keyrings: Keyrings) -> None:
    codec = keyrings.codec()
    shown = keyrings.run("status") + keyrings.run("status", "--json") + repr(codec._keys.now().of(""))
    root = (keyrings.folder / "keyring.key").read_text().strip()
    assert root not in shown
    for key in codec._keys.now().of(""):
        assert key.secret.hex() not in shown
        assert repr(key.secret) not in shown


def test_what_one_key_seals_is_bounded(keyrings: Keyrings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvf_crypto.codec.MOST_VALUES", 3)
    codec: AeadCodec = keyrings.codec()
    for _ in range(3):
        sealed(codec, NAME, DATA)
    with pytest.raises(ValueRefused, match="crypto rotate"):
        sealed(codec, NAME, DATA)
    keyrings.run("rotate")
    sealed(codec, NAME, DATA)
