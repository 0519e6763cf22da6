"""The checks of the metadata of a plugin's distribution. Imports nothing of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

import kvframework
from kvf_dev.inspection.problems import Problem, problem
from kvf_dev.inspection.targets import Target
from kvframework.api.plugin import API_VERSION, ENTRY_POINT_GROUP
from kvframework.registry import KINDS
from kvframework.registry.discovery import name_fault, release_wanted

_OURS = "kvframework"


def metadata_problems(target: Target) -> Iterator[Problem]:
    """Problems of the metadata. Blocking: reads metadata files."""
    if not target.offers:
        yield problem(
            "not-installed",
            target.module,
            "no installed distribution has an entry point for it",
            expected=f'[project.entry-points."{ENTRY_POINT_GROUP}"]',
            hint="install the plugin: pip install -e .",
        )
    for rival in target.rivals:
        yield problem(
            "name-conflict",
            rival.title,
            f"{rival.origin} offers it too",
            expected="a name of its own",
            hint="choose another name, or uninstall the other one",
        )
    for offer in target.offers:
        if offer.api_major != API_VERSION[0] and offer.title not in {
            each.title for each in target.offers if each.api_major == API_VERSION[0]
        }:
            yield problem(
                "api-version",
                offer.title,
                f"its entry point is of plugin API {offer.api_major}",
                expected=f"the group {ENTRY_POINT_GROUP}",
                hint="offer it in this group as well",
            )
        if offer.kind not in KINDS:
            yield problem(
                "entry-point-name",
                offer.title,
                "its entry point names no kind of plugin",
                expected=f"KIND.NAME, with one of {', '.join(KINDS)}",
                hint="rename the entry point",
            )
        elif fault := name_fault(offer.kind, offer.name):
            yield problem(
                "plugin-name",
                offer.title,
                fault.fact,
                expected=fault.available,
                hint=f"call it {offer.kind}.{fault.nearest}" if fault.nearest else "choose another name",
            )
    for name in dict.fromkeys(offer.distribution for offer in target.offers):
        yield from _distribution_problems(name)


def _distribution_problems(name: str) -> Iterator[Problem]:
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return
    if not found.metadata["Requires-Python"]:
        yield problem(
            "no-requires-python",
            name,
            "its metadata has no Requires-Python",
            expected='requires-python = ">=3.10"',
            hint="write it into [project] of pyproject.toml",
        )
    if wanted := release_wanted(name):
        yield problem(
            "api-version",
            name,
            f"it requires kvframework {wanted}",
            expected=f"a range with kvframework {kvframework.__version__}",
            hint="widen the range in its pyproject.toml, or check it with a kvframework in the range",
        )
    needed = {re.split(r"[^A-Za-z0-9._-]", each.strip(), maxsplit=1)[0].lower() for each in found.requires or ()}
    if _OURS not in {*needed, name.lower()}:
        yield problem(
            "no-dependency",
            name,
            "its metadata does not depend on kvframework",
            expected='dependencies = ["kvframework>=..."]',
            hint="write it into [project] of pyproject.toml",
        )
