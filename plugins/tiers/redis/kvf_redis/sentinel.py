"""Discovery of the master: the sentinels are asked whenever a connection is made. Runs in the caller's thread."""

from __future__ import annotations

import time
from typing import Any

from kvf_redis.connect import Connector
from kvf_redis.node import rebuilt
from kvf_redis.resp import Place, Wire
from kvframework.errors import TierError


class Sentinels:
    """Asks the sentinel first that answered last. Thread-safe; holds no connection."""

    def __init__(
        self, sentinels: Connector, places: tuple[Place, ...], servers: Connector, *, master_name: str, where: str
    ) -> None:
        self._sentinels = sentinels
        self._places = places
        self._servers = servers
        self._master_name = master_name
        self._where = where

    def connect(self, deadline: float) -> Wire:
        """A connection to the master; blocks until `deadline` at most. Raises `TierError`."""
        return self._servers.connect(self.master(deadline), deadline)

    def master(self, deadline: float) -> Place:
        """The address of the master according to the sentinels. A silent sentinel costs its share of the time. Raises
        `TierError`."""
        failure = None
        places = self._places
        for index, place in enumerate(places):
            now = time.monotonic()
            share = now + (deadline - now) / (len(places) - index + 1)  # the last share is for the master
            try:
                found = self._sentinels.ask(
                    place, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._master_name, read=_address, deadline=share
                )
            except TierError as error:
                failure = rebuilt(error)
                continue
            if found is not None:
                self._places = (place, *(each for each in places if each != place))
                return found
            failure = TierError(
                f"the sentinel knows no master named {self._master_name!r}",
                where=f"{self._where}: sentinel at {place}",
                hint="master_name is the name in `sentinel monitor NAME ...`",
            )
        assert failure is not None, "there is at least one sentinel"
        raise failure


def _address(reply: Any) -> Place | None:
    if reply is None:
        return None
    host, port = reply
    return Place(host.decode(), int(port))
