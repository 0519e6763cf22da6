"""examples/pd: the page, the compose file and the tests with real engines show the same settings."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "prefill-decode.md").read_text()
COMPOSE = (ROOT / "examples" / "pd" / "compose.yaml").read_text()
TRANSFER = (ROOT / "examples" / "pd" / "transfer.json").read_text()


def test_nixl_and_the_engine_have_one_role_and_a_lost_load_is_computed() -> None:
    for role in ("kv_producer", "kv_consumer"):
        given = json.loads(TRANSFER.replace("ROLE", role))
        nixl, ours = given["kv_connector_extra_config"]["connectors"]
        assert [each["kv_role"] for each in (given, nixl, ours)] == [role, role, "kv_both"]
        assert {each["kv_load_failure_policy"] for each in (given, nixl, ours)} == {"recompute"}


def test_page_and_compose_file_start_the_same_engines_check_and_router() -> None:
    roles = r"sed s/ROLE/(kv_\w+)/ \S*transfer\.json"
    assert re.findall(roles, PAGE) == re.findall(roles, COMPOSE) == ["kv_producer", "kv_consumer"]
    for text in (PAGE, COMPOSE):
        assert re.findall(r"--port[ =](\d+)", text) == ["8100", "8200", "8000"]
        assert re.findall(r"check\.py,? --prefill,? \"?http://\S+:8100\"?,? --decode,? \"?http://\S+:8200", text)
        assert "vllm-router" in text
        assert "--vllm-pd-disaggregation" in text
    ports = re.findall(r"VLLM_NIXL_SIDE_CHANNEL_PORT=(\d+)", PAGE)
    assert len(set(ports)) == 2


def test_a_cpu_needs_six_commands() -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    assert len(block.replace("\\\n", "").splitlines()) == 6
