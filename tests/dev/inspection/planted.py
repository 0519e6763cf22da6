"""Plugins with one planted mistake each: modules, by what is wrong with them, and where it is to be found."""

from __future__ import annotations

import textwrap
from typing import NamedTuple

HEAD = """
import os, time
from typing import Annotated
from msgspec import Meta, field
from kvframework.api.codec import Codec, CodecProvider, hookimpl
from kvframework.api.plugin import NoOptions, Options
from kvframework.api.tier import Tier, TierProvider
from kvframework.api.plugin import NoOptions, Options
from kvframework.api.plugin import hookimpl
"""


class Planted(NamedTuple):
    """A module's source, its entry points by title, and the ids that an inspection of it finds, with their places."""

    source: str
    titles: tuple[str, ...]
    found: dict[str, str]
    deadline_s: float = 20.0


def _module(source: str) -> str:
    return HEAD + textwrap.dedent(source)


CODEC = """
class Good(Codec):
    name = "good"
    def encode(self, data):
        return [data]
    def decode_into(self, packed, out):
        out[:] = packed
"""
TIER = """
class Good(Tier):
    name = "good"
    def contains(self, keys, *, deadline): ...
    def get_into(self, keys, parts, *, deadline): ...
    def put(self, keys, parts, *, deadline): ...
    def delete(self, keys, *, deadline): ...
    def close(self): ...
"""
ONE = """
@hookimpl
def kvf_codecs():
    return [CodecProvider(name='one', summary='one', create=lambda options: Good())]
"""

SOUND = _module(CODEC + ONE)

OPTIONS = """
class Silent(Options, frozen=True):
    level: int = 3
class Dated(Options, frozen=True):
    since: Annotated[dict[str, int | None], Meta(description="days")] = field(default_factory=lambda: {"a": None})
class Odd(Options, frozen=True):
    since: Annotated[object, Meta(description="an object")] = None
class Bounded(Options, frozen=True):
    level: Annotated[int, Meta(description="a level", ge=1)] = 0
class Named(Options, frozen=True):
    use: Annotated[str, Meta(description="it never comes")] = ""
def no_parameters():
    return Good()
def raises(options):
    return {}["missing"]
def forks(options):
    if not os.fork():
        return Good()
    os.wait()
    return Good()
async def later(options):
    return Good()
@hookimpl
def kvf_codecs():
    def good(name, **fields):
        return CodecProvider(**({"name": name, "summary": name, "create": lambda options: Good()} | fields))
    return [
        good("good"),
        good("silent", options=Silent),
        good("dated", options=Dated),
        good("odd", options=Odd),
        good("bounded", options=Bounded),
        good("named", options=Named),
        good("mute", summary=""),
        good("probe", probe=lambda: 7),
        good("future", requires_api="1.999"),
        good("no_parameters", create=no_parameters),
        good("raises", create=raises),
        good("forks", create=forks),
        good("later", create=later),
        good("text", create=lambda options: "text"),
        good("hidden"),
    ]
"""
OPTIONS_TITLES = (
    "good",
    "silent",
    "dated",
    "odd",
    "bounded",
    "named",
    "mute",
    "probe",
    "future",
    "no_parameters",
    "raises",
    "forks",
    "later",
    "text",
    "gone",
)

TIERS = """
class Partial(Tier):
    name = "partial"
    def close(self): ...
class Awaited(Good):
    async def delete(self, keys, *, deadline): ...
class Other(Good):
    def put(self, keys, deadline): ...
class Nameless(Good):
    name: str
    @property
    def name(self):
        raise AttributeError("name")
def declared(options, context) -> Partial:
    ...
@hookimpl
def kvf_tiers():
    def good(name, made, **fields):
        create = fields.pop("create", lambda options, context: made())
        return TierProvider(name=name, summary=name, create=create, **fields)
    return [
        good("good", Good, shared=True),
        good("check", Good, check=lambda options, context: {}["missing"]),
        good("partial", Partial, create=Partial),
        good("awaited", Awaited),
        good("other", Other),
        good("nameless", Nameless),
        good("doctor", Good, diagnose=lambda options: []),
    ]
"""

HOOKS = """
@hookimpl
def kvf_codec():
    return []
def kvf_tiers():
    return []
@hookimpl
async def kvf_layouts():
    return []
@hookimpl
def kvf_transports(config):
    return []
@hookimpl
def kvf_eviction_policies(*, config):
    return []
"""

DYING = ONE.replace("Good()", "os._exit(3)")
HANGING = ONE.replace("Good()", "time.sleep(600)")

