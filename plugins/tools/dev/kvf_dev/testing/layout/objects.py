"""The layout kit's tests of stored objects: both sides see the same ones, and a server sees them without torch."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from kvf_dev.testing.layout.kit import LayoutKit
from kvframework.api.keys import compute_namespace
from kvframework.api.layout import KVLayout, Layout, MemoryLayoutDesc, canonical_desc, chunk_tokens_for

CHUNKS = (1, 48, 256, 1000)
_IN_A_SERVER = """
import sys; sys.modules["torch"] = None
import msgspec
from kvframework.api.layout import KVLayout
{made}
declared = msgspec.msgpack.decode(bytes.fromhex({declared!r}), type=KVLayout)
sys.stdout.write(msgspec.msgpack.encode(layout.object_desc(declared, 48)).hex())
"""
_BY_NAME = """
from kvframework.registry import PluginRegistry
registry = PluginRegistry()
provider = registry.resolve("layout", {use!r})
layout = provider.create(registry.options(provider, {{}}, where="the kit"))
"""
_BY_CLASS = """
import importlib, operator
layout = operator.attrgetter({qualname!r})(importlib.import_module({module!r}))()
"""


class ObjectTests(LayoutKit):
    """`object_desc`, in the engine and in the server."""

    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_a_server_without_the_options_sees_the_same_objects(
        self, layout: Layout, bare: Layout, declared: KVLayout, chunk: int
    ) -> None:
        desc = layout.object_desc(declared, chunk)
        assert bare.object_desc(declared, chunk) == desc, "the engine and the server describe different objects"
        tokens = chunk_tokens_for([group.block_size for group in declared.groups], declared.chunk_tokens or chunk)
        assert desc.chunk_tokens == tokens, f"chunk_tokens is {desc.chunk_tokens}, whole blocks are {tokens} tokens"
        if all(group.form == "canonical" or group.form.startswith("opaque:") for group in desc.groups):
            assert desc == canonical_desc(declared, chunk), "objects of these forms have the shapes of the core"

    def test_the_server_side_needs_no_torch(self, layout: Layout, bare: Layout, declared: KVLayout) -> None:
        """`object_desc` works in a process that cannot import torch."""
        kind = type(bare)
        made = _BY_NAME.format(use=self.use) if self.use else ""
        made = made or _BY_CLASS.format(qualname=kind.__qualname__, module=kind.__module__)
        program = _IN_A_SERVER.format(made=made, declared=msgspec.msgpack.encode(declared).hex())
        run = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert run.returncode == 0, f"a server, which has no torch, fails: {run.stderr.strip().splitlines()[-1:]}"
        found = msgspec.msgpack.decode(bytes.fromhex(run.stdout), type=MemoryLayoutDesc)
        assert found == layout.object_desc(declared, 48), "a server without torch describes other objects"

    def test_the_namespace_depends_on_the_objects_alone(self, bare: Layout, declared: KVLayout) -> None:
        replace = msgspec.structs.replace
        first, *others = declared.groups

        def namespace(group: object = first, **more: object) -> bytes:
            desc = bare.object_desc(replace(declared, groups=(group, *others), **more), 48)
            return compute_namespace(model="m", desc=desc, hasher_fingerprint="h", world_size=1)

        own = namespace()
        assert namespace() == own, "object_desc answers something else the second time"
        more = namespace(num_blocks=declared.num_blocks + 1)
        assert more == own, "engines with other numbers of blocks share no objects"
        assert namespace(replace(first, strides=())) == own, "engines with other strides share no objects"
        for field, value in {
            "num_layers": first.num_layers + 1,
            "head_dim": first.head_dim + 8,
            "planes": 3 - first.planes,
            "window": 0 if first.window else 64,
        }.items():
            if field == "window" and first.state:
                continue
            other = namespace(replace(first, **{field: value, "layer_names": ()}))
            assert other != own, f"objects with another {field} have the same namespace: engines load foreign KV"
