"""The S3 tier without a real server: names, options, what failures are, and how calls end. Real servers are in
tests/s3."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_s3 import Address
from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.api.tier import Node, Outcome, Tier
from kvframework.errors import ConfigFieldError, TierError
from tests.support.s3_peer import Answer, S3Peer
from tests.support.s3_tier import open_s3_tier, write_credentials
from tests.support.shown_errors import all_text
from tests.support.waiting import wait_until

pytest.importorskip("obstore", reason="obstore is not installed")

FOUND, MISSING, STORED, DELETED = Outcome.FOUND, Outcome.MISSING, Outcome.STORED, Outcome.DELETED
FAILED, DAMAGED = Outcome.FAILED, Outcome.DAMAGED
URL = "s3://bucket/tier"
# What a busy machine may add to a deadline of a test; what the tier adds is measured in the benchmark.
GRACE_S = 20.0

KEYS = [bytes([number]) * PACKED_KEY_BYTES for number in range(64)]


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def key() -> bytes:
    return os.urandom(PACKED_KEY_BYTES)


@pytest.fixture
def peer() -> Iterator[S3Peer]:
    with S3Peer() as peer:
        yield peer


@pytest.fixture
def opened(peer: S3Peer) -> Iterator[Callable[..., Tier]]:
    """Makes tiers over the peer, closed when the test ends."""
    tiers: list[Tier] = []

    def opens(**options: object) -> Tier:
        tiers.append(open_s3_tier(peer.endpoint, URL, **{"anonymous": True, **options}))
        return tiers[-1]

    yield opens
    for tier in tiers:
        tier.close()


def get(tier: Tier, keys: list[bytes], nbytes: int, deadline: float | None = None) -> list[int | Outcome]:
    return tier.get_into(keys, [[memoryview(bytearray(nbytes))] for _ in keys], deadline=deadline or soon())


def put(tier: Tier, keys: list[bytes], value: bytes = b"value", deadline: float | None = None) -> list[Outcome]:
    return tier.put(keys, [[memoryview(value)]] * len(keys), deadline=deadline or soon())


# Names


@given(st.binary(min_size=PACKED_KEY_BYTES, max_size=PACKED_KEY_BYTES), st.sampled_from(["", "/", "/a", "/a/b-c.d/"]))
def test_a_name_leads_back_to_its_key_and_nothing_else_does(key: bytes, path: str) -> None:
    address = Address.parse(f"s3://bucket{path}")
    name = address.name_of(key)
    assert name.startswith(address.prefix)
    assert address.key_of(name) == key
    inner = name[len(address.prefix) :]
    for other in (
        f"x{name}",
        f"{name}x",
        name[:-2],
        name.upper() + "G",
        name.replace("/", ""),
        f"{address.prefix}zz/{inner}",
    ):
        assert address.key_of(other) is None


def test_names_are_spread() -> None:
    address = Address.parse(URL)
    assert len({address.name_of(bytes([1] * 71) + bytes([last]))[:8] for last in range(256)}) == 256


def test_keys_of_another_length_are_refused(opened: Callable[..., Tier]) -> None:
    with pytest.raises(ValueError, match="72 bytes"):
        Address.parse(URL).name_of(b"short")


@pytest.mark.parametrize(
    "url",
    [
        *("bucket", "http://host/bucket", "s3://", "s3:///tier", "s3://user:secret@bucket/x", "s3://bucket?secret=1"),
        *(
            "s3://bucket/a b",
            "s3://bucket/../x",
            "s3://bucket/%2e",
            "s3://bucket/#secret",
            "az://account",
            "file:///tmp",
        ),
    ],
)
def test_other_addresses_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ValueError, match="url") as refused:
        Address.parse(url)
    assert "secret" not in str(refused.value)


def test_each_cloud_has_its_address() -> None:
    assert Address.parse("gs://bucket/a/b") == Address("gs", "", "bucket", "a/b/")
    assert Address.parse("az://account/container/a") == Address("az", "account", "container", "a/")
    assert Address.parse("s3://bucket") == Address("s3", "", "bucket", "")
    assert Address.parse("az://account/container").shown() == "az://account/container/"


# Options and credentials


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "gs://bucket", "region": "x"}, "region is for s3"),
        ({"url": "gs://bucket", "profile": "x"}, "profile is for s3"),
        ({"url": "az://account/container", "credentials_file": "x"}, "AZURE_STORAGE"),
        ({"url": "gs://bucket", "anonymous": True}, "disable_oauth"),
        ({"anonymous": True, "profile": "x"}, "anonymous excludes"),
        ({"endpoint": "127.0.0.1:9000"}, "endpoint must be"),
        ({"endpoint": "http://user:hunter2@host"}, "endpoint must be"),
        ({"endpoint": "http://host?x=hunter2"}, "endpoint must be"),
        ({"endpoint": "http://host:notaport"}, "endpoint must be"),
        ({"concurrency": 0}, "concurrency"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises((msgspec.ValidationError, ValueError), match=said) as refused:
        open_s3_tier(**{"endpoint": "http://127.0.0.1:1", "url": URL, **options})  # type: ignore[arg-type]
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no section [default]"),
        ("[default]\naws_access_key_id = hunter2\n", "no aws_access_key_id and aws_secret_access_key"),
        ("aws_access_key_id = hunter2", "lines that are"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_credentials_file_without_credentials_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "credentials"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigFieldError) as refused:
        open_s3_tier("http://127.0.0.1:1", URL, credentials_file=str(file))
    assert said in str(refused.value)
    assert refused.value.where.endswith("credentials_file")
    assert ("let the server's user read the file" in refused.value.hint) == (text is None)
    assert "hunter2" not in all_text(refused.value)


def test_a_file_with_no_certificates_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(ConfigFieldError):
        open_s3_tier("https://127.0.0.1:1", URL, anonymous=True, tls_ca=str(tmp_path / "ca.pem"))
    with pytest.raises(ConfigFieldError, match="cannot be read"):
        open_s3_tier("https://127.0.0.1:1", URL, anonymous=True, tls_ca=str(tmp_path / "none.pem"))


def test_credentials_are_found_in_their_usual_places(
    peer: S3Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables first, then the file of the AWS tools, of which an option names the section."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    file = write_credentials(tmp_path / "credentials", "key-of-default", "hunter2")
    file.write_text(
        file.read_text() + write_credentials(tmp_path / "x", "key-of-other", "hunter2", "other").read_text()
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def used(**options: object) -> str:
        tier = open_s3_tier(peer.endpoint, URL, **options)
        assert put(tier, [key()]) == [STORED]
        tier.close()
        return peer.requests[-1][2].get("authorization", "none").partition("Credential=")[2].partition("/")[0]

    assert used() == "key-of-default"
    assert used(profile="other") == "key-of-other"
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert used() == "key-of-other"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-variables")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    assert used() == "key-of-variables"
    assert used(credentials_file=str(file), profile="default") == "key-of-default"
    assert used(anonymous=True) == ""


def test_the_bytes_are_signed_only_if_asked(peer: S3Peer, tmp_path: Path) -> None:
    file = str(write_credentials(tmp_path / "credentials"))
    for sign, expected in ((False, {"UNSIGNED-PAYLOAD"}), (True, set())):
        tier = open_s3_tier(peer.endpoint, URL, credentials_file=file, sign_payload=sign)
        put(tier, [key()])
        tier.close()
        assert {peer.requests[-1][2]["x-amz-content-sha256"]} & {"UNSIGNED-PAYLOAD"} == expected


# Failures


@pytest.mark.parametrize(
    ("status", "code", "fact", "hint"),
    [
        (403, "SignatureDoesNotMatch", "refuses the secret key", "AWS_ACCESS_KEY_ID"),
        (403, "InvalidAccessKeyId", "the store does not know the access key", "AWS_ACCESS_KEY_ID"),
        (403, "AccessDenied", "refuses the access", "ListBucket"),
        (403, "RequestTimeTooSkewed", "the clocks of the store and of this machine differ", "NTP"),
        (400, "ExpiredToken", "have expired", "renew"),
        (404, "NoSuchBucket", "the bucket does not exist", "create the bucket"),
        (301, "PermanentRedirect", "another endpoint", "region"),
        (400, "AuthorizationHeaderMalformed", "another region", "region"),
        (403, "SomethingNew", "refuses the access (SomethingNew, status 403)", ""),
        (418, "", "refuses the request (status 418)", ""),
    ],
)
def test_what_fails_as_a_whole_is_a_typed_error_with_a_hint(
    peer: S3Peer, opened: Callable[..., Tier], status: int, code: str, fact: str, hint: str
) -> None:
    tier = opened()
    # As of real servers: the answer to HEAD has no body, and a missing bucket looks there as a missing key does.
    peer.script = lambda method, _path: Answer(status, "" if method == "HEAD" else code)
    for call in (
        lambda: tier.contains([key(), key()], deadline=soon()),
        lambda: get(tier, [key()], 10),
        lambda: put(tier, [key()]),
        lambda: tier.delete([key()], deadline=soon()),
        lambda: tier.ping(deadline=soon()),
        lambda: list(tier.scan(deadline=soon())),
    ):
        with pytest.raises(TierError) as failed:
            call()
        assert fact in failed.value.fact
        assert hint in failed.value.hint
        assert failed.value.where == f"[[l2]] #1: s3://bucket/tier/ at {peer.endpoint}"
    peer.script = lambda _method, _path: None
    assert put(tier, KEYS[:3]) == [STORED] * 3


def test_no_error_shows_what_the_store_or_the_environment_says(
    peer: S3Peer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = str(write_credentials(tmp_path / "credentials", "hunter2-key", "hunter2-secret"))
    body = b"<Error><Code>SignatureDoesNotMatch</Code><StringToSign>hunter2-quoted</StringToSign></Error>"
    peer.script = lambda _method, _path: Answer(403, body=body)
    tier = open_s3_tier(peer.endpoint, URL, credentials_file=file)
    with caplog.at_level(logging.DEBUG):
        for call in (lambda: put(tier, [key()]), lambda: tier.ping(deadline=soon())):
            with pytest.raises(TierError) as failed:
                call()
            assert "hunter2" not in all_text(failed.value) + repr(tier) + repr(tier.__dict__)
    assert "hunter2" not in caplog.text
    tier.close()


def test_a_full_store_fails_the_values_and_is_a_problem_until_it_stores_again(
    peer: S3Peer, opened: Callable[..., Tier]
) -> None:
    tier = opened()
    assert put(tier, KEYS[:1]) == [STORED]
    for status, code in ((507, "InsufficientStorage"), (403, "QuotaExceeded"), (400, "EntityTooLarge"), (413, "")):
        peer.script = lambda method, _path, status=status, code=code: (  # type: ignore[misc]
            Answer(status, code) if method == "PUT" else None
        )
        assert put(tier, KEYS[1:4]) == [FAILED] * 3
        assert get(tier, KEYS[:1], 5) == [5]
        (problem,) = tier.problems()
        assert "the store is full" in problem
        assert "bucket" in problem
    peer.script = lambda _method, _path: None
    assert put(tier, KEYS[1:4]) == [STORED] * 3
    assert tier.problems() == []


def test_one_key_that_fails_spoils_no_other(peer: S3Peer, opened: Callable[..., Tier]) -> None:
    tier, bad = opened(), KEYS[3].hex()
    assert put(tier, KEYS[:6]) == [STORED] * 6
    peer.script = lambda _method, path: Answer(403, "AccessDenied") if path.endswith(bad) else None
    mixed = [FOUND, FOUND, FOUND, FAILED, FOUND, FOUND]
    assert tier.contains(KEYS[:6], deadline=soon()) == mixed
    assert get(tier, KEYS[:6], 5) == [FAILED if each is FAILED else 5 for each in mixed]
    assert put(tier, KEYS[:6]) == [FAILED if each is FAILED else STORED for each in mixed]


def test_values_that_are_not_what_they_should_be(peer: S3Peer, opened: Callable[..., Tier]) -> None:
    tier, objects = opened(), peer.buckets["bucket"]
    names = [Address.parse(URL).name_of(each) for each in KEYS[:4]]
    objects[names[0]] = b"g" * 100, 1.0
    objects[names[1]] = b"", 1.0
    objects[names[2]] = b"l" * 101, 1.0
    objects["tier/" + "of strangers"] = b"x", 1.0
    objects[f"tier/00/{KEYS[9].hex()}"] = b"in another folder", 1.0
    objects["tiers/" + names[0][5:]] = b"of another prefix", 1.0
    assert get(tier, KEYS[:4], 100) == [100, 0, DAMAGED, MISSING]
    assert {each.key for each in tier.scan(deadline=soon())} == set(KEYS[:3])
    # A body that is cut off is asked for again, and is no value.
    peer.script = lambda method, _path: Answer(body=b"t" * 60, says=100) if method == "GET" else None
    with pytest.raises(TierError, match="broke"):
        get(tier, KEYS[:1], 100)
    assert len([path for path in peer.asked("GET") if path.endswith(KEYS[0].hex())]) > 2


def test_a_missing_bucket_is_no_empty_one(peer: S3Peer) -> None:
    tier = open_s3_tier(peer.endpoint, "s3://another", anonymous=True)
    for call in (lambda: tier.contains(KEYS[:3], deadline=soon()), lambda: get(tier, KEYS[:3], 5)):
        with pytest.raises(TierError, match="the bucket does not exist"):
            call()
    peer.buckets["another"] = {}
    assert tier.contains(KEYS[:3], deadline=soon()) == [MISSING] * 3
    asked = len(peer.requests)
    assert tier.contains(KEYS[:3], deadline=soon()) == [MISSING] * 3
    assert len(peer.requests) == asked + 3, "a bucket that was seen is asked for again"
    tier.close()


# Deadlines


@pytest.mark.parametrize("kind", ["silent", "drips"])
def test_a_server_that_does_not_end_its_answer_costs_the_deadline(
    peer: S3Peer, opened: Callable[..., Tier], kind: str
) -> None:
    tier, value = opened(), bytearray(100_000)
    assert put(tier, KEYS[:2], b"v" * 1000) == [STORED] * 2
    peer.script = lambda _method, _path: Answer(body=b"d" * 1000, **{kind: True})
    calls: list[Callable[[], object]] = [lambda: get(tier, KEYS[:2], 1000, soon(0.3))]
    if kind == "silent":
        calls += [
            lambda: tier.contains(KEYS[:2], deadline=soon(0.3)),
            lambda: tier.put([KEYS[3]], [[memoryview(value)]], deadline=soon(0.3)),
            lambda: tier.delete(KEYS[:2], deadline=soon(0.3)),
            lambda: tier.ping(deadline=soon(0.3)),
            lambda: list(tier.scan(deadline=soon(0.3))),
        ]
    for call in calls:
        began = time.monotonic()
        with pytest.raises(TierError, match="deadline"):
            call()
        assert 0.25 < time.monotonic() - began < GRACE_S
    value.clear()  # raises if a view of it is left
    peer.script = lambda _method, _path: None
    assert get(tier, KEYS[:2], 1000) == [1000, 1000]


def test_nothing_is_written_after_the_call_has_ended(peer: S3Peer, opened: Callable[..., Tier]) -> None:
    tier, room = opened(), bytearray(1000)
    peer.script = lambda _method, _path: Answer(body=b"d" * 1000, drips=True)
    with pytest.raises(TierError, match="deadline"):
        tier.get_into(KEYS[:1], [[memoryview(room)]], deadline=soon(0.3))
    before = bytes(room)
    sent = len(peer.requests)
    peer.script = lambda _method, _path: None
    put(tier, KEYS[:8])
    assert len(peer.requests) > sent
    assert bytes(room) == before
    room.clear()


def test_an_error_that_obstore_keeps_keeps_no_memory_of_the_caller(
    peer: S3Peer, opened: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads let go of a future a moment after it is done, and an error in it has the frames that it passed."""
    import obstore

    tier, kept = opened(), list[Any]()
    assert put(tier, KEYS[:1], b"v" * 1000) == [STORED]

    def keeping(call: Callable[..., Any]) -> Callable[..., Any]:
        def calls(*arguments: Any, **options: Any) -> Any:
            kept.append(call(*arguments, **options))
            return kept[-1]

        return calls

    class Stream:
        def __init__(self, stream: Any) -> None:
            self.stream = stream
            self.next = keeping(stream.__anext__)

        def __aiter__(self) -> Stream:
            return self

        def __anext__(self) -> Any:
            return self.next()

    class Kept:
        def __init__(self, answer: Any) -> None:
            self.meta = answer.meta
            self.stream = lambda **options: Stream(answer.stream(**options))

    real_get = keeping(obstore.get_async)

    async def get_async(*arguments: Any) -> Kept:
        return Kept(await real_get(*arguments))

    monkeypatch.setattr(obstore, "get_async", get_async)
    monkeypatch.setattr(obstore, "put_async", keeping(obstore.put_async))
    peer.script = lambda method, path: (
        Answer(403, "AccessDenied") if method == "PUT" or path.endswith(KEYS[2].hex()) else None
    )
    rooms = [bytearray(1000) for _ in range(4)]
    parts = [[memoryview(each)] for each in rooms]
    assert tier.get_into(KEYS[:3], parts[:3], deadline=soon()) == [1000, MISSING, FAILED]
    with pytest.raises(TierError):
        tier.put(KEYS[3:4], parts[3:], deadline=soon())
    assert len(kept) >= 5
    del parts
    for each in rooms:
        each.clear()  # raises if a view of it is left


