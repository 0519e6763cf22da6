"""What the doctor tells of a bucket: it answers or not, who else lies there, what bounds it."""

from __future__ import annotations

import pytest

from tests.core.doctor.tables import ask, ask_a_silent_one, levels
from tests.support.ports import free_port
from tests.support.s3_peer import Answer, S3Peer

pytest.importorskip("obstore", reason="obstore is not installed")

URL = "s3://bucket/tier"
REACHED = dict.fromkeys(("plugin.usable", "s3.reachable", "s3.prefix"), "ok")


def test_a_bucket_that_is_bounded_is_ok_and_plain_http_is_warned_of() -> None:
    with S3Peer() as peer:
        found = ask("s3", url=URL, endpoint=peer.endpoint, anonymous=True, capacity="1GiB")
    assert levels(found) == REACHED | {"s3.capacity": "ok", "s3.transport": "warn"}
    assert "1.0 GiB" in found["s3.capacity"].fact
    assert all(method == "GET" for method, _, _ in peer.requests), "the doctor only reads"


def test_strangers_and_a_bucket_without_a_bound_are_warned_of() -> None:
    with S3Peer() as peer:
        peer.buckets["bucket"]["tier/photo.jpg"] = b"x", 1.0
        found = ask("s3", url=URL, endpoint=peer.endpoint, anonymous=True)
    assert found["s3.prefix"].level == found["s3.capacity"].level == "warn"
    assert "1 of the first 1 names" in found["s3.prefix"].fact
    assert "expiration rule" in found["s3.capacity"].advice


@pytest.mark.parametrize(
    ("answer", "fact", "advice"),
    [
        (Answer(403, "SignatureDoesNotMatch"), "refuses the secret key", "AWS_ACCESS_KEY_ID"),
        (Answer(404, "NoSuchBucket"), "the bucket does not exist", "create the bucket"),
        (Answer(404, body=b"404 page not found"), "no bucket answers at the endpoint", "the S3 API"),
        (Answer(403, "RequestTimeTooSkewed"), "the clocks of the store", "NTP"),
    ],
)
def test_a_store_that_refuses_fails_and_says_what_to_do(answer: Answer, fact: str, advice: str) -> None:
    with S3Peer() as peer:
        peer.script = lambda _method, _path: answer
        found = ask("s3", url=URL, endpoint=peer.endpoint, anonymous=True)
    assert levels(found) == {"plugin.usable": "ok", "s3.reachable": "fail"}
    assert fact in found["s3.reachable"].fact
    assert advice in found["s3.reachable"].advice


def test_nobody_at_the_address_fails() -> None:
    found = ask("s3", url=URL, endpoint=f"http://127.0.0.1:{free_port()}", anonymous=True)
    assert found["s3.reachable"].level == "fail"


def test_https_to_a_store_that_speaks_http_says_so() -> None:
    with S3Peer() as peer:
        found = ask("s3", url=URL, endpoint=peer.endpoint.replace("http://", "https://"), anonymous=True)
    assert levels(found) == {"plugin.usable": "ok", "s3.reachable": "fail"}
    assert "endpoint is https://, but the server does not speak TLS" in found["s3.reachable"].fact
    assert "http://" in found["s3.reachable"].advice


def test_a_key_without_its_secret_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    (refused,) = [each for each in ask("s3", url=URL).values() if each.level == "fail"]
    assert "AWS_ACCESS_KEY_ID is set, but AWS_SECRET_ACCESS_KEY is not" in refused.fact


def test_a_silent_store_fails_by_the_deadline() -> None:
    with S3Peer() as peer:
        peer.script = lambda _method, _path: Answer(silent=True)
        found = ask_a_silent_one("s3", "s3.reachable", url=URL, endpoint=peer.endpoint, anonymous=True)
    assert found["s3.reachable"].level == "fail"
    assert "no answer before the deadline" in found["s3.reachable"].fact
