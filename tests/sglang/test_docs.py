"""docs/engines/sglang.md says what the backend has."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvf_sglang.options import KNOWN, SglangOptions, parse_options
from kvf_sglang.pools import _KEYS_AND_VALUES, _LATENT, _STATE_LAYOUTS
from kvf_sglang.waiting import LOOKUP_S
from tests.support import doc_tables

DOC = (Path(__file__).resolve().parents[2] / "docs" / "engines" / "sglang.md").read_text()


def test_every_option_is_documented_with_its_default_and_meaning() -> None:
    assert doc_tables.engine_options(DOC) == doc_tables.declared_options(SglangOptions)


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
    assert f"up to {LOOKUP_S} s; a later lookup" in DOC


def test_pools_and_releases_are_those_that_are_supported() -> None:
    layouts = [
        re.findall(r"`(\w+)`", DOC.split(f"| `{kind}`")[1].split("\n")[0].rpartition(" | ")[2])
        for kind in ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost", "MambaPoolHost")
    ]
    assert layouts == [list(_KEYS_AND_VALUES), list(_LATENT), list(_STATE_LAYOUTS)]
    assert f"supports SGLang {', '.join(KNOWN)}." in DOC
