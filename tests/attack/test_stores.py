"""An attacker who owns a store: what is tried on real disks, Redis and S3, and the reason for which it is a miss."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvf_crypto.keyring import DEPLOYMENT, read_keyring
from kvf_crypto.roots import read_root
from kvf_crypto.sealing import HEAD_BYTES, DataKey, seal, unseal
from kvframework.api.codec import ValueName, ValueRefused
from tests.attack.stores import HEADER, LAYOUT, NBYTES, Attacked, Victim, attacked, content, enveloped, key_of
from tests.crypto.keyrings import Keyrings

A, B, OF_ACME, OF_BOLT = key_of(1), key_of(2), key_of(3, "acme"), key_of(3, "bolt")


@pytest.fixture(params=["disk", "redis", "s3"], scope="module")
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    with attacked(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture
def keyrings(tmp_path: Path) -> Keyrings:
    made = Keyrings(tmp_path)
    for tenant in ("", "acme", "bolt"):
        made.run("rotate", "--tenant", tenant)
    return made


@pytest.fixture
def victim(store: Attacked, keyrings: Keyrings) -> Victim:
    made = Victim(store, keyrings)
    made.put(A, B, OF_ACME, OF_BOLT)
    return made


def test_nothing_of_the_content_is_in_the_store(store: Attacked, victim: Victim) -> None:
    held = store.all_bytes()
    assert len(held) > 4 * NBYTES
    assert b"secret" not in held
    assert all(victim.get(key) for key in (A, B, OF_ACME, OF_BOLT))


def test_a_plain_value_under_a_right_checksum_is_not_loaded(store: Attacked, victim: Victim) -> None:
    for codec in ("none", "zstd"):
        store.write(A, enveloped(A, b"evil" * (NBYTES // 4), codec))
        assert victim.refusal(A) == "unsealed"
        assert not store.has(A), "it is deleted"
        victim.put(A)
    assert victim.get(A)


def test_made_up_sealed_bytes_are_not_loaded(store: Attacked, victim: Victim) -> None:
    good = store.read(A)[HEADER:]
    for forged in (
        os.urandom(len(good)),
        good[:HEAD_BYTES] + os.urandom(len(good) - HEAD_BYTES),
        good[:HEAD_BYTES] + bytes(len(good) - HEAD_BYTES),
        good[:-1] + bytes([good[-1] ^ 1]),
        good[:4] + bytes([3 - good[4]]) + good[5:],  # the other cipher
        good[:5] + b"\x01" + good[6:],  # claims to be packed
    ):
        store.write(A, enveloped(A, forged))
        assert victim.refusal(A) == "forged"
    assert victim.get(B)


def test_swapped_and_replayed_values_are_not_loaded(store: Attacked, victim: Victim) -> None:
    one, two = store.read(A), store.read(B)
    store.write(A, two)  # as it is: the checksum notices
    assert victim.refusal(A) == "corrupt"
    for at, value in ((A, two), (B, one)):
        store.write(at, enveloped(at, value[HEADER:]))
        assert victim.refusal(at) == "forged"
    other = key_of(77)
    store.write(other, enveloped(other, one[HEADER:]))
    assert victim.refusal(other) == "forged"


def test_a_truncated_value_is_not_loaded(store: Attacked, victim: Victim) -> None:
    good = store.read(A)
    for kept in (HEADER + 5000, len(good) - 1, HEADER + HEAD_BYTES, HEADER):
        store.write(A, good[:kept])
        assert victim.refusal(A) == "corrupt"
        store.write(A, enveloped(A, good[HEADER:kept]))
        assert victim.refusal(A) == "forged"


def test_tenants_and_layouts_do_not_mix(store: Attacked, victim: Victim) -> None:
    theirs = store.read(OF_ACME)[HEADER:]
    for at in (OF_BOLT, A):
        store.write(at, enveloped(at, theirs))
        assert victim.refusal(at) == "no_key"
        assert store.has(at), "another node's, for all that this one knows"
    store.write(A, enveloped(A, store.read(B)[HEADER:], layout=bytes(16)))
    assert victim.refusal(A) == "forged"
    store.write(B, enveloped(B, store.read(B)[HEADER:], layout=bytes(16)))
    assert victim.refusal(B) == "forged", "the layout is sealed, too"
    assert victim.get(OF_ACME)


def test_an_earlier_value_of_the_same_name_is_the_same_content(store: Attacked, victim: Victim) -> None:
    before = store.read(A)
    victim.put(A)
    assert store.read(A) != before
    store.write(A, before)
    assert victim.get(A)


def test_generations_do_not_mix(store: Attacked, victim: Victim, keyrings: Keyrings) -> None:
    old = store.read(A)[HEADER:]
    keyrings.run("rotate")
    assert victim.get(A)
    assert victim.store.stale == {A}, "it is written again"
    victim.put(A)
    new = store.read(A)[HEADER:]
    assert (old[8], new[8]) == (1, 2)
    keyrings.run("rotate", "--drop-old")
    store.write(A, enveloped(A, old))
    assert victim.refusal(A) == "no_key"
    store.write(A, enveloped(A, old[:8] + new[8:20] + old[20:]))  # it claims the generation and key of now
    assert victim.refusal(A) == "forged"


def test_a_stolen_key_of_a_tenant_loses_that_tenant_alone(store: Attacked, victim: Victim, keyrings: Keyrings) -> None:
    stolen = victim.codec._keys.now().of("acme")[0]
    loot = bytearray(NBYTES)
    unseal(
        stolen,
        ValueName(OF_ACME, LAYOUT, "acme"),
        memoryview(store.read(OF_ACME)[HEADER:]),
        memoryview(loot),
        object_bytes=NBYTES,
    )
    assert bytes(loot) == content(OF_ACME), "it reads the tenant's values"
    evil = memoryview(content(OF_ACME))
    for at, tenant in ((OF_BOLT, "bolt"), (A, ""), (B, "")):
        with pytest.raises(ValueRefused):
            unseal(
                stolen,
                ValueName(at, LAYOUT, tenant),
                memoryview(store.read(at)[HEADER:]),
                memoryview(loot),
                object_bytes=NBYTES,
            )
        for named in ("acme", tenant):
            forged = seal(stolen, ValueName(at, LAYOUT, named), evil, cipher=1, packing=0, object_bytes=NBYTES)
            store.write(at, enveloped(at, bytes(forged)))
            assert victim.refusal(at) == "no_key"
    keyrings.run("rotate", "--tenant", "acme")
    keyrings.run("rotate", "--tenant", "acme", "--drop-old")
    assert victim.refusal(OF_ACME) == "no_key", "after a rotation without the old key the thief has nothing new"


def test_no_byte_of_a_destroyed_tenant_can_be_read(store: Attacked, victim: Victim, keyrings: Keyrings) -> None:
    """The attacker has the store, the keyring's file as it is now, the root key, and all that a server derives."""
    sealed = store.read(OF_ACME)[HEADER:]
    keyrings.run("destroy", "--tenant", "acme", "--yes", "--no-server")
    assert victim.refusal(OF_ACME) == "no_key", "at once, in a server that runs"
    assert store.read(OF_ACME)[HEADER:] == sealed
    codec = keyrings.codec()
    ring = read_keyring(keyrings.folder / "keyring.json")
    root = read_root(codec._keys._options, ring.root)
    secrets = [root, *(s for of in ring.unlocked(root)._secrets.values() for s in of.values())]
    assert {each.tenant for each in ring.secrets} == {DEPLOYMENT, "bolt"}
    loot = bytearray(NBYTES)
    for secret in secrets:
        for tenant in ("acme", "bolt", ""):
            for generation in range(5):
                key = DataKey.derive(secret, tenant, generation)
                for named in (tenant, "acme"):
                    with pytest.raises(ValueRefused):
                        unseal(
                            key,
                            ValueName(OF_ACME, LAYOUT, named),
                            memoryview(sealed),
                            memoryview(loot),
                            object_bytes=NBYTES,
                        )
    assert content(OF_ACME)[:32] not in store.all_bytes()
    assert victim.get(A), "what is the deployment's stays"
    assert victim.get(OF_BOLT)


def test_a_server_without_keys_writes_and_reads_nothing(store: Attacked, tmp_path: Path) -> None:
    script = tmp_path / "root.sh"
    script.write_text(f"#!/bin/sh\n[ -e {tmp_path}/denied ] && exit 1\nprintf %064d 7\n")
    script.chmod(0o700)
    keyrings = Keyrings(tmp_path, key_command=[str(script)])
    keyrings.run("rotate")
    (tmp_path / "denied").touch()
    victim, new = Victim(store, keyrings), key_of(91)
    with pytest.raises(OSError, match="codec aead"):
        victim.store.put([new], [memoryview(content(new))])
    assert not store.has(new), "no plain value was written instead"
    assert b"secret" not in store.all_bytes()
