"""What a bug report does not hold, and what stays readable in it."""

from __future__ import annotations

import base64
import json
import time
from urllib.parse import quote, quote_plus

import pytest

from kvframework.masking import Redaction

SECRET = "hunter2+/=ü \"'\\"


@pytest.mark.parametrize(
    "form",
    [
        SECRET,
        SECRET.encode().hex(),
        base64.b64encode(SECRET.encode()).decode(),
        base64.urlsafe_b64encode(SECRET.encode()).decode(),
        # as errors and documents quote it
        repr(SECRET)[1:-1],
        repr(SECRET.encode())[2:-1],
        json.dumps(SECRET)[1:-1],
        json.dumps(SECRET, ensure_ascii=False)[1:-1],
        quote(SECRET),
        quote(SECRET, safe=""),
        quote_plus(SECRET),
    ],
)
def test_a_secret_is_hidden_in_every_form(form: str) -> None:
    shown = Redaction([SECRET]).text(f"the value {form}, refused")
    assert form.rstrip("=") not in shown
    assert shown.startswith("the value ")


def test_a_secret_may_be_no_text() -> None:
    assert Redaction(["pass\udcffword"]).text("the value pass\udcffword") == "the value ***"


@pytest.mark.parametrize(
    "url", ["redis://user:pass@cache.corp:6379/0", "store://:pass@cache.corp", "tcp://pass@cache.corp:1?x=1"]
)
def test_credentials_take_their_host_along(url: str) -> None:
    shown = Redaction().text(f"cannot reach '{url}', later")
    assert "pass" not in shown
    assert "cache.corp" not in shown
    assert shown.endswith("later")


def test_digests_and_tokens_have_names_within_one_report() -> None:
    digest, token = "ab12" * 16, "ghp_16C7e42F292c6912E7"
    redaction = Redaction()
    once, twice = redaction.text(f"key {digest}"), redaction.text(f"again {digest.upper()}")
    assert once.removeprefix("key ") == twice.removeprefix("again ")
    assert digest[:12] not in once
    assert Redaction().text(digest) != redaction.text(digest), "names of two reports cannot be compared"
    assert token not in redaction.text(f"Bearer {token}")
    assert "1234567890" * 3 not in redaction.text("salt " + "1234567890" * 3)


def test_models_get_numbers() -> None:
    redaction = Redaction(models=["acme/secret-model", "tiny"])
    assert redaction.text("loads acme/secret-model, not tinyish.") == "loads <model 1>, not tinyish."
    assert redaction.text("of ('tiny', model=tiny): tiny.") == "of ('<model 2>', model=<model 2>): <model 2>."
    assert redaction.document({"tiny": ["tiny", 3]}) == {"<model 2>": ["<model 2>", 3]}


def test_a_secret_within_the_name_of_a_model_is_hidden() -> None:
    assert Redaction(["hunter2"], ["acme/hunter2-8b"]).text("loads acme/hunter2-8b") == "loads acme/***-8b"
    assert Redaction(["pass word"], ["word"]).text("the pass word, and word: none") == "the ***, and <model 1>: none"


def test_the_time_grows_with_the_text_alone() -> None:
    """Of any number of models, and of a text that could be the beginning of anything."""

    def seconds(models: int, text: str) -> float:
        redaction = Redaction(models=[f"acme/llama-3.1-8b-instruct-{number}" for number in range(models)])
        took = []
        for _ in range(3):
            began = time.thread_time()
            redaction.text(text)
            took.append(time.thread_time() - began)
        return min(took)

    line = "2026-11-22 22:14:19,344 INFO acme/llama-3.1-8b-instruct-7: acme/llama-3.1-8b-instruct-x, stored\n"
    assert seconds(2000, 100 * line) < 20 * seconds(2, 100 * line) + 0.05
    for part in ("a.", "a-", "x://", "://", "aaaaaaaaaaa ", "acme/"):
        assert seconds(2, 8 * 4000 * part) < 8 * 8 * seconds(2, 4000 * part) + 0.05, part


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-22 22:14:19,344 INFO kvframework.server: process 25314, boot ea84a274: L1 16.0 MiB",
        '  File "/usr/lib/python3.11/site-packages/kvframework/messaging/server/loop.py", line 153, in serve_forever',
        "1099511627776 bytes of ipc:///run/user/1000/kvframework/server.sock",
        "ThreadPoolExecutor-0_0, write_through_selective",
    ],
)
def test_the_rest_stays_as_it_is(text: str) -> None:
    assert Redaction(["a", ""]).text(text) == text
