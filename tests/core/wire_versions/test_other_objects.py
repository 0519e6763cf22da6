"""A server that makes other objects of the same layout: its engine refuses it, before anything is stored or loaded."""

from __future__ import annotations

import pytest

from kvframework.client import KVClient
from kvframework.errors import VersionMismatch
from tests.core.wire_versions.other_release import Release
from tests.core.wire_versions.peers import OtherServer
from tests.support.waiting import wait_until

pytest.importorskip("torch")

from tests.support.engines import PagedEngine


def test_the_instance_is_not_registered() -> None:
    with OtherServer(Release(other_objects=True)) as server, KVClient(server.endpoint, deadline_scale=20.0) as client:
        with pytest.raises(VersionMismatch, match="computes another object layout"):
            PagedEngine(client)
        wait_until(lambda: not server.status()["instances"], what="the end of the instance")
        assert client.usable
