"""The kinds of plugins and their names; the plugins of installed distributions, from their metadata alone, and whether
they fit this release. Imports no plugin."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from operator import eq, ge, gt, le, lt, ne
from typing import Any, NamedTuple

import kvframework
from kvframework.api.codec import MAX_CODEC_NAME, CodecProvider
from kvframework.api.driver import DeviceTransportProvider
from kvframework.api.eviction import EvictionProvider
from kvframework.api.hasher import HasherProvider
from kvframework.api.layout import LayoutProvider
from kvframework.api.listener import ListenerProvider
from kvframework.api.memory import MemoryProvider
from kvframework.api.plugin import API_VERSION, ENTRY_POINT_GROUP, Provider
from kvframework.api.requests import RequestsProvider
from kvframework.api.tier import TierProvider
from kvframework.api.transport import TransportProvider
from kvframework.errors import PluginBroken, PluginWrongApi


class Kind(NamedTuple):
    hook: str
    providers: tuple[type[Provider[Any]], ...]


KINDS: dict[str, Kind] = {
    "transport": Kind("kvf_transports", (TransportProvider, DeviceTransportProvider)),
    "layout": Kind("kvf_layouts", (LayoutProvider,)),
    "memory": Kind("kvf_memories", (MemoryProvider,)),
    "tier": Kind("kvf_tiers", (TierProvider,)),
    "eviction": Kind("kvf_eviction_policies", (EvictionProvider,)),
    "hasher": Kind("kvf_key_hashers", (HasherProvider,)),
    "codec": Kind("kvf_codecs", (CodecProvider,)),
    "requests": Kind("kvf_request_handlers", (RequestsProvider,)),
    "listener": Kind("kvf_listeners", (ListenerProvider,)),
}


MAX_NAME = 32
_WORDS = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
# The bounds of the kinds that have one of their own: each value in L2 carries the name of its codec.
_LONGEST = {"codec": MAX_CODEC_NAME}
# Words that mean something else wherever the name of such a plugin is written.
_RESERVED = {
    ("codec", "allow"): "`allow` is a key of [codecs], beside the tables [codecs.NAME]",
    ("transport", "auto"): "`auto` lets an engine choose among the server's transports",
}


class NameFault(NamedTuple):
    """Why a plugin cannot have a name, which names there may be, and the nearest of them, "" for none."""

    fact: str
    available: str
    nearest: str


def name_fault(kind: str, name: str) -> NameFault | None:
    """Return why a plugin of a kind cannot have a name, or None. `kind` need not exist."""
    longest = _LONGEST.get(kind, MAX_NAME)
    available = f"lower-case letters, digits and single underscores between them, at most {longest}"
    if reason := _RESERVED.get((kind, name)):
        return NameFault(f"{name!r} cannot be the name of a {kind}: {reason}", available, f"{name}_{kind}")
    if _WORDS.fullmatch(name) and len(name) <= longest:
        return None
    fact = f"{name!r} cannot be the name of a {kind}"
    if len(name) > longest:
        fact += f": it has {len(name)} characters"
    return NameFault(fact, available, _nearest(name, longest))


def _nearest(name: str, longest: int) -> str:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip()).lower().removeprefix("kvf-").removeprefix("kvf_")
    tried = re.sub(r"[^a-z0-9]+", "_", spaced).strip("_")[:longest].rstrip("_")
    return tried if _WORDS.fullmatch(tried) else ""


# Plugins of this project that are distributions of their own, by their entry points.
FIRST_PARTY = {
    "listener.events": "kvframework-events",
    "requests.blend": "kvframework-blend",
    "tier.filesystem": "kvframework-filesystem",
    "tier.mooncake": "kvframework-mooncake",
    "tier.peers": "kvframework-peers",
    "tier.redis": "kvframework-redis",
    "tier.s3": "kvframework-s3",
    "transport.cuda_ipc": "kvframework-cuda",
}
_GROUP = re.compile(re.escape(ENTRY_POINT_GROUP.rpartition(".v")[0]) + r"\.v(\d+)")


@dataclass(frozen=True)
class EntryPointInfo:
    """One offer of one provider, by one distribution. `value` names a module or an object in one. An entry point is
    called `<kind>.<name>`; one without a dot has the kind "". `api_major` comes from the group."""

    kind: str
    name: str
    distribution: str
    version: str
    value: str
    api_major: int = API_VERSION[0]

    @property
    def title(self) -> str:
        """The entry point's own name."""
        return f"{self.kind}.{self.name}" if self.kind else self.name

    @property
    def origin(self) -> str:
        """The distribution and version, for error texts."""
        return f"{self.distribution} {self.version}".strip()

    def __str__(self) -> str:
        return f"{self.title} ({self.value}) of {self.origin}"


