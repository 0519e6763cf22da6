"""docs/engines/sglang.md says what the backend has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from kvf_sglang.lookups import LOOKUP_S
from kvf_sglang.options import KNOWN, SglangOptions, parse_options
from kvf_sglang.pools import _KEYS_AND_VALUES, _LATENT, _STATE_LAYOUTS

DOC = (Path(__file__).resolve().parents[2] / "docs" / "engines" / "sglang.md").read_text()


def table(heading: str) -> list[list[str]]:
    """The cells of the rows of the first table under a heading."""
    section = DOC.split(f"## {heading}\n")[1].split("\n## ")[0].split("\n\n|")[1]
    return [
        [cell.strip("` ") for cell in line.strip("| ").split(" | ")]
        for line in section.splitlines()
        if line.startswith("| `")
    ]


def test_every_option_is_documented_with_its_default_and_meaning() -> None:
    expected: dict[str, Any] = {}
    for field in msgspec.structs.fields(SglangOptions):
        info = msgspec.inspect.type_info(field.type)
        description = (getattr(info, "extra_json_schema", None) or {}).get("description", "")
        default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default  # type: ignore[misc]
        expected[f"kvframework.{field.name}"] = (json.dumps(default), description)
    documented = {row[0]: (row[2], row[3].replace("`", "")) for row in table("Options")}
    assert documented == expected


def test_the_engines_command_is_a_configuration_of_the_backend() -> None:
    (text,) = re.findall(r"--hicache-storage-backend-extra-config '(.*?)'", DOC, re.DOTALL)
    config = json.loads(text)
    parse_options(config)
    assert (config["module_path"], config["class_name"]) == ("kvf_sglang.storage", "KvFrameworkStorage")


def test_the_linkers_command_is_a_configuration_of_it() -> None:
    (text,) = re.findall(r"--unified-cache-external-linker-config '(.*?)'", DOC, re.DOTALL)
    config = json.loads(text)
    parse_options(config["linker_extra_config"])
    assert (config["linker_module_path"], config["linker"]) == ("kvf_sglang.linker", "KvFrameworkLinker")
    assert f"{LOOKUP_S} s a question" in DOC


def test_pools_and_releases_are_those_that_are_supported() -> None:
    layouts = [
        re.findall(r"`(\w+)`", DOC.split(f"| `{kind}`")[1].split("\n")[0].rpartition(" | ")[2])
        for kind in ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost", "MambaPoolHost")
    ]
    assert layouts == [list(_KEYS_AND_VALUES), list(_LATENT), list(_STATE_LAYOUTS)]
    assert f"Supported: SGLang {', '.join(KNOWN)}." in DOC
