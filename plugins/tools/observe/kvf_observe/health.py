"""Liveness and readiness out of the last poll. Pure.

A restart of the server helps when its serving loop does not answer, and in no other case. It is ready if it can serve
what comes; what is wrong around it (a tier, an engine, the log) is a warning, unless the caller requires it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvf_observe.poller import ANSWER_S, Document, Observed

# A poll that is older was made by a thread that has stopped.
FRESH_S = 3 * ANSWER_S


class Check(NamedTuple):
    """A check of readiness. `name` is where in the status document its problems lie, `decides` whether they make the
    server not ready, and `row` is the anchor of the row of docs/operations.md that says what to do."""

    name: str
    decides: bool
    row: str


SERVER = Check("server", True, "server-silent")
CHECKS = (
    SERVER,
    Check("l1", True, "arena-not-resident"),
    Check("messaging.descriptors", True, "descriptors-low"),
    Check("l2", False, "tier-down"),
    Check("instances", False, "copier-ended"),
    Check("messaging.refused", False, "client-refused"),
    Check("losses", False, "server-silent"),
    Check("log", False, "log-not-written"),
    Check("observe", False, "observe-ended"),
    Check("events", False, "events-silent"),
)
_BY_NAME = {check.name: check for check in CHECKS}


class Finding(NamedTuple):
    """The outcome of one check: its facts, none if all is well. `name` has the number of a tier: `l2.0`."""

    name: str
    check: Check
    facts: tuple[str, ...]


class Answer(NamedTuple):
    """Whether the probe passes, and the text of its body."""

    ok: bool
    text: str


def check_of(where: str) -> Check:
    """The check to which a place of a problem belongs; a place of a newer server is a warning."""
    return _BY_NAME.get(where) or _BY_NAME.get(where.partition(".")[0]) or Check(where, False, "")


def findings(observed: Observed, now: float) -> list[Finding]:
    """The outcome of each check, in the order of `CHECKS`; each tier is one. What an unanswered poll leaves unknown is
    absent."""
    silent = why_silent(observed, now) or (observed.error if observed.document is None else "")
    found = [Finding("server", SERVER, (silent,) if silent else ())]
    if observed.document is not None:
        facts = _facts(observed.document)
        found += [Finding(name, check_of(name), tuple(facts[name])) for name in facts]
    return found


def why_silent(observed: Observed, now: float) -> str:
    """Why the serving loop counts as not answering; "" if it answers."""
    if observed.round_trip_s is None:
        return observed.error
    age = now - observed.at
    return f"the server's last answer is {age:.0f} s old" if age > FRESH_S else ""


def livez(observed: Observed, now: float, *, verbose: bool = False) -> Answer:
    """Whether the serving loop answers."""
    silent = why_silent(observed, now)
    if silent:
        return Answer(False, f"[-]loop failed: {_line(silent)}\nlivez check failed\n")
    return Answer(True, "[+]loop ok\nlivez check passed\n" if verbose else "ok\n")


def readyz(
    observed: Observed, now: float, *, verbose: bool = False, exclude: Sequence[str] = (), require: Sequence[str] = ()
) -> Answer:
    """Whether the server can serve. `exclude` names checks that do not count, `require` warnings that do ("all": every
    one); `l2` stands for each `l2.N`."""
    lines, ok = [], True
    found = findings(observed, now)
    for each in found:
        if _named(each, exclude):
            lines.append(f"[+]{each.name} excluded: ok")
        elif not each.facts:
            lines.append(f"[+]{each.name} ok")
        else:
            decides = each.check.decides or "all" in require or _named(each, require)
            ok = ok and not decides
            said = "[-]{} failed: {}" if decides else "[~]{} warning: {}"
            lines += [said.format(each.name, _line(fact)) for fact in each.facts]
    known = {check.name for check in CHECKS} | {each.name for each in found} | {"all"}
    lines += [f"warn: unknown check {name!r}" for name in (*exclude, *require) if name not in known]
    if ok and not verbose:
        return Answer(True, "ok\n")
    return Answer(ok, "\n".join([*lines, f"readyz check {'passed' if ok else 'failed'}", ""]))


def _facts(document: Document) -> dict[str, list[str]]:
    """The facts of each check but that of the server; tiers by their number."""
    tiers = [f"l2.{number}" for number in range(len(document.get("l2", ())))]
    names = [name for check in CHECKS[1:] for name in (tiers if check.name == "l2" else [check.name])]
    facts: dict[str, list[str]] = {name: [] for name in names}
    for problem in document.get("problems", ()):
        facts.setdefault(problem["where"], []).append(problem["fact"])
    return facts


def _named(finding: Finding, names: Sequence[str]) -> bool:
    return finding.name in names or finding.check.name in names


def _line(text: str) -> str:
    return " ".join(text.split())
