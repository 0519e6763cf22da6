"""`kvframework crypto`: the keys of sealed values."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvframework.api.command import AsJson, Endpoint, QuickGroup, examples
from kvframework.api.console import print_document, print_text

if TYPE_CHECKING:
    from kvf_crypto import AeadOptions

app = typer.Typer(cls=QuickGroup, help="Show, rotate and destroy the keys of sealed values.", no_args_is_help=True)
CONFIG = typer.Option("--config", envvar="KVFRAMEWORK_CONFIG", help="The server's TOML file, with [codecs.aead].")
Config = Annotated[Path | None, CONFIG]
Tenant = Annotated[str, typer.Option(metavar="NAME", help="A name of [tenants]; default: the deployment.")]


@app.command("status", epilog=examples("kvframework crypto status --config kvf.toml"))
def status(config: Config = None, as_json: AsJson = False) -> None:
    """Show the keyring, and whether the root key opens it.

    Exit status 1: it does not. A key itself is never shown.
    """
    from kvf_crypto.keyring import DEPLOYMENT, read_keyring, shown
    from kvf_crypto.roots import KeyUnavailable, read_root, source_of

    options, path = _options(config)
    keyring, problem = read_keyring(path), ""
    try:
        keyring.unlocked(read_root(options, keyring.root))
    except KeyUnavailable as error:
        problem = str(error)
    tenants = {
        each: [secret.generation for secret in keyring.of(each)]
        for each in sorted({DEPLOYMENT, *(secret.tenant for secret in keyring.secrets)})
    }
    if as_json:
        document: dict[str, Any] = {"keyring": str(path), "root": source_of(options), "problem": problem}
        print_document(document | {"generations": tenants, "destroyed": sorted(keyring.destroyed)})
    else:
        print_text(f"keyring {path}, root key from {source_of(options)}: {problem or 'opened'}")
        for tenant, generations in tenants.items():
            older = f", opens also {', '.join(map(str, generations[1:]))}" if generations[1:] else ""
            print_text(f"{shown(tenant)}: seals with generation {generations[0] if generations else 'none'}{older}")
        for tenant in sorted(keyring.destroyed):
            print_text(f"{shown(tenant)}: destroyed; its values are unreadable, and new ones stay in L1")
    if problem:
        raise typer.Exit(1)


@app.command(
    "rotate",
    epilog=examples(
        "kvframework crypto rotate                      makes the keyring, or the deployment's next key",
        "kvframework crypto rotate --tenant acme        gives the tenant a key, or its next one",
        "kvframework crypto rotate --tenant acme --drop-old",
    ),
)
def rotate(
    tenant: Tenant = "",
    drop_old: Annotated[
        bool, typer.Option("--drop-old", help="Make no key, but drop the older ones: their values become unreadable.")
    ] = False,
    config: Config = None,
) -> None:
    """Make the next key of a tenant or the deployment, and the keyring if there is none.

    Running servers use it from the next value on. Values of older keys stay readable, and are sealed again as they are
    loaded. Copy the keyring to every node.
    """
    from kvf_crypto.keyring import DEPLOYMENT, Keyring, changing, read_keyring, shown, write_keyring
    from kvf_crypto.roots import new_root, read_root

    options, path = _options(config)
    with changing(path):
        if path.exists():
            keyring = read_keyring(path)
            root = read_root(options, keyring.root)
        else:
            root, wrapped = new_root(options)
            keyring = Keyring(root=wrapped).with_next(root, DEPLOYMENT)
            print_text(f"made the keyring {path}")
            if not tenant:
                write_keyring(path, keyring)
                return
        keyring.unlocked(root)
        keyring = keyring.without_old(tenant) if drop_old else keyring.with_next(root, tenant)
        write_keyring(path, keyring)
    kept = [each.generation for each in keyring.of(tenant)]
    print_text(f"{shown(tenant)}: seals with generation {kept[0]}" if kept else f"{shown(tenant)}: has no key")


@app.command("destroy", epilog=examples("kvframework crypto destroy --tenant acme --yes"))
def destroy(
    tenant: Annotated[str, typer.Option(metavar="NAME", help="A name of [tenants].")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    local: Annotated[
        bool, typer.Option("--no-server", help="Change the keyring only, not a running server's L1.")
    ] = False,
    config: Config = None,
    endpoint: Endpoint = None,
) -> None:
    """Destroy all keys of a tenant: its values in every tier become unreadable at once, and it leaves L1.

    What was copied of the keyring before must be destroyed, too. Exit status 1: the running server did not confirm.
    """
    from kvf_crypto.keyring import changing, read_keyring, shown, write_keyring
    from kvframework.client import Forget, StatusSource, quiet_connection, server_endpoint
    from kvframework.errors import KVFrameworkError, RequestError

    if not tenant:
        raise RequestError("no tenant is named", where="--tenant", hint="the deployment's key cannot be destroyed")
    _, path = _options(config)
    if not yes:
        typer.confirm(
            f"Destroy the keys of {shown(tenant)} in {path}? Its values cannot be read ever after", abort=True
        )
    with changing(path):
        write_keyring(path, read_keyring(path).without(tenant))
    print_text(f"{shown(tenant)}: its keys are destroyed")
    if local:
        return
    quiet_connection()
    try:
        with closing(StatusSource(server_endpoint(endpoint, config), 5.0, name="crypto")) as source:
            receipt = source.forget(Forget(tenant), timeout=600.0)
    except KVFrameworkError as error:
        print_text(f"the running server did not delete what it holds of the tenant: {error}")
        raise typer.Exit(1) from None
    for place in receipt.places:
        print_text(
            f"{place.place}: deleted {place.objects} objects, {'unknown' if place.left < 0 else place.left} left"
        )
    if any(place.left > 0 for place in receipt.places if place.place == "L1"):
        raise typer.Exit(1)


def _options(config: Path | None) -> tuple[AeadOptions, Path]:
    from kvf_crypto import AeadOptions
    from kvframework.api.toml import convert, read_toml

    codecs = read_toml(config).get("codecs", {}) if config else {}
    table = codecs.get("aead", {}) if isinstance(codecs, dict) else {}
    options: AeadOptions = convert(
        table if isinstance(table, dict) else {"": table}, AeadOptions, where="[codecs.aead]"
    )
    return options, Path(options.keyring).expanduser()
