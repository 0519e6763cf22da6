"""What a plugin has to pass: its API version and the release that its distribution asks for, its import, its hooks and
their descriptors, its probe. A plugin's mistake becomes a `PluginError`."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from operator import eq, ge, gt, le, lt, ne
from typing import Any

import msgspec
import pluggy

import kvframework
from kvframework.api.codec import MAX_CODEC_NAME
from kvframework.api.plugin import API_VERSION, Options, Provider
from kvframework.bounded_calls import timed
from kvframework.errors import PluginBroken, PluginError, PluginWrongApi, PluginWrongKind
from kvframework.registry.discovery import KINDS, EntryPointInfo

AnyProvider = Provider[Any]

# Of pluggy's managers, which have none. No code of a plugin runs under it: that may never return.
_registering = threading.Lock()
_OURS = "kvframework"
_OTHER_RELEASE = "install a release of the plugin for this kvframework, or another kvframework"
# A requirement with a marker, such as that of an extra, is not judged, nor one of a distribution with a longer name.
_REQUIREMENT = re.compile(rf"{_OURS}(?![\w.-])\s*(?:\[[^]]*\])?\s*\(?([^;()]*)\)?\s*", re.IGNORECASE)
_COMPARE = {"==": eq, "!=": ne, ">=": ge, "~=": ge, "<=": le, ">": gt, "<": lt}
_RELEASE = re.compile(r"\d+(?:\.\d+)*")
_CLAUSE = re.compile(r"\s*(~=|==|!=|<=|>=|<|>)\s*v?(\d+(?:\.\d+)*)(\.\*)?(\S*)\s*")


def check_major(major: int, title: str) -> None:
    """Raise `PluginWrongApi` if an entry point is in the group of another major."""
    if major != API_VERSION[0]:
        raise _wrong_api(title, str(major))


def check_requires(requires_api: object, title: str) -> None:
    """Raise `PluginWrongApi` if a provider needs more than this version has, `PluginBroken` for a malformed one."""
    if not isinstance(requires_api, str) or not (match := re.fullmatch(r"(\d+)\.(\d+)", requires_api)):
        raise PluginBroken(f"{title}: requires_api is {requires_api!r}", available='a version such as "1.0"')
    major, minor = int(match[1]), int(match[2])
    if major != API_VERSION[0] or minor > API_VERSION[1]:
        raise _wrong_api(title, requires_api)


def _wrong_api(title: str, version: str) -> PluginWrongApi:
    fact = f"{title} is written for plugin API version {version}"
    return PluginWrongApi(fact, available=f"plugin API {'.'.join(map(str, API_VERSION))}", hint=_OTHER_RELEASE)


def release_wanted(distribution: str) -> str:
    """Return the releases that an installed distribution asks for if this is none of them, else "". Blocking."""
    if distribution == _OURS:
        return ""
    try:
        requirements = metadata.requires(distribution) or ()
    except metadata.PackageNotFoundError:
        return ""
    ranges = [match[1].strip() for each in requirements if (match := _REQUIREMENT.fullmatch(each.strip()))]
    return next((each for each in ranges if not _admits(each, kvframework.__version__)), "")


def check_release(distribution: str, title: str) -> None:
    """Raise `PluginWrongApi` for a plugin whose distribution asks for another release. pip installs none; a later
    change of kvframework, or `--no-deps`, leads to it. Blocking."""
    if wanted := release_wanted(distribution):
        raise PluginWrongApi(
            f"{title} needs {_OURS} {wanted}", available=f"{_OURS} {kvframework.__version__}", hint=_OTHER_RELEASE
        )


def _admits(wanted: str, present: str) -> bool:
    """Whether a range has a version. A development version counts as its release; other clauses admit all."""
    return all(_fits(match, present) for clause in wanted.split(",") if (match := _CLAUSE.fullmatch(clause)))


def _fits(clause: re.Match[str], present: str) -> bool:
    operator, text, wildcard, suffix = clause.groups()
    want, have = ([int(each) for each in version.split(".")] for version in (text, _RELEASE.findall(present)[0]))
    if operator == "~=" and have[: len(want) - 1] != want[:-1]:
        return False
    have = have[: len(want)] if wildcard else have
    length = max(len(have), len(want))
    have, want = (each + [0] * (length - len(each)) for each in (have, want))
    # A suffix names a development version of a release, which counts as the release.
    return (have == want and bool(suffix)) or _COMPARE[operator](have, want)


@contextmanager
def guarded(title: str, step: str) -> Iterator[None]:
    """Turn any exception of a plugin's code into `PluginBroken`; only an interrupt from the keyboard passes."""
    try:
        with timed(title, step):
            yield
    except (PluginError, KeyboardInterrupt):
        raise
    except BaseException as error:
        cause = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise PluginBroken(f"{title}: {step} failed with {cause}") from error


