"""`kvframework explain`: why requests missed, asked of a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvframework.api.command import Endpoint, EndpointConfig, examples
from kvframework.cli.usage import AsJson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvframework.wire.messages import Finished, RecentReply

DEFAULT_LAST = 5

_EPILOG = examples(
    "kvframework explain                    the last misses",
    "kvframework explain cmpl-8f2a          one request, by the engine's id",
    "kvframework explain --last 3 --all     the last requests, hits too",
    "kvframework explain --json | jq '.records[].reason'",
)


def register(app: typer.Typer) -> None:
    app.command("explain", epilog=_EPILOG)(explain)


def explain(
    request: Annotated[
        str | None, typer.Argument(metavar="[REQUEST_ID]", help="The engine's id of a request that has ended.")
    ] = None,
    last: Annotated[
        int | None, typer.Option("--last", min=1, help=f"The last misses, without it {DEFAULT_LAST}.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Hits, stores and loads, too.")] = False,
    endpoint: Endpoint = None,
    config: EndpointConfig = None,
    timeout: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds to wait for the server.")] = 3.0,
    as_json: AsJson = False,
) -> None:
    """Say what requests found in the cache, and why not more.

    For a request, or the last misses: the tokens asked for, those found in L1 and in L2, the first missing chunk, why
    it was missing, and what to do. The server remembers its last 1024 lookups, stores and loads.
    """
    if request is not None and (last is not None or everything):
        raise typer.BadParameter("name a request, or give --last and --all", param_hint="REQUEST_ID")
    from kvframework.cli.console import print_document
    from kvframework.cli.explain_view import print_explained, print_nothing
    from kvframework.client.status_source import server_endpoint

    reply = _ask(server_endpoint(endpoint, config), request or "", timeout)
    records: Sequence[Finished] = [each for each in reply.records if request or everything or each.reason]
    if not request:
        records = records[-(last or DEFAULT_LAST) :]
    if as_json:
        import msgspec

        head = {"boot_id": reply.boot_id.hex(), "started_at": reply.started_at}
        counts = {"last": reply.last, "forgotten": reply.forgotten}
        print_document({**head, **counts, "records": [msgspec.structs.asdict(each) for each in records]})
    elif records:
        print_explained(records, reply.started_at)
    else:
        print_nothing(reply.last, reply.forgotten, everything=everything)


def _ask(endpoint: str, request: str, timeout: float) -> RecentReply:
    """Return the finished requests. Raises `RequestError` if `request` is not among them, `VersionMismatch` for an
    older server, and what `KVClient` does."""
    from kvframework.client import KVClient
    from kvframework.client.status_source import quiet_connection
    from kvframework.errors import RequestError, UnknownRequest, VersionMismatch
    from kvframework.wire import messages as m

    quiet_connection()
    with KVClient(endpoint, name="explain", connect_timeout_s=timeout) as client:
        _ = client.hello
        try:
            reply = client.request("RECENT", m.Recent(request_id=request), m.RecentReply, timeout=timeout)
        except UnknownRequest:
            raise VersionMismatch(
                "this server is older: it does not remember requests",
                where=client.endpoint,
                hint="install this release beside the server",
            ) from None
    if request and not reply.records:
        raise RequestError(
            f"no finished request has the id {request!r}",
            where=endpoint,
            available=f"{min(reply.last, m.MAX_RECENT)} requests are remembered, {reply.forgotten} are forgotten",
            hint="see their ids with: kvframework explain --all --last 20",
        )
    return reply
