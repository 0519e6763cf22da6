"""`kvframework plugins`: the installed plugins, the options of each, and why one is unavailable."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from kvframework.api.command import examples
from kvframework.cli.commands import CommandGroup
from kvframework.cli.usage import AsJson

if TYPE_CHECKING:
    from kvframework.errors import PluginNotFound
    from kvframework.registry import PluginRegistry


class PluginsGroup(CommandGroup):
    """The core's commands about plugins, followed by those of other distributions."""

    prefix = "plugins."


_app = typer.Typer(cls=PluginsGroup, help="List, describe and check plugins.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(_app, name="plugins")


@_app.command("list", epilog=examples("kvframework plugins list", "kvframework plugins list --json"))
def list_plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """List every installed plugin, with the reason if it cannot be used here."""
    from kvframework.cli.console import print_document
    from kvframework.cli.plugin_view import plugin_rows, show_plugins
    from kvframework.registry import PluginRegistry

    with _quiet_imports():
        rows = plugin_rows(PluginRegistry().list(probe=True))
    if as_json:
        print_document(rows)
    else:
        show_plugins(rows)


@_app.command(
    "info", epilog=examples("kvframework plugins info tier.redis", "kvframework plugins info layout.paged --json")
)
def info(
    plugin: Annotated[str, typer.Argument(metavar="KIND.NAME", help="As `plugins list` shows it.")],
    as_json: AsJson = False,
) -> None:
    """Describe one plugin: its purpose, whether it can be used here, and the options of its table in the TOML."""
    from kvframework.cli.console import print_document
    from kvframework.cli.plugin_view import PluginView, show_plugin
    from kvframework.registry import PluginRegistry

    kind, dot, name = plugin.partition(".")
    registry = PluginRegistry()
    if not dot:
        raise _no_name(plugin, registry)
    with _quiet_imports():
        view = PluginView.of(*registry.describe(kind, name))
    if as_json:
        print_document(view)
    else:
        show_plugin(view)


def _no_name(plugin: str, registry: PluginRegistry) -> PluginNotFound:
    from kvframework.errors import PluginNotFound
    from kvframework.registry import KINDS

    meant = [f"{kind}.{plugin}" for kind in KINDS if plugin in registry.names(kind)]
    return PluginNotFound(
        f"{plugin!r} is not of the form KIND.NAME",
        available=f"the kinds {', '.join(KINDS)}",
        hint=f"did you mean {' or '.join(meant)}?" if meant else "`kvframework plugins list` shows the names",
    )


@contextlib.contextmanager
def _quiet_imports() -> Iterator[None]:
    """Redirect output of plugins that are imported within the block, which must not end up in the JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