def test_what_was_answered_by_the_deadline_counts(peer: S3Peer, opened: Callable[..., Tier]) -> None:
    """A long prompt's first part is a hit even where the rest did not come in time."""
    tier, late = opened(), {each.hex() for each in KEYS[4:8]}
    assert put(tier, KEYS[:8]) == [STORED] * 8
    peer.script = lambda _method, path: Answer(silent=True) if path[-144:] in late else None
    assert tier.contains(KEYS[:8], deadline=soon(2.0)) == [FOUND] * 4 + [FAILED] * 4
    assert get(tier, KEYS[:8], 5, soon(2.0)) == [5] * 4 + [FAILED] * 4


def test_close_ends_calls_in_flight(peer: S3Peer, opened: Callable[..., Tier]) -> None:
    tier, errors = opened(), list[str]()
    value = bytearray(100_000)
    peer.script = lambda _method, _path: Answer(silent=True)

    def ask(call: Callable[[], object]) -> None:
        try:
            call()
        except TierError as error:
            errors.append(error.fact)

    calls = (
        lambda: tier.contains(KEYS[:20], deadline=soon(100)),
        lambda: tier.put(KEYS[:20], [[memoryview(value)]] * 20, deadline=soon(100)),
    )
    threads = [threading.Thread(target=ask, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    wait_until(lambda: {"HEAD", "PUT"} <= {method for method, _, _ in peer.requests}, what="both calls to be under way")
    tier.close()
    for thread in threads:
        thread.join(60)
    assert errors == ["the tier is closed"] * 2
    value.clear()


def test_it_is_closed_by_several_threads(peer: S3Peer, opened: Callable[..., Tier]) -> None:
    for _ in range(50):
        tier = opened()
        tier.ping(deadline=soon())
        threads = [threading.Thread(target=tier.close) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        gc.collect()  # a coroutine that nobody awaited says so


# Fewer questions


def test_a_lookup_may_stop_at_the_first_gap(peer: S3Peer, opened: Callable[..., Tier]) -> None:
    tier = opened(ask="until_missing", concurrency=4)
    assert put(tier, [*KEYS[:10], KEYS[40]]) == [STORED] * 11
    assert tier.contains(KEYS, deadline=soon()) == [FOUND] * 10 + [MISSING] * 54
    assert len(peer.asked("HEAD")) == 16
    assert tier.contains(KEYS[20:], deadline=soon())[:30] == [MISSING] * 30
    assert len(peer.asked("HEAD")) == 20
    assert tier.contains([], deadline=soon()) == []


def test_what_is_remembered_is_not_asked_for_and_a_stale_hint_is_a_miss(
    peer: S3Peer, opened: Callable[..., Tier]
) -> None:
    tier, other = opened(remember_s=1000), opened()
    assert put(tier, KEYS[:3]) == [STORED] * 3
    assert put(other, KEYS[3:4]) == [STORED]
    assert tier.contains(KEYS[:5], deadline=soon()) == [FOUND] * 4 + [MISSING]
    assert len(peer.asked("HEAD")) == 2
    assert tier.contains(KEYS[:4], deadline=soon()) == [FOUND] * 4
    assert len(peer.asked("HEAD")) == 2
    assert other.delete(KEYS[:2], deadline=soon()) == [DELETED] * 2
    assert tier.contains(KEYS[:2], deadline=soon()) == [FOUND] * 2
    assert get(tier, KEYS[:3], 5) == [MISSING, MISSING, 5]
    assert tier.contains(KEYS[:3], deadline=soon()) == [MISSING, MISSING, FOUND]
    assert tier.delete(KEYS[2:3], deadline=soon()) == [DELETED]
    assert tier.contains(KEYS[:3], deadline=soon()) == [MISSING] * 3


# The sweep


@given(st.dictionaries(st.integers(0, 50), st.integers(1, 1000), max_size=20), st.data())
def test_the_cut_takes_enough_and_no_more_than_it_must(sizes: dict[int, int], data: st.DataObject) -> None:
    from kvf_s3.sweep import cut

    used = Counter(sizes)
    excess = data.draw(st.integers(1, max(used.total(), 1)))
    newest, of_newest = cut(used, excess)
    before = sum(size for step, size in used.items() if step < newest)
    assert before + of_newest == min(excess, used.total())
    assert of_newest <= used[newest]


def test_one_of_two_servers_keeps_the_capacity(peer: S3Peer, opened: Callable[..., Tier]) -> None:
    objects = peer.buckets["bucket"]
    for age, each in enumerate(KEYS[:20]):
        objects[Address.parse(URL).name_of(each)] = b"x" * 1000, 1e9 + age * 60
    objects["tier/of strangers"] = b"s" * 100_000, 1.0
    objects["elsewhere"] = b"s" * 100_000, 1.0
    tiers = [opened(capacity="10kB", sweep_s=1.0) for _ in range(2)]
    tiers[0].ping(deadline=soon())
    assert not [path for path in peer.asked("HEAD") if "sweep" in path], "no server has it: nothing is to be deleted"
    for tier in tiers:
        tier.attach(cast("Node", None))
    left = KEYS[11:20]
    wait_until(lambda: len(objects) == len(left) + 3, what="the oldest to be swept")
    assert {each.key for each in tiers[0].scan(deadline=soon())} == set(left)
    assert {"tier/of strangers", "elsewhere", "tier/kvframework-sweep"} < objects.keys()
    with peer.lock:
        first = objects["tier/kvframework-sweep"][0][:16]
    # It renews the lease, and the other one leaves it to it.
    seen = objects["tier/kvframework-sweep"][0]
    wait_until(lambda: objects["tier/kvframework-sweep"][0] != seen, what="the lease to be renewed")
    assert objects["tier/kvframework-sweep"][0][:16] == first


def test_a_server_whose_peer_is_gone_takes_over(peer: S3Peer, opened: Callable[..., Tier]) -> None:
    objects = peer.buckets["bucket"]
    objects["tier/kvframework-sweep"] = b"of a server that is gone", 1.0
    objects[Address.parse(URL).name_of(KEYS[0])] = b"x" * 1000, 1e9
    tier = opened(capacity="1B", sweep_s=1.0)
    tier.attach(cast("Node", None))
    wait_until(lambda: len(objects) == 1, what="the value to be swept")
    assert objects["tier/kvframework-sweep"][0] != b"of a server that is gone"


def test_a_sweep_that_fails_is_said_once_and_tried_again(
    peer: S3Peer, opened: Callable[..., Tier], caplog: pytest.LogCaptureFixture
) -> None:
    peer.script = lambda method, _path: Answer(403, "AccessDenied") if method == "PUT" else None
    tier = opened(capacity="1B", sweep_s=1.0)
    tier.attach(cast("Node", None))
    wait_until(lambda: len(peer.asked("PUT")) >= 3, what="the sweep to be tried again")
    assert caplog.text.count("deleting the oldest values failed: the store refuses the access (AccessDenied)") == 1
    peer.script = lambda _method, _path: None
    wait_until(lambda: "tier/kvframework-sweep" in peer.buckets["bucket"], what="the lease to be written")


# Other clouds


def test_google_s_store_is_spoken_to(peer: S3Peer, tmp_path: Path) -> None:
    file = tmp_path / "account.json"
    # As emulators want it: no token is fetched.
    file.write_text('{"disable_oauth": true, "client_email": "", "private_key": "", "private_key_id": ""}')
    tier = open_s3_tier(peer.endpoint, "gs://bucket/tier", credentials_file=str(file))
    assert put(tier, KEYS[:3]) == [STORED] * 3
    assert tier.contains(KEYS[:4], deadline=soon()) == [FOUND] * 3 + [MISSING]
    assert get(tier, KEYS[:4], 5) == [5, 5, 5, MISSING]
    assert {each.key for each in tier.scan(deadline=soon())} == set(KEYS[:3])
    assert tier.delete(KEYS[2:4], deadline=soon()) == [DELETED, MISSING]
    tier.close()
