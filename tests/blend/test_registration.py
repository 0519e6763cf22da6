"""What an instance must say before it may blend, what is refused, and that the engine's registry is the only one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from kvf_blend import messages as b
from kvf_blend.errors import BadRotary, BadSegments, BlendRefused
from kvf_blend.rotary import fingerprint
from kvf_blend.server.instances import Attached
from kvframework import errors
from kvframework.api.layout import KVLayout, LayerGroup
from kvframework.api.plugin import Message
from kvframework.server import Server
from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS
from tests.blend.blend_client import CHUNK, ROTARY, BlendWire, packed, pairs
from tests.core.server.in_process import serving
from tests.support.waiting import wait_until

PROMPT = list(range(40))


@pytest.fixture
def client(server: Server) -> Iterator[BlendWire]:
    with BlendWire(server.endpoint) as connected:
        yield connected


def test_the_parameters_belong_to_the_engines_context(server: Server, client: BlendWire) -> None:
    answer = client.begin()
    assert answer == b.BlendRegistered(fingerprint(ROTARY), CHUNK)
    assert server.service.contexts[1].attached == {"blend": Attached(ROTARY)}
    assert client.call(b.CB_REGISTER_KV_CACHE.name, b.RegisterBlend(1, "tiny", 1, ROTARY)) == answer
    client.call(b.CB_UNREGISTER_KV_CACHE.name, b.UnregisterBlend(1))
    assert server.service.contexts[1].attached == {}
    with pytest.raises(errors.NotRegistered, match="no rotary parameters"):
        client.call(b.CB_UNREGISTER_KV_CACHE.name, b.UnregisterBlend(1))
    with pytest.raises(errors.NotRegistered, match="no rotary parameters"):
        client.look(PROMPT)


def test_they_end_with_the_instance(server: Server, client: BlendWire) -> None:
    client.begin()
    client.call("UNREGISTER_KV_CACHE", m.Unregister(1))
    client.register()
    with pytest.raises(errors.NotRegistered, match="no rotary parameters"):
        client.names(PROMPT, ranges=pairs((0, 20)))


def test_they_end_with_the_client(server: Server, client: BlendWire) -> None:
    with BlendWire(server.endpoint) as other:
        other.begin(2)
        client.look(PROMPT, 2)
    wait_until(lambda: 2 not in server.service.contexts, what="the end of the other client")
    with pytest.raises(errors.NotRegistered):
        client.look(PROMPT, 2)


def test_other_parameters_need_an_end_of_the_first(client: BlendWire) -> None:
    client.begin()
    other = b.RegisterBlend(1, "tiny", 1, msgspec.structs.replace(ROTARY, theta=500000.0))
    with pytest.raises(errors.AlreadyRegistered, match="other rotary parameters"):
        client.call(b.CB_REGISTER_KV_CACHE.name, other)
    client.call(b.CB_UNREGISTER_KV_CACHE.name, b.UnregisterBlend(1))
    assert (
        client.call(b.CB_REGISTER_KV_CACHE.name, other).fingerprint == fingerprint(other.rotary) != fingerprint(ROTARY)
    )


def test_what_stands_before_segments_is_in_the_fingerprint(server: Server, client: BlendWire) -> None:
    alone = client.begin(1).fingerprint
    one, two = (client.begin(at, before=before).fingerprint for at, before in ((2, [7]), (3, [7, 8])))
    assert len({alone, one, two}) == 3
    assert one == fingerprint(ROTARY, packed([7]))
    assert server.service.contexts[2].attached == {"blend": Attached(ROTARY, packed([7]))}
    with pytest.raises(errors.AlreadyRegistered, match="other tokens before its segments"):
        client.call(b.CB_REGISTER_KV_CACHE.name, b.RegisterBlend(2, "tiny", 1, ROTARY))


@pytest.mark.parametrize(
    ("before", "error"),
    [(b"abc", BadSegments), (b"a" * 4 * (b.MAX_BEFORE + 1), errors.InvalidPayload)],
    ids=["odd", "long"],
)
def test_what_cannot_stand_before_segments(
    client: BlendWire, before: bytes, error: type[errors.KVFrameworkError]
) -> None:
    client.register()
    with pytest.raises(error):
        client.call(b.CB_REGISTER_KV_CACHE.name, b.RegisterBlend(1, "tiny", 1, ROTARY, before))
    with pytest.raises(errors.NotRegistered):
        client.look(PROMPT)


@dataclass(frozen=True)
class Wrong:
    name: str
    error: type[errors.KVFrameworkError]
    says: str = ""
    payload: dict[str, Any] = field(default_factory=dict)
    instance: dict[str, Any] = field(default_factory=dict)
    rotary: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    "wrong",
    [
        Wrong("an unregistered instance", errors.NotRegistered, "not registered by this client", {"instance_id": 9}),
        Wrong("another model", errors.NamespaceMismatch, "'tiny', world size 1 as registered", {"model_name": "large"}),
        Wrong("another world size", errors.NamespaceMismatch, "world size 2", {"world_size": 2}),
        Wrong("no style", BadRotary, "style", rotary={"style": "spiral"}),
        Wrong("theta 0", BadRotary, "theta", rotary={"theta": 0.0}),
        Wrong(
            "llama3 without its factors",
            BadRotary,
            "original_max_position",
            rotary={"scaling": "llama3", "factor": 8.0},
        ),
        Wrong("another head size", BadRotary, "head_dim is 6", rotary={"head_dim": 6}),
        Wrong("eight bytes an element", BlendRefused, "dtype float64", instance={"dtype_str": "float64"}),
    ],
    ids=lambda wrong: wrong.name,
)
def test_what_is_refused(client: BlendWire, wrong: Wrong) -> None:
    client.register(**wrong.instance)
    payload = b.RegisterBlend(1, "tiny", 1, msgspec.structs.replace(ROTARY, **wrong.rotary))
    with pytest.raises(wrong.error, match=wrong.says) as caught:
        client.call(b.CB_REGISTER_KV_CACHE.name, msgspec.structs.replace(payload, **wrong.payload))
    assert caught.value.available or caught.value.hint
    with pytest.raises(errors.NotRegistered):
        client.look(PROMPT)


@pytest.mark.parametrize(
    ("group", "says"),
    [
        ({"window": 64}, "a window of 64 tokens"),
        ({"state": True}, "a recurrent state"),
        ({"packing": "amx", "heads": 1, "head_dim": 256, "dtype": "uint8"}, "form 'opaque:amx'"),
        ({"compress_ratio": 4}, "slots of 4 tokens"),
        ({"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn"),
    ],
)
def test_layouts_whose_keys_cannot_be_moved_are_refused(client: BlendWire, group: dict[str, Any], says: str) -> None:
    """Also if only one layer group is so."""
    plain = LayerGroup(2, 16, 2, 4, "float32", axes=("plane", "block", "token", "head", "dim"))
    layout = KVLayout("paged", (plain, msgspec.structs.replace(plain, **group)), 8)
    client.call("REGISTER_KV_CACHE", m.RegisterKvCache(1, "tiny", 1, 0, b"n" * 16, "cpu_gather", layout))
    with pytest.raises(BlendRefused, match=says) as caught:
        client.call(b.CB_REGISTER_KV_CACHE.name, b.RegisterBlend(1, "tiny", 1, ROTARY))
    assert "layer group 1" in caught.value.where


def test_one_latent_plane_is_enough(client: BlendWire) -> None:
    """MLA: heads of one size, rotated behind the latent part."""
    rotary = msgspec.structs.replace(ROTARY, head_dim=8, offset=4)
    assert client.begin(rotary=rotary, use_mla=True).fingerprint == fingerprint(rotary)


def test_missing_parameters_are_no_payload(client: BlendWire) -> None:
    client.register()

    class Without(Message, frozen=True):
        instance_id: int
        model_name: str
        world_size: int

    class Half(Without, frozen=True):
        rotary: dict[str, object]

    for payload in (Without(1, "tiny", 1), Half(1, "tiny", 1, {"style": "half"}), Half(1, "tiny", 1, {"theta": "x"})):
        with pytest.raises(errors.InvalidPayload):
            client.call(b.CB_REGISTER_KV_CACHE.name, payload)


def test_somebody_elses_instance_only_answers_lookups(server: Server, client: BlendWire) -> None:
    client.begin()
    client.pre_compute(PROMPT, ranges=pairs((0, 20)))
    with BlendWire(server.endpoint) as scheduler:
        hits = scheduler.look([9, *PROMPT])
        assert [each.tokens for each in hits.segments] == [20]
        for call in (
            lambda: scheduler.names(PROMPT, ranges=pairs((0, 20))),
            lambda: scheduler.plan(hits),
            lambda: scheduler.final(PROMPT),
            lambda: scheduler.call(b.CB_REGISTER_KV_CACHE.name, b.RegisterBlend(1, "tiny", 1, ROTARY)),
            lambda: scheduler.call(b.CB_UNREGISTER_KV_CACHE.name, b.UnregisterBlend(1)),
        ):
            with pytest.raises(errors.NotRegistered):
                call()


def test_nobody_has_registered(client: BlendWire) -> None:
    for payload, spec in (
        (b.StorePreComputed(1, "r", packed(PROMPT), ranges=pairs((0, 20))), b.CB_STORE_PRE_COMPUTED),
        (b.LookupPreComputed(1, "r", packed(PROMPT)), b.CB_LOOKUP_PRE_COMPUTED),
        (b.RetrievePreComputed(1, "r"), b.CB_RETRIEVE_PRE_COMPUTED),
        (b.StoreFinal(1, "r", packed(PROMPT)), b.CB_STORE_FINAL),
    ):
        with pytest.raises(errors.NotRegistered):
            client.call(spec.name, payload)


def test_nothing_of_it_is_in_the_core() -> None:
    assert [name for name in REQUESTS if "CB_" in name or "." in name] == []
    with serving() as plain, BlendWire(plain.endpoint) as client:
        client.register()
        for spec in b.REQUESTS:
            with pytest.raises(errors.UnknownRequest):
                client.call(spec.name, m.Empty())
