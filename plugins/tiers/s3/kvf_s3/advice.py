"""The checks of `kvframework doctor` for a bucket: whether it answers, what else lies below the prefix, what bounds it.
Runs in a separate process; reads only."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from kvf_s3 import Address, S3Options
from kvf_s3.failures import Failure, understood
from kvf_s3.settings import read_settings
from kvf_s3.sweep import LEASE, first_page
from kvframework.api.plugin import ByteSize, Finding, TableContext

_SAMPLE = 100


def diagnose(options: S3Options, context: TableContext, deadline: float) -> list[Finding]:
    """Check the bucket; blocks until `deadline` at most. Raises `ConfigFieldError`."""
    settings = read_settings(options, where=context.where)
    began = time.monotonic()
    answer = asyncio.run(_ask(settings.store, settings.address, deadline - began))
    if isinstance(answer, Failure):
        advice = answer.hint or "until then the server runs without this tier"
        return [Finding("s3.reachable", "fail", f"{settings.shown}: {answer.fact}", advice)]
    took = (time.monotonic() - began) * 1000
    fact = f"{settings.shown} answered a listing in {took:.0f} ms, connection included; writing was not tested"
    reached = Finding("s3.reachable", "ok", fact)
    return [reached, _strangers(answer, settings.address), _bound(options), _transport(options)]


async def _ask(store: Any, address: Address, seconds: float) -> list[str] | Failure:
    try:
        return await asyncio.wait_for(first_page(store, address, _SAMPLE), max(seconds, 0.0))
    except (TimeoutError, asyncio.TimeoutError):
        return Failure("no answer before the deadline", "check that this machine can reach the store")
    except Exception as error:  # noqa: BLE001  whatever obstore raises
        return understood(error)


def _strangers(names: list[str], address: Address) -> Finding:
    foreign = [each for each in names if address.key_of(each) is None and each != f"{address.prefix}{LEASE}"]
    if not foreign:
        return Finding("s3.prefix", "ok", f"the first {len(names)} names under the prefix belong to this tier")
    fact = f"{len(foreign)} of the first {len(names)} names under the prefix are not of this tier and are ignored"
    return Finding("s3.prefix", "warn", fact, "set a separate prefix in url: each listing reads all names under it")


def _bound(options: S3Options) -> Finding:
    if options.capacity:
        fact = f"one server keeps the prefix below {ByteSize(options.capacity)}, counted every {options.sweep_s:g} s"
        return Finding("s3.capacity", "ok", fact)
    fact = "capacity is 0: without a lifecycle rule of the bucket the prefix grows without limit"
    return Finding("s3.capacity", "warn", fact, "set capacity, or an expiration rule for the prefix")


def _transport(options: S3Options) -> Finding:
    if options.endpoint.startswith("http://"):
        fact = "endpoint is http://: anyone on the network can read the values"
        return Finding("s3.transport", "warn", fact, "use https://, unless you trust every machine of the network")
    return Finding("s3.transport", "ok", "the store is reached over TLS")