def adopt(manager: pluggy.PluginManager, plugin: object, title: str) -> None:
    """Register a plugin and check its hooks, unless it is registered already: a module may have several entry
    points. Raises `PluginBroken`, and the plugin is then not registered."""
    with guarded(title, "its registration"), _registering:
        if manager.is_registered(plugin):
            return
        try:
            manager.register(plugin, name=f"{title} at {id(plugin):#x}")
            manager.check_pending()
        except BaseException:
            if manager.is_registered(plugin):
                manager.unregister(plugin)
            raise


def hooks_of(manager: pluggy.PluginManager, plugin: object) -> set[str]:
    return {caller.name for caller in manager.get_hookcallers(plugin) or ()}


def offered(manager: pluggy.PluginManager, plugin: object, kind: str, title: str) -> list[AnyProvider]:
    """Call the hook of `kind` of one plugin only. Raises `PluginBroken` and `PluginWrongKind`."""
    hook = KINDS[kind].hook
    others = [other for other in manager.get_plugins() if other is not plugin]
    with guarded(title, hook):
        results = manager.subset_hook_caller(hook, others)()
    providers: list[AnyProvider] = []
    for result in results:
        if not isinstance(result, list | tuple):
            raise PluginBroken(f"{title}: {hook} returned {type(result).__name__}", available="a list")
        providers.extend(_checked(provider, kind, title) for provider in result)
    return providers


def pick(manager: pluggy.PluginManager, plugin: object, offer: EntryPointInfo) -> AnyProvider:
    """The one provider that an entry point promises. Raises `PluginBroken`, `PluginWrongKind`, `PluginWrongApi`."""
    title, hook, implemented = str(offer), KINDS[offer.kind].hook, hooks_of(manager, plugin)
    if hook not in implemented:
        error = PluginWrongKind if implemented else PluginBroken
        fact = f"{title}: the plugin does not implement {hook}"
        hint = f"mark {hook} with @kvframework.api.plugin.hookimpl, or rename the entry point"
        raise error(fact, available=", ".join(sorted(implemented)) or "the plugin has no hook", hint=hint)
    providers = offered(manager, plugin, offer.kind, title)
    matching = [provider for provider in providers if provider.name == offer.name]
    if len(matching) != 1:
        raise PluginBroken(
            f"{title}: {hook} returned {len(matching)} providers named {offer.name!r}",
            available=", ".join(sorted(provider.name for provider in providers)) or "no provider",
            hint="name the entry point <kind>.<name>, after its one provider",
        )
    check_requires(matching[0].requires_api, title)
    return matching[0]


def probed(provider: AnyProvider, title: str) -> str | None:
    """The reason why the plugin cannot run here, or None. Raises `PluginBroken`."""
    with guarded(title, "its probe"):
        reason = provider.probe()
        if reason is not None and not isinstance(reason, str):
            raise TypeError(f"expected None or a text, found {type(reason).__name__}")
    return reason


def _checked(provider: object, kind: str, title: str) -> AnyProvider:
    hook, descriptor, _ = KINDS[kind]
    expected = descriptor.__name__
    found = type(provider).__name__
    if not isinstance(provider, Provider):
        raise PluginBroken(f"{title}: {hook} returned a list with {found}", available=expected)
    if not isinstance(provider, descriptor):
        raise PluginWrongKind(f"{title}: {hook} returned {found}", available=expected)
    if not (isinstance(provider.options, type) and issubclass(provider.options, Options)):
        raise PluginBroken(f"{title}: the options of {provider.name!r} are {provider.options!r}", available="Options")
    with guarded(title, f"reading the options of {provider.name!r}"):
        msgspec.msgpack.Decoder(provider.options)  # its annotations may use undefined names
    lacking = [
        field.name
        for field in dataclasses.fields(provider)
        if field.name.startswith("create")
        and field.default is dataclasses.MISSING
        and not callable(getattr(provider, field.name, None))
    ]
    if not isinstance(provider.name, str) or not provider.name or lacking:
        what = " and ".join(lacking) or "create"
        raise PluginBroken(f"{title}: {hook} returned a {found} without a name or {what}()")
    if kind == "codec" and not (provider.name.isascii() and len(provider.name) <= MAX_CODEC_NAME):
        fact = f"{title}: the name of codec {provider.name!r} is too long"
        raise PluginBroken(fact, available=f"at most {MAX_CODEC_NAME} ASCII characters", hint="choose a shorter name")
    return provider
