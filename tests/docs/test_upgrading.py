"""The versions in docs/upgrading.md are the code's."""

from __future__ import annotations

from pathlib import Path

from kvframework.api.plugin import API_VERSION
from kvframework.storage.l1.journal import SCHEMA
from kvframework.storage.namespaces import FORMAT_VERSION
from kvframework.wire.messages import PROTOCOL_VERSION
from tests.support.doc_tables import rows

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "upgrading.md").read_text()


def test_the_versions_are_those_of_this_release() -> None:
    said = {what: version for what, version, *_ in rows(PAGE, "The versions")}
    assert said["wire protocol"] == str(PROTOCOL_VERSION)
    assert said["plugin API"] == ".".join(map(str, API_VERSION))
    assert said["journal of L1"] == str(SCHEMA)
    assert said["envelope of L2 values"] == str(FORMAT_VERSION)
