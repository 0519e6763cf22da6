"""The plugins that this process can use: from names in a configuration to provider descriptors.

Used at startup; an engine's instances, each in a thread, share a registry. Hooks run here and nowhere later. Only named
plugins are imported, and a plugin's mistake becomes a `PluginError`."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

import msgspec
import pluggy

from kvframework import errors
from kvframework.api import hookspecs
from kvframework.api.installing import install_command
from kvframework.api.plugin import API_VERSION, ENTRY_POINT_GROUP, PROJECT, Options
from kvframework.api.toml import closest, convert
from kvframework.bounded_calls import named_at
from kvframework.registry import plugin_check
from kvframework.registry.discovery import FIRST_PARTY, KINDS, EntryPointInfo, discover

# The distribution of plugins that are registered as objects: who uses one can read its code.
IN_PROCESS = "in-process"
_MORE = "run `kvframework plugins check` for details"


class PluginInfo(msgspec.Struct, frozen=True):
    """One line of `kvframework plugins list`. `status` is available, unavailable, conflict, broken, wrong-api or
    wrong-kind; `reason` says why it is not available."""

    name: str
    kind: str
    distribution: str
    version: str
    status: str
    reason: str


class PluginRegistry:
    """Finds, loads and checks plugins by kind and name; each is imported when it is first resolved.

    `entry_points` None discovers what is installed. `manager` is pluggy's, public so that hook calls can be watched.
    """

    def __init__(self, entry_points: Iterable[EntryPointInfo] | None = None) -> None:
        self.manager = pluggy.PluginManager(PROJECT)
        self.manager.add_hookspecs(hookspecs)
        self._offers = list(discover() if entry_points is None else entry_points)
        self._outcomes: dict[EntryPointInfo, plugin_check.AnyProvider | errors.PluginError] = {}
        # Plugins whose probe found no problem: a serving server probes none of them again.
        self._able: set[EntryPointInfo] = set()

    def register(self, plugin: object, *, distribution: str = IN_PROCESS, version: str = "") -> None:
        """Add a plugin object of this process, with all that its hooks offer. For tests and embedders. Raises
        `PluginBroken` and `PluginWrongKind`, and nothing is added. Errors of a single provider (its name, its API
        version) are raised when that one is resolved."""
        value = f"{getattr(plugin, '__name__', type(plugin).__name__)} at {id(plugin):#x}"
        title = f"{value} of {distribution}"
        if self.manager.is_registered(plugin):
            raise errors.PluginBroken(f"{title}: the plugin is already registered")
        plugin_check.adopt(self.manager, plugin, title)
        outcomes: dict[EntryPointInfo, plugin_check.AnyProvider | errors.PluginError] = {}
        try:
            implemented = plugin_check.hooks_of(self.manager, plugin)
            for kind in (kind for kind in KINDS if KINDS[kind].hook in implemented):
                for provider in plugin_check.offered(self.manager, plugin, kind, title):
                    offer = EntryPointInfo(kind, provider.name, distribution, version, value)
                    outcomes[offer] = self._attempt(offer, plugin)
            if not outcomes:
                hint = "mark a hook with @kvframework.api.plugin.hookimpl"
                raise errors.PluginBroken(f"{title}: the plugin offers nothing", hint=hint)
        except errors.PluginError:
            self.manager.unregister(plugin)
            raise
        self._offers += outcomes
        self._outcomes |= outcomes

    def resolve(self, kind: str, name: str, *, where: str = "") -> plugin_check.AnyProvider:
        """The provider of this kind and name, loaded, checked and probed. Blocking: may import. Raises
        `PluginNotFound`, `PluginConflict`, `PluginBroken`, `PluginWrongKind`, `PluginWrongApi` or `PluginUnavailable`,
        with `where` as the place that named the plugin."""
        hint = ""
        try:
            offer = self.offer(kind, name)
            # The reader of this error is whoever named the plugin; its author reads `plugins check`.
            if offer.distribution != IN_PROCESS:
                hint = f"report the error to the author of {offer.distribution}; {_MORE}"
            with named_at(where):
                provider = self._load(offer)
                if offer not in self._able:
                    reason = plugin_check.probed(provider, str(offer))
                    if reason is not None:
                        raise errors.PluginUnavailable(f"{offer} cannot run on this machine: {reason}")
                    self._able.add(offer)
        except errors.PluginError as error:
            shown = hint if isinstance(error, errors.PluginBroken | errors.PluginWrongKind) and hint else error.hint
            raise type(error)(error.fact, where=where, available=error.available, hint=shown) from error
        return provider

    def options(
        self,
        provider: plugin_check.AnyProvider,
        raw: Mapping[str, object],
        *,
        where: str = "",
        core_keys: tuple[str, ...] = (),
    ) -> Options:
        """`raw` as the plugin's options. Raises `ConfigFieldError`, with `core_keys` too for an unknown key."""
        try:
            options: Options = convert(raw, provider.options, where=where, core_keys=core_keys)
        except errors.ConfigFieldError as error:
            listed = f"`kvframework plugins info {provider.kind}.{provider.name}` lists its options"
            if not error.hint.startswith("did you mean"):
                error.hint = "; ".join(filter(None, (error.hint, listed)))
            raise
        return options

    def create(self, kind: str, name: str, raw: Mapping[str, object], *args: object, where: str) -> Any:
        """What the provider's `create` makes of its options and `args`. Raises as `resolve`, `options` and itself."""
        provider: Any = self.resolve(kind, name, where=where)
        return provider.create(self.options(provider, raw, where=where), *args)

    def names(self, kind: str) -> builtins.list[str]:
        """The names offered of a kind, sorted. Imports nothing."""
        return sorted({offer.name for offer in self._offers if offer.kind == kind and _same_major(offer)})

    def list(self, *, probe: bool = False) -> builtins.list[PluginInfo]:
        """All that is installed or registered, with `probe` imported and probed. A plugin's error is its status."""
        return [self._info(offer, probe) for offer in self._listed()]

    def describe(self, kind: str, name: str) -> tuple[builtins.list[PluginInfo], plugin_check.AnyProvider | None]:
        """Every offer of one plugin, probed, and its descriptor if it could be loaded, whether or not it can run here.
        Blocking: may import it. Raises `PluginNotFound` and `PluginWrongKind` if no distribution offers it."""
        offers = [offer for offer in self._listed() if (offer.kind, offer.name) == (kind, name)]
        if not offers:
            self.offer(kind, name)
        infos = [self._info(offer, probe=True) for offer in offers]
        provider = self._outcomes.get(offers[0])
        return infos, None if isinstance(provider, errors.PluginError) else provider

    def offer(self, kind: str, name: str) -> EntryPointInfo:
        """The distribution's offer of this plugin. Imports nothing. Raises `PluginNotFound`, `PluginConflict`,
        `PluginWrongKind` or `PluginWrongApi`."""
        if kind not in KINDS:
            raise errors.PluginWrongKind(
                f"unknown kind of plugin {kind!r}", available=", ".join(KINDS), hint=closest(kind, KINDS)
            )
        named = [offer for offer in self._listed() if offer.name == name]
        offers = [offer for offer in named if offer.kind == kind]
        ours = [offer for offer in offers if _same_major(offer)]
        if len(ours) > 1:
            raise conflict(ours)
        if ours:
            return ours[0]
        for offer in offers:
            plugin_check.check_major(offer.api_major, str(offer))
        available = ", ".join(self.names(kind)) or f"no plugin of the kind {kind}"
        others = sorted({offer.kind for offer in named if offer.kind})
        if others:
            raise errors.PluginWrongKind(
                f"{name!r} is not a {kind}, but the name of a plugin of another kind: {', '.join(others)}",
                available=available,
            )
        title = f"{kind}.{name}"
        known = [*self.names(kind), *(each.partition(".")[2] for each in FIRST_PARTY if each.startswith(f"{kind}."))]
        hint = closest(name, known) or f"install a distribution that has the entry point {title}"
        if title in FIRST_PARTY:
            hint = install_command(distribution=FIRST_PARTY[title])
        raise errors.PluginNotFound(
            f"no installed distribution offers the {kind} {name!r}", available=available, hint=hint
        )

    def _listed(self) -> builtins.list[EntryPointInfo]:
        """The offers, those for another API only if their distribution has none for this one."""
        served = {(offer.distribution, offer.title) for offer in self._offers if _same_major(offer)}
        return [o for o in self._offers if _same_major(o) or (o.distribution, o.title) not in served]

    def _load(self, offer: EntryPointInfo) -> plugin_check.AnyProvider:
        if offer not in self._outcomes:
            self._outcomes[offer] = self._attempt(offer)
        outcome = self._outcomes[offer]
        if isinstance(outcome, errors.PluginError):
            raise outcome.with_traceback(None)
        return outcome

    def _attempt(
        self, offer: EntryPointInfo, plugin: object | None = None
    ) -> plugin_check.AnyProvider | errors.PluginError:
        title = str(offer)
        try:
            if plugin is None:
                plugin_check.check_release(offer.distribution, title)
                with plugin_check.guarded(title, "the import"):
                    plugin = metadata.EntryPoint(offer.title, offer.value, ENTRY_POINT_GROUP).load()
                plugin_check.adopt(self.manager, plugin, title)
            return plugin_check.pick(self.manager, plugin, offer)
        except errors.PluginError as error:
            return error

    def _info(self, offer: EntryPointInfo, probe: bool) -> PluginInfo:
        status, reason = "available", ""
        try:
            self._check_static(offer)
            if probe or offer in self._outcomes:
                reason = plugin_check.probed(self._load(offer), str(offer)) or ""
                status = "unavailable" if reason else status
        except errors.PluginError as error:
            status, reason = error.code.removeprefix("plugin.").replace("_", "-"), error.fact.removeprefix(f"{offer}: ")
        return PluginInfo(offer.name, offer.kind, offer.distribution, offer.version, status, reason)

    def _check_static(self, offer: EntryPointInfo) -> None:
        """Check an offer without importing it; raise its errors."""
        plugin_check.check_major(offer.api_major, str(offer))
        plugin_check.check_release(offer.distribution, str(offer))
        if not offer.kind:
            raise errors.PluginBroken(f"{offer}: the entry point's name is not of the form <kind>.<name>")
        if offer.kind not in KINDS:
            raise errors.PluginWrongKind(f"{offer}: unknown kind of plugin {offer.kind!r}")
        rivals = [each for each in self._offers if each.title == offer.title and _same_major(each)]
        if len(rivals) > 1:
            raise conflict(rivals)


def _same_major(offer: EntryPointInfo) -> bool:
    return offer.api_major == API_VERSION[0]


def conflict(offers: list[EntryPointInfo]) -> errors.PluginConflict:
    """Return the error for several distributions that offer one plugin."""
    return errors.PluginConflict(
        f"{len(offers)} distributions offer {offers[0].title}: {', '.join(offer.origin for offer in offers)}",
        hint="uninstall all but one of these distributions",
    )
