"""Where a value of the configuration came from."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.api.plugin import ByteSize
from kvframework.api.toml import parse_toml, toml_value
from kvframework.config.layers import Layers, read_layers


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvf.toml"
    path.write_text('[l1]\nhigh_watermark = 0.8\n[[layout]]\nuse = "paged"\n[[layout]]\nuse = "other"\naxes = ["a"]\n')
    return path


def layers(file: Path | None = None, *overrides: str, variable: str = "") -> Layers:
    return read_layers(file, overrides, {"KVFRAMEWORK_CONFIG": variable})


@pytest.mark.parametrize(
    ("path", "origin"),
    [
        (("l1", "high_watermark"), "{file}: [t]"),
        (("l1", "use"), "embedded default"),
        (("l1", "capacity"), "default"),
        (("l1", "eviction", "use"), "embedded default"),
        (("hasher", "use"), "embedded default"),
        (("transport", 0, "use"), "embedded default"),
        (("layout", 1, "axes"), "{file}: [t]"),
        (("layout", 0, "axes"), "default"),
        (("requests",), "default"),
    ],
)
def test_the_layer_that_decides_is_named(file: Path, path: tuple[str | int, ...], origin: str) -> None:
    assert layers(file).origin(path, "[t]") == origin.format(file=file)


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("l1.high_watermark=0.5", ("l1", "high_watermark")),
        ("layout.1.axes=[]", ("layout", 1, "axes")),
        ('l1={use="pinned"}', ("l1", "use")),
        ("layout=[]", ("layout",)),
        ("l1.headers.key=1", ("l1", "headers")),
    ],
)
def test_an_override_is_named_without_its_value(file: Path, override: str, path: tuple[str | int, ...]) -> None:
    named = layers(file, override)
    assert named.origin(path, "[t]") == f"--set {override.partition('=')[0]}"
    assert named.origin(("server", "workers"), "[t]") == "default"


def test_the_last_override_counts(file: Path) -> None:
    assert layers(file, "l1.capacity=1", "l1={}").origin(("l1", "capacity"), "[t]") == "--set l1"


def test_the_layers_below_an_override_stay_what_they_were(file: Path) -> None:
    changed = layers(file, "layout.0.axes=[1]", "transport.1.use=x", "l1.high_watermark=0.1")
    assert changed.own == layers(file).own
    assert changed.default == layers().default


def test_a_file_named_by_the_environment(file: Path) -> None:
    named = layers(variable=str(file))
    assert (named.file, named.by_variable) == (file, True)
    assert named.origin(("l1", "high_watermark"), "[t]") == f"{file} (KVFRAMEWORK_CONFIG): [t]"
    assert not layers(file, variable="/elsewhere").by_variable


scalars = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab. "\n', min_size=1), inner, max_size=3),
)


@given(values)
def test_what_is_written_as_toml_reads_as_the_same(value: object) -> None:
    assert parse_toml(f"value = {toml_value(value)}", where="") == {"value": value}


@given(st.integers(min_value=0, max_value=1 << 45))
def test_a_size_is_written_exactly(size: int) -> None:
    read = parse_toml(f"value = {toml_value(ByteSize(size))}", where="")["value"]
    assert ByteSize.parse(read) == size


@pytest.mark.parametrize("text", ["9" * 400, "1." + "9" * 400 + "GiB", "9" * 400 + "TiB", "", "-1", "1 XiB"])
def test_what_is_no_size_is_refused_in_words(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size such as"):
        ByteSize.parse(text)


def test_what_toml_cannot_say_is_refused() -> None:
    with pytest.raises(TypeError):
        toml_value(None)
