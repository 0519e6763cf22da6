"""Installed plugins that cannot be used: broken, of another kind, for another API. Each is named and harms no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvframework.errors import PluginBroken, PluginWrongApi, PluginWrongKind
from kvframework.registry.registry import PluginRegistry
from tests.core.registry.fake_distributions import HOOKS, codec_module, info, install, marking


def with_field(field: str, before: str = "") -> str:
    """A module whose provider has this field, of names that `before` defines."""
    provider = f"CodecProvider(name='bad', summary='', create=print, {field})"
    return f"{HOOKS}{before}@hookimpl\ndef kvf_codecs():\n    return [{provider}]"


BROKEN = {
    "import error": (
        "import no_such_module_anywhere",
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'",
    ),
    "exit at import": ("import sys\nsys.exit(3)", "SystemExit: 3"),
    "syntax": ("def f(:", "SyntaxError"),
    "misspelt hook": (codec_module("bad", extra="@hookimpl\ndef kvf_codec(): return []\n"), "kvf_codec"),
    "hook with an argument": (f"{HOOKS}@hookimpl\ndef kvf_codecs(config): return []", "config"),
    "no hookimpl": ("def kvf_codecs(): return []", "does not implement kvf_codecs"),
    "raising hook": (f"{HOOKS}@hookimpl\ndef kvf_codecs(): raise OSError('no luck')", "OSError: no luck"),
    "exiting hook": (f"{HOOKS}@hookimpl\ndef kvf_codecs(): raise SystemExit", "SystemExit"),
    "no list": (f"{HOOKS}@hookimpl\ndef kvf_codecs(): return 'bad'", "returned str"),
    "no provider": (f"{HOOKS}@hookimpl\ndef kvf_codecs(): return [1]", "a list with int"),
    "nothing": (f"{HOOKS}@hookimpl\ndef kvf_codecs(): return None", "returned 0 providers named 'bad'"),
    "too long a codec's name": (codec_module("bad", "n" * 17), "is too long"),
    "another name": (codec_module("good"), "returned 0 providers named 'bad'"),
    "twice the name": (codec_module("bad", "bad"), "returned 2 providers named 'bad'"),
    "class instead of provider": (f"{HOOKS}@hookimpl\ndef kvf_codecs(): return [CodecProvider]", "a list with type"),
    "options that are none": (with_field("options=dict"), "options"),
    "options that name nothing": (
        with_field(
            "options=Mine",
            "from kvframework.api.plugin import Options\nclass Mine(Options, frozen=True):\n    size: 'Nowhere'\n",
        ),
        "name 'Nowhere' is not defined",
    ),
    "nonsense requires_api": (with_field("requires_api='new'"), "requires_api is 'new'"),
    "raising probe": (
        with_field("probe=probe", "def probe(): raise ValueError('oops')\n"),
        "its probe failed with ValueError: oops",
    ),
    "probe of another type": (with_field("probe=lambda: True"), "found bool"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_named_and_harms_no_other(site: Path, case: str) -> None:
    source, text = BROKEN[case]
    install(site, "acme", {"codec.bad": "acme_bad"}, {"acme_bad": source})
    install(site, "bolt", {"codec.fine": "bolt_fine"}, {"bolt_fine": codec_module("fine")})
    registry = PluginRegistry()
    for _ in range(2):  # the second time says the same as the first
        with pytest.raises(PluginBroken) as caught:
            registry.resolve("codec", "bad", where="somewhere")
        assert "codec.bad (acme_bad) of acme 1.0" in caught.value.fact
        assert text in caught.value.fact
        assert caught.value.where == "somewhere"
    assert registry.resolve("codec", "fine").name == "fine"
    assert info(registry, "codec", "bad").status == "broken"
    assert info(registry, "codec", "fine").status == "available"


@pytest.mark.parametrize("value", ["no_such_module", "acme_there:missing", "not a module!"])
def test_an_entry_point_that_leads_nowhere_is_broken(site: Path, value: str) -> None:
    install(site, "acme", {"codec.bad": value}, {"acme_there": ""})
    with pytest.raises(PluginBroken, match="the import failed"):
        PluginRegistry().resolve("codec", "bad")


def test_an_interrupt_from_the_keyboard_passes(site: Path) -> None:
    install(site, "acme", {"codec.bad": "acme_bad"}, {"acme_bad": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        PluginRegistry().resolve("codec", "bad")


def test_a_broken_entry_point_name_shows_in_the_list_only(site: Path) -> None:
    install(site, "acme", {"squeeze": "acme_none", "tire.redis": "acme_none"})
    registry = PluginRegistry()
    assert info(registry, "", "squeeze").status == "broken"
    assert "<kind>.<name>" in info(registry, "", "squeeze", probe=True).reason
    assert info(registry, "tire", "redis").status == "wrong-kind"


WRONG_KIND = {
    "a provider of another kind": (
        f"{HOOKS}@hookimpl\ndef kvf_codecs():\n    return [EvictionProvider(name='odd', summary='', create=print)]",
        "kvf_codecs returned EvictionProvider",
    ),
    "hooks of another kind only": (f"{HOOKS}@hookimpl\ndef kvf_tiers(): return []", "does not implement kvf_codecs"),
}


@pytest.mark.parametrize("case", WRONG_KIND)
def test_a_plugin_of_another_kind_than_its_entry_point_says(site: Path, case: str) -> None:
    source, text = WRONG_KIND[case]
    install(site, "acme", {"codec.odd": "acme_odd"}, {"acme_odd": source})
    registry = PluginRegistry()
    with pytest.raises(PluginWrongKind, match=text):
        registry.resolve("codec", "odd")
    assert info(registry, "codec", "odd").status == "wrong-kind"


@pytest.mark.parametrize("needed", ["1.99", "2.0", "0.9"])
def test_a_plugin_that_needs_another_api(site: Path, needed: str) -> None:
    source = f"""
        from kvframework.api.codec import CodecProvider, hookimpl
        @hookimpl
        def kvf_codecs():
            return [CodecProvider(name="new", summary="", create=print, requires_api="{needed}")]
    """
    install(site, "acme", {"codec.new": "acme_new"}, {"acme_new": source})
    registry = PluginRegistry()
    with pytest.raises(PluginWrongApi, match=f"API version {needed}") as caught:
        registry.resolve("codec", "new")
    assert caught.value.available == "plugin API 1.0"
    assert info(registry, "codec", "new").status == "wrong-api"


def test_another_api_major_is_told_without_an_import(site: Path, tmp_path: Path) -> None:
    marker = tmp_path / "imported"
    install(site, "acme", {"codec.new": "acme_new"}, {"acme_new": marking(marker)}, group="kvframework.v2")
    registry = PluginRegistry()
    with pytest.raises(PluginWrongApi, match="API version 2"):
        registry.resolve("codec", "new")
    assert info(registry, "codec", "new", probe=True).status == "wrong-api"
    assert "new" not in registry.names("codec")
    assert not marker.exists()


def test_a_distribution_may_serve_two_api_majors(site: Path) -> None:
    install(site, "acme", {"codec.both": "acme_two"}, group="kvframework.v2")
    install(site, "acme", {"codec.both": "acme_one"}, {"acme_one": codec_module("both")})
    registry = PluginRegistry()
    assert registry.resolve("codec", "both").name == "both"
    assert info(registry, "codec", "both").status == "available"


@pytest.mark.parametrize(
    ("wanted", "admits"),
    [
        (">=9", False),
        (">=0.3.1", False),
        ("<0.3", False),
        (">0.3", False),
        ("~=0.4.0", False),
        ("~=1.0", False),
        ("==0.2.*", False),
        ("==0.2.0", False),
        ("!=0.3.*", False),
        (">=0.1, <0.3", False),
        ("(>=9)", False),
        ("[torch]>=9", False),
        ("", True),
        ("[torch]", True),
        (">=0.3", True),
        (">=0.3.0.dev0", True),
        (">0.3.0.dev0", True),
        ("~=0.3.0", True),
        ("~=0.1", True),
        ("==0.3.*", True),
        ("==0.3", True),
        ("!=0.2.0", True),
        (">=0.1,<1", True),
        ("<0.3.1", True),
        ("===0.2", True),
        (">=9; extra == 'later'", True),
        (" @ file:///somewhere", True),
    ],
)
@pytest.mark.parametrize("present", ["0.3.0.dev0", "0.3.0", "0.3"])
def test_a_distribution_that_asks_for_another_release(
    site: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, admits: bool, present: str
) -> None:
    monkeypatch.setattr("kvframework.__version__", present)
    marker = site / "imported"
    others = "Requires-Dist: kvframework-bench<10,>=9\nRequires-Dist: kvframework_x<10,>=9\n"
    requires = f"{others}Requires-Dist: kvframework{wanted}\n"
    source = marking(marker) + codec_module("new")
    install(site, "acme", {"codec.new": "acme_new"}, {"acme_new": source}, metadata=requires)
    registry = PluginRegistry()
    if admits:
        assert info(registry, "codec", "new").status == "available"
        assert registry.resolve("codec", "new").name == "new"
        return
    with pytest.raises(PluginWrongApi) as caught:
        registry.resolve("codec", "new", where="[[l2]]")
    assert caught.value.fact.startswith("codec.new (acme_new) of acme 1.0 needs kvframework ")
    assert wanted.removeprefix("[torch]").strip("()") in caught.value.fact
    assert (caught.value.available, caught.value.where) == (f"kvframework {present}", "[[l2]]")
    assert info(registry, "codec", "new").status == "wrong-api"
    assert not marker.exists(), "its code was run"
