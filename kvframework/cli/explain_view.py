"""The sentences of `kvframework explain`. Pure, but for printing. A client's texts are shown verbatim, never as
markup."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.padding import Padding
from rich.text import Text

from kvframework.api.console import stdout
from kvframework.api.plugin import ByteSize
from kvframework.cli.console import print_text
from kvframework.text import counted, one_line, short_number
from kvframework.wire.messages import Finished

PAGE = "docs/operations.md#why-a-lookup-missed"
_PATHS = {"engine": "copied by the engine", "server": "copied by the server", "wire": "sent over the wire"}
_FIELD_COLUMNS = 10

# What to do, by reason; docs/operations.md says the same at greater length.
ADVICE = {
    "never_stored": "nothing, if the prompt is new; else look whether the engine's stores fail",
    "dropped_full": "raise [l1] capacity, or attach a tier",
    "dropped_share": "raise [server] store_share or pin_share, the max of its tenant, or [l1] capacity",
    "refused": 'nothing, if the eviction policy is right; else use = "lru" in [l1.eviction], which refuses nothing',
    "evicted": "raise [l1] capacity, or attach a tier",
    "other_namespace": "give both engines the same model, weights and layout",
    "other_salt": "nothing, if the prompts must not be shared; else give both the same cache_salt",
    "priced": "nothing: the engine computes it sooner; a faster tier loads more, [server] price = false loads all",
    "tier_down": "see `kvframework status`: it names the tier and its last error",
    "timed_out": "raise the lookup's deadline in the engine, or take a faster tier",
    "damaged": "find who else writes to the tier, or check its disk",
    "cleared": "nothing: an operator cleared the cache",
    "server_started": "nothing: L1 began empty; `kvframework hold`, systemd or a tier keeps it over restarts",
    "unknown_namespace": "look whether the engine's worker is registered: `kvframework status`",
}


def print_explained(records: Sequence[Finished], started_at: float) -> None:
    """Print the records, each with a line of its own facts, and behind them what to do."""
    for number, record in enumerate(records):
        if number:
            print_text("")
        print_text(Text(headline(record), style="bold"))
        for name, sentence in sentences(record, started_at):
            _print_field(name, sentence)


def print_nothing(last: int, forgotten: int, *, everything: bool) -> None:
    what = "no request has finished" if everything else "nothing was missed"
    print_text(f"{what} among the {counted(last - forgotten, 'requests')} that the server remembers")


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
        lines.append(("trace", trace_id(record)))
    if (record.load_s or record.compute_s) and record.reason != "priced":
        loaded, computed = short_number(record.load_s), short_number(record.compute_s)
        lines.append(("prices", f"what was not in L1: {loaded} s to load, {computed} s to compute"))
    if record.missing >= 0 and record.chunk_tokens:
        lines.append(
            ("missing", f"tokens {record.missing} to {record.missing + record.chunk_tokens}, and what follows them")
        )
    if record.reason:
        lines.append(("why", why(record, started_at)))
        lines.append(("do", ADVICE.get(record.reason, "see the page")))
        lines.append(("see", f"{PAGE}, {record.reason}"))
    return lines


def why(record: Finished, started_at: float) -> str:
    """Return the reason as a sentence."""
    at = clock(record.cause_at)
    detail = one_line(record.detail)
    match record.reason:
        case "never_stored":
            text = f"never stored{f' {detail}' if detail else ''} since the server's start at {clock(started_at)}"
            return f"{text}, as far as it remembers"
        case "dropped_full":
            full_of = "what was pinned, being written or guaranteed to others"
            return f"its store at {at} was dropped, as L1 was full of {full_of}"
        case "dropped_share":
            return detail or f"its store at {at} was dropped, as the share of L1 of its client or tenant was in use"
        case "refused":
            return f"its store at {at} was refused by the eviction policy"
        case "evicted":
            by = f", for an object of model {one_line(record.by)}" if record.by else ""
            why = f", {detail}" if detail else ""
            return f"evicted at {at} after {short_number(record.idle_s)} s without a use{by}{why}"
        case "other_namespace":
            return f"stored under another namespace: {detail}"
        case "other_salt":
            return f"stored under another salt: {detail}"
        case "priced":
            return f"cheaper to compute: {detail}"
        case "tier_down":
            return f"a tier did not answer: {detail}"
        case "timed_out":
            return f"too late: {detail}"
        case "damaged":
            return f"its value in a tier was damaged, or of another format, at {at}"
        case "cleared":
            return f"cleared at {at}{f', {detail}' if detail else ''}"
        case "server_started":
            return f"the server started at {clock(started_at)}, with an empty L1, and no tier has it"
        case "unknown_namespace":
            return f"its namespace is not known: {detail}"
    return f"{record.reason} {detail}".strip()


def trace_id(record: Finished) -> str:
    """Return the trace id of a sampled request, by which a collector finds it."""
    return record.trace.split("-")[1]


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
    rest = "; the rest was there" if part and record.outcome == "stored" else ""
    return f"{record.outcome}: {of}{size}{path}{rest}"


def _print_field(name: str, sentence: str) -> None:
    """Print a sentence behind its word. In a pipe it is one line; a terminal's lines keep their indent."""
    text = Text(f"{name:<{_FIELD_COLUMNS - 2}}{sentence}")
    if not stdout.is_terminal:
        print_text(Text.assemble("  ", text))
        return
    head = Text(f"  {name:<{_FIELD_COLUMNS - 2}}")
    lines = Text(sentence).wrap(stdout, max(stdout.width - _FIELD_COLUMNS, 20))
    stdout.print(Text.assemble(head, lines[0]), soft_wrap=False)
    for line in lines[1:]:
        stdout.print(Padding(line, (0, 0, 0, _FIELD_COLUMNS)), soft_wrap=False)
