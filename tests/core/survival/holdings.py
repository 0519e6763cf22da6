"""What a server holds for its clients, by its status document."""

from __future__ import annotations

from tests.support.wire_client import WireClient


def held(client: WireClient) -> dict[str, int]:
    status = client.status()
    names = ("pins", "pin_leases", "write_leases", "quarantined_bytes")
    found = {name: status["l1"][name] for name in names} | {"tickets": status["tickets"]}
    return {name: value for name, value in found.items() if value}
