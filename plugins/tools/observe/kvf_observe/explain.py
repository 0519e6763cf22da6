"""`kvframework explain`: why requests missed, asked of a running server. A client's texts are shown verbatim, never as
markup."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated, NamedTuple

import msgspec
import typer
from rich.text import Text

from kvframework.api.command import AsJson, Endpoint, EndpointConfig, examples
from kvframework.api.console import counted, print_document, print_text, short_number
from kvframework.api.listener import Finished
from kvframework.api.plugin import ByteSize
from kvframework.api.process import one_line
from kvframework.client import StatusSource, quiet_connection, server_endpoint
from kvframework.errors import RequestError, UnknownRequest, VersionMismatch

app = typer.Typer()
DEFAULT_LAST = 5
PAGE = "https://github.com/kvframework/kvframework/tree/main/docs/operations.md#why-a-lookup-missed"
_PATHS = {"engine": "copied by the engine", "server": "copied by the server", "wire": "sent over the connection"}


class Answer(NamedTuple):
    """Why a lookup missed, with the facts of `why` in it, and what to do; docs/operations.md says more."""

    sentence: str
    advice: str


ANSWERS = {
    "never_stored": Answer(
        "the tokens were never stored since the server started at {started}, as far as the server remembers{more}",
        "do nothing if the prompt is new; else check whether the engine's stores fail",
    ),
    "dropped_full": Answer(
        "the store at {at} was dropped, because L1 was full of objects in use, or guaranteed to other tenants",
        "raise [l1] capacity, or attach a tier",
    ),
    "dropped_share": Answer(
        "the store at {at} was dropped, because its client or tenant had used up its share of L1",
        "raise [server] store_share or pin_share, the tenant's max, or [l1] capacity",
    ),
    "refused": Answer(
        "the eviction policy refused the store at {at}",
        'do nothing if the policy fits; else set use = "lru" in [l1.eviction], which refuses no store',
    ),
    "evicted": Answer(
        "L1 evicted the tokens at {at} after {idle} s without use{by}{more}", "raise [l1] capacity, or attach a tier"
    ),
    "other_namespace": Answer(
        "the tokens are stored under another namespace: {detail}",
        "give both engines the same model, weights and layout",
    ),
    "other_salt": Answer(
        "the tokens are stored under another salt: {detail}",
        "do nothing if the prompts must not be shared; else give both requests the same cache_salt",
    ),
    "priced": Answer(
        "computing the tokens is faster than loading them: {detail}",
        "do nothing, or use a faster tier; with [server] price = false, the server loads all tokens that a tier has",
    ),
    "bandwidth": Answer("{detail}, and its load would exceed that", "do nothing, or raise the tenant's load_bandwidth"),
    "tier_down": Answer("a tier did not answer: {detail}", "see the tier and its last error in `kvframework status`"),
    "timed_out": Answer(
        "the tiers did not load the tokens in time: {detail}",
        "raise the lookup's deadline in the engine, or use a faster tier",
    ),
    "damaged": Answer(
        "the tier's value was damaged, or of another format, when it was read at {at}",
        "check which other programs write to the tier, and check its disk",
    ),
    "cleared": Answer("the cache was cleared at {at}{more}", "do nothing: the next store fills the cache again"),
    "server_started": Answer(
        "the server started at {started} with an empty L1, and no tier has the tokens",
        "do nothing; to keep KV over restarts, use `kvframework hold`, systemd or a tier",
    ),
    "unknown_namespace": Answer(
        "the server does not know the namespace of the request: {detail}",
        "check in `kvframework status` that the engine's worker is registered",
    ),
}


@app.command(
    epilog=examples(
        "kvframework explain                    the last misses",
        "kvframework explain cmpl-8f2a          one request, by the engine's id",
        "kvframework explain --last 3 --all     the last requests, hits too",
        "kvframework explain --json | jq '.records[].reason'",
    )
)
def explain(
    request: Annotated[
        str, typer.Argument(metavar="[REQUEST_ID]", help="The engine's id of a finished request.", show_default=False)
    ] = "",
    last: Annotated[
        int | None, typer.Option("--last", min=1, help=f"Number of last misses to show; default: {DEFAULT_LAST}.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show hits, stores and loads as well as misses.")] = False,
    endpoint: Endpoint = None,
    config: EndpointConfig = None,
    timeout: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds to wait for the server.")] = 3.0,
    as_json: AsJson = False,
) -> None:
    """Show what requests found in the cache, and why other tokens were missing.

    For a request, or the last misses: the tokens asked for, those found in L1 and in L2, the first missing chunk, why
    it was missing, and what to do. The server remembers its last 1024 lookups, stores and loads.
    """
    if request and (last is not None or everything):
        raise typer.BadParameter("give a request id, or --last and --all, not both", param_hint="REQUEST_ID")
    where = server_endpoint(endpoint, config)
    quiet_connection()
    try:
        with closing(StatusSource(where, timeout, name="explain")) as source:
            reply = source.finished(request_id=request)
    except UnknownRequest:
        raise VersionMismatch(
            "the server is of an older release that does not remember requests",
            where=where,
            hint="install kvframework of this command's release on the server",
        ) from None
    remembered = counted(reply.last - reply.forgotten, "requests")
    if request and not reply.records:
        raise RequestError(
            f"no finished request has the id {request!r}",
            where=where,
            available=f"an id of {remembered} that are remembered; {reply.forgotten} are forgotten",
            hint="list the ids of finished requests with: kvframework explain --all --last 20",
        )
    records: Sequence[Finished] = [each for each in reply.records if request or everything or each.reason]
    if not request:
        records = records[-(last or DEFAULT_LAST) :]
    if as_json:
        head = {"boot_id": reply.boot_id.hex(), "started_at": reply.started_at}
        counts = {"last": reply.last, "forgotten": reply.forgotten}
        print_document({**head, **counts, "records": [msgspec.structs.asdict(each) for each in records]})
    elif records:
        print_explained(records, reply.started_at)
    else:
        what = "no request has finished" if everything else "no lookup missed a token"
        print_text(f"{what} among the {remembered} that the server remembers")


def print_explained(records: Sequence[Finished], started_at: float) -> None:
    """Print the records, each with a line of its own facts, and behind them what to do."""
    for number, record in enumerate(records):
        if number:
            print_text("")
        print_text(Text(headline(record), style="bold"))
        for name, sentence in sentences(record, started_at):
            print_text(f"  {name:<8}{sentence}")


def headline(record: Finished) -> str:
    """Return which request of whom it was, and when."""
    request_id = one_line(record.request_id) or "without an id"
    return f"{clock(record.at)} {record.request} {request_id} of {one_line(record.client)} (process {record.pid})"


def sentences(record: Finished, started_at: float) -> list[tuple[str, str]]:
    """Return what is known of a request: pairs of a word and a sentence. `started_at` is the wall clock's time of the
    server's start."""
    lines = [("found", _found(record))] if record.request == "LOOKUP" else [("moved", _moved(record))]
    if record.model:
        lines.append(("model", f"{one_line(record.model)}, namespace {record.namespace}"))
    if record.tenant:
        lines.append(("tenant", one_line(record.tenant)))
    if record.trace:
        lines.append(("trace", record.trace.split("-")[1]))  # the trace id, by which a collector finds it
    if (record.load_s or record.compute_s) and record.reason != "priced":
        loaded, computed = short_number(record.load_s), short_number(record.compute_s)
        lines.append(("prices", f"tokens that L1 did not have: {loaded} s to load, {computed} s to compute"))
    if record.missing >= 0 and record.chunk_tokens:
        end = record.missing + record.chunk_tokens
        lines.append(("missing", f"tokens {record.missing} to {end}, and all later tokens"))
    if record.reason:
        lines.append(("why", why(record, started_at)))
        lines.append(("do", ANSWERS[record.reason].advice if record.reason in ANSWERS else "read the page below"))
        lines.append(("see", f"{PAGE}, {record.reason}"))
    return lines


