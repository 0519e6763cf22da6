"""Who may write to L2 can make the server load what they like (a checksum is no signature), but not take it down."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvframework.api.tier import Outcome
from tests.support.redis_tier import get, put, soon


def test_a_fan_out_folder_may_be_anything(tmp_path: Path) -> None:
    """Names are the server's own; what stands in their place is not followed out of the folder."""
    from kvf_filesystem import FilesystemOptions
    from kvf_filesystem.tier import open_tier

    tier = open_tier(FilesystemOptions(path=str(tmp_path / "tier")), where="[[l2]] #1")
    try:
        key = os.urandom(71) + b"\xab"
        assert put(tier, key, b"value") is Outcome.STORED
        file = tmp_path / "tier" / "ab" / key.hex()
        outside = tmp_path / "outside"
        outside.write_bytes(file.read_bytes())
        file.unlink()
        file.symlink_to(outside)
        assert get(tier, key, nbytes=5)[0] == [Outcome.DAMAGED], "a link is not followed"
        assert tier.delete([key], deadline=soon()) == [Outcome.DELETED]
        assert outside.exists()
        for bad in (b"../../../etc/passwd", b"", key[:-1], key + b"/.."):
            with pytest.raises(ValueError, match="an object key has 72 bytes"):
                tier.contains([bad], deadline=soon())
    finally:
        tier.close()
