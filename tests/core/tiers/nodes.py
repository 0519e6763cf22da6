"""What these tests ask of a server's status, and wait for."""

from __future__ import annotations

from typing import Any

from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient

_PATIENCE_S = 60.0


def tier(client: WireClient, index: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = client.status()["l2"][index]
    return found


def count(client: WireClient, name: str, index: int = 0) -> int:
    return int(tier(client, index).get(name, 0))


def await_written(client: WireClient, index: int = 0) -> None:
    wait_until(lambda: tier(client, index)["write_pending"] == 0, _PATIENCE_S, "the write to L2")


def await_count(client: WireClient, name: str, least: int, index: int = 0) -> None:
    wait_until(lambda: count(client, name, index) >= least, _PATIENCE_S, f"{least} of {name!r} in tier {index}")


def await_state(client: WireClient, wanted: str, index: int = 0) -> None:
    """`wanted` is a state of a circuit, or "down" for any but closed."""

    def reached() -> bool:
        state = tier(client, index)["state"]
        return bool(state == wanted or (wanted == "down" and state != "closed"))

    wait_until(reached, _PATIENCE_S, f"a tier that is {wanted}")


def await_rest(client: WireClient) -> None:
    """Nobody holds anything, and nothing is under way."""

    def held() -> dict[str, Any]:
        status = client.status()
        l1 = status["l1"]
        names = ("pins", "pin_leases", "write_leases", "quarantined_bytes")
        values = {name: l1[name] for name in names}
        values["tickets"] = status["tickets"]
        values["loads"] = status["prefetch"]["in_flight"]
        values["to write"] = sum(each["write_pending"] for each in status["l2"])
        return {name: value for name, value in values.items() if value}

    wait_until(lambda: not held(), _PATIENCE_S, "rest")