PLANTED = {
    "planted_options": Planted(
        _module(CODEC + OPTIONS),
        tuple(f"codec.{name}" for name in OPTIONS_TITLES),
        {
            "undocumented-option codec.silent": "Silent.level",
            "wrong-default codec.dated": "Dated.since",
            "unreadable-option codec.odd": "Odd.since",
            "wrong-default codec.bounded": "Bounded.level",
            "reserved-option codec.named": "Named.use",
            "no-summary codec.mute": "",
            "probe-fails codec.probe": "",
            "api-version codec.future": "",
            "wrong-signature codec.no_parameters": "create",
            "create-fails codec.raises": "",
            "create-dies codec.forks": "",
            "async-method codec.later": "create",
            "create-fails codec.text": "",
            "no-entry-point codec.hidden": "",
            "entry-point-name codec.gone": "",
        },
    ),
    "planted_tiers": Planted(
        _module(TIER + TIERS),
        tuple(f"tier.{n}" for n in ("good", "check", "partial", "awaited", "other", "nameless", "doctor")),
        {
            "create-fails tier.check": "",
            "wrong-signature tier.partial": "create",
            "async-method tier.awaited": "Awaited.delete",
            "wrong-signature tier.other": "Other.put",
            "missing-attribute tier.nameless": "Nameless",
            "wrong-signature tier.doctor": "diagnose",
        },
    ),
    "planted_lacking": Planted(
        _module("""
        class Lacking(Codec):
            name = "lacking"
            def encode(self, data):
                return [data]
        @hookimpl
        def kvf_codecs():
            return [CodecProvider(name="lacking", summary="l", create=lambda options: Lacking())]
        """),
        ("codec.lacking",),
        {"missing-method codec.lacking": ""},
    ),
    "planted_hooks": Planted(
        _module(HOOKS),
        ("codec.hooks",),
        {
            "misspelt-hook planted_hooks.kvf_codec": "",
            "unmarked-hook planted_hooks.kvf_tiers": "",
            "async-hook planted_hooks.kvf_layouts": "",
            "hook-arguments planted_hooks.kvf_transports": "",
            "hook-arguments planted_hooks.kvf_eviction_policies": "",
        },
    ),
    "planted_bare": Planted("", ("codec.bare",), {"no-hook planted_bare": ""}),
    "planted_number": Planted(
        _module("@hookimpl\ndef kvf_codecs():\n    return 7\n"), ("codec.number",), {"hook-fails planted_number": ""}
    ),
    "planted_kind": Planted(
        _module(
            TIER + "@hookimpl\ndef kvf_codecs():\n    return [TierProvider(name='x', summary='x', create=print)]\n"
        ),
        ("codec.x",),
        {"wrong-kind planted_kind": ""},
    ),
    "planted_name": Planted(SOUND.replace("'one'", "'allow'"), ("codec.allow",), {"plugin-name codec.allow": ""}),
    "planted_tier_name": Planted(
        _module(
            TIER
            + "@hookimpl\ndef kvf_tiers():\n"
            + "    return [TierProvider(name='My-Store', summary='x', create=lambda options, context: Good())]\n"
        ),
        ("tier.My-Store",),
        {"plugin-name tier.My-Store": ""},
    ),
    "planted_raising": Planted("import nowhere_to_be_found", ("codec.r",), {"import-fails planted_raising": ""}),
    "planted_dying": Planted("import os; os.abort()", ("codec.d",), {"import-dies planted_dying": ""}),
    "planted_hanging": Planted(
        "import time; time.sleep(600)", ("codec.h",), {"import-dies planted_hanging": ""}, deadline_s=1.5
    ),
    "planted_heavy": Planted(SOUND + "import torch", ("codec.one",), {"heavy-import planted_heavy": ""}),
    "planted_slow": Planted(
        SOUND + "import time\nend = time.process_time() + 0.1\nwhile time.process_time() < end: pass",
        ("codec.one",),
        {"heavy-import planted_slow": ""},
    ),
    "planted_eager": Planted(SOUND + "import acme_client", ("codec.one",), {"eager-import planted_eager": ""}),
    "planted_inner": Planted(
        SOUND + "def late():\n    from kvframework.registry import registry\n",
        ("codec.one",),
        {"internal-import planted_inner": "line"},
    ),
    "planted_end": Planted(_module(CODEC + DYING), ("codec.one",), {"create-dies codec.one": ""}),
    "planted_pause": Planted(_module(CODEC + HANGING), ("codec.one",), {"create-dies codec.one": ""}, 3.0),
}
