"""Makes the pages below docs/reference/. mkdocstrings fills them from signatures and docstrings in the site's build."""

from __future__ import annotations

from tests.core.api import surface

API = "kvframework.api."
OF_KINDS = ("transport", "layout", "memory", "tier", "eviction", "hasher", "codec", "requests", "listener")
BESIDE = {"transport": ("futures", "copy_plans"), "tier": ("helper_tier",)}
TAKEN = {f"{API}{name}" for kind in OF_KINDS for name in (kind, *BESIDE.get(kind, ()))} | {f"{API}hookspecs"}
# By page: its title and modules.
REFERENCE: dict[str, tuple[str, tuple[str, ...]]] = {
    kind: (f"API: {kind}", tuple(f"{API}{name}" for name in (kind, *BESIDE.get(kind, ())))) for kind in OF_KINDS
}
REFERENCE |= {
    "hookspecs": ("API: hook specifications", (f"{API}hookspecs",)),
    "common": (
        "API: for every kind",
        tuple(each for each in surface.MODULES if each.startswith(API) and each not in TAKEN),
    ),
    "devices": ("API: device drivers", ("kvf_devices",)),
    "client": ("API: client", ("kvframework.client",)),
    "errors": ("API: errors", ("kvframework.errors",)),
    "status": ("API: status document", ("kvframework.status",)),
    "messages": ("API: wire messages", ("kvframework.wire.messages",)),
    "kits": (
        "API: conformance kits",
        tuple(each for each in surface.MODULES if each.startswith("kvf_dev.")) + surface.SIMULATOR,
    ),
}


def pages() -> dict[str, str]:
    """Return each page by its name, without the note of generated files."""
    return {f"{name}.md": _page(title, modules) for name, (title, modules) in REFERENCE.items()}


def _page(title: str, modules: tuple[str, ...]) -> str:
    blocks = "\n".join(f"::: {module}\n" for module in modules)
    return f"# {title}\n\nThe site shows signatures and docstrings here, of:\n\n{blocks}"


def anchors(page: str) -> set[str]:
    """Return the anchors that the site gives to the public names of a page."""
    return {f"{module}.{name}" for module in REFERENCE[page][1] for name in surface.public(module)}