def why(record: Finished, started_at: float) -> str:
    """Return the reason as a sentence."""
    detail = one_line(record.detail)
    answer = ANSWERS.get(record.reason)
    if answer is None:
        return f"{record.reason} {detail}".strip()
    if record.reason == "dropped_share" and detail:
        return detail
    return answer.sentence.format(
        at=clock(record.cause_at),
        started=clock(started_at),
        idle=short_number(record.idle_s),
        by=f", for an object of model {one_line(record.by)}" if record.by else "",
        detail=detail,
        more=f"; {detail}" if detail else "",
    )


def clock(wall: float) -> str:
    """Return the local time of day, with its date unless it is today's."""
    then, now = time.localtime(wall), time.localtime()
    return time.strftime("%H:%M:%S" if then[:3] == now[:3] else "%Y-%m-%d %H:%M:%S", then)


def _found(record: Finished) -> str:
    asked, l1, l2 = record.asked_tokens, record.l1_tokens, record.l2_tokens
    missed = asked - l1 - l2
    took = f"in {short_number(record.seconds * 1e3)} ms"
    return f"{l1 + l2} of {counted(asked, 'tokens')} {took}: {l1} in L1, {l2} from L2, {missed} missed"


def _moved(record: Finished) -> str:
    part = f"{record.added_tokens} of " if 0 < record.added_tokens < record.asked_tokens else ""
    of = f"{part}{counted(record.asked_tokens, 'tokens')} in {short_number(record.seconds * 1e3)} ms"
    size = f", {counted(record.objects, 'objects')}, {ByteSize(record.nbytes)}" if record.objects else ""
    path = f", {_PATHS[record.path]}" if record.path in _PATHS else ""
    rest = "; the rest was already stored" if part and record.outcome == "stored" else ""
    return f"{record.outcome}: {of}{size}{path}{rest}"