def discover() -> list[EntryPointInfo]:
    """All offers on `sys.path`, those for other API majors too, sorted by kind, name and distribution. Blocking: reads
    metadata files."""
    installed = metadata.entry_points()
    offers = {
        _info(entry_point, int(match[1]))
        for group in installed.groups
        if (match := _GROUP.fullmatch(group))
        for entry_point in installed.select(group=group)
    }
    return sorted(offers, key=lambda offer: (offer.kind, offer.name, offer.distribution, offer.value))


def _info(entry_point: metadata.EntryPoint, api_major: int) -> EntryPointInfo:
    kind, dot, name = entry_point.name.partition(".")
    if not dot:
        kind, name = "", entry_point.name
    distribution = entry_point.dist
    origin = (distribution.name, distribution.version) if distribution else ("unknown", "")
    return EntryPointInfo(kind, name, *origin, entry_point.value, api_major)


_OURS = "kvframework"
_OTHER_RELEASE = "install a release of the plugin for this kvframework, or another kvframework"
# A requirement with a marker, such as that of an extra, is not judged, nor one of a distribution with a longer name.
_REQUIREMENT = re.compile(rf"{_OURS}(?![\w.-])\s*(?:\[[^]]*\])?\s*\(?([^;()]*)\)?\s*", re.IGNORECASE)
_COMPARE = {"==": eq, "!=": ne, ">=": ge, "~=": ge, "<=": le, ">": gt, "<": lt}
_RELEASE = re.compile(r"\d+(?:\.\d+)*")
_CLAUSE = re.compile(r"\s*(~=|==|!=|<=|>=|<|>)\s*v?(\d+(?:\.\d+)*)(\.\*)?(\S*)\s*")


def check_major(major: int, title: str) -> None:
    """Raises `PluginWrongApi` if an entry point is in the group of another major."""
    if major != API_VERSION[0]:
        raise _wrong_api(title, str(major))


def check_requires(requires_api: object, title: str) -> None:
    """Raises `PluginWrongApi` if a provider needs more than this version offers, `PluginBroken` for a malformed
    version."""
    if not isinstance(requires_api, str) or not (match := re.fullmatch(r"(\d+)\.(\d+)", requires_api)):
        raise PluginBroken(f"{title}: requires_api is {requires_api!r}", available='a version such as "1.0"')
    major, minor = int(match[1]), int(match[2])
    if major != API_VERSION[0] or minor > API_VERSION[1]:
        raise _wrong_api(title, requires_api)


def _wrong_api(title: str, version: str) -> PluginWrongApi:
    return PluginWrongApi(
        f"{title} is written for plugin API version {version}",
        available=f"plugin API {'.'.join(map(str, API_VERSION))}",
        hint=_OTHER_RELEASE,
    )


def release_wanted(distribution: str) -> str:
    """Return the range of kvframework's releases that an installed distribution asks for, if this release is not in
    it, else "". Blocking: reads a metadata file."""
    if distribution == _OURS:
        return ""
    try:
        requirements = metadata.requires(distribution) or ()
    except metadata.PackageNotFoundError:
        return ""
    ranges = [match[1].strip() for each in requirements if (match := _REQUIREMENT.fullmatch(each.strip()))]
    return next((each for each in ranges if not _admits(each, kvframework.__version__)), "")


def check_release(distribution: str, title: str) -> None:
    """Raises `PluginWrongApi` for a plugin whose distribution asks for another release. pip installs none; a later
    change of kvframework, or `--no-deps`, leads to it. Blocking."""
    if wanted := release_wanted(distribution):
        raise PluginWrongApi(
            f"{title} needs {_OURS} {wanted}", available=f"{_OURS} {kvframework.__version__}", hint=_OTHER_RELEASE
        )


def _admits(wanted: str, present: str) -> bool:
    """Whether a range has a version. A development version counts as its release; what is no plain clause admits all:
    pip judges more exactly, at each installation."""
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
