"""Each kind of mistake in a TOML text: its place, the right hint, and no value, which may be a secret."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvframework.api.toml import MOST_BYTES, MOST_LEVELS, parse_toml, read_toml, toml_value
from kvframework.errors import ConfigFieldError, ConfigFileError

# name: text, place
MISTAKES = {
    "no quotes": ("[l1]\nuse = pinned # L1", "line 2, column 7"),
    "typographic quotes": ("use = “lru”\n", "line 1, column 7"),
    "a table twice": ("[l1]\nuse = 'x'\n[log]\n[l1]\ncapacity = 1\n", "line 4"),
    "a key twice": ("[l1]\nuse = 'x'\nsize = 1\nuse = 'y'\n", "line 4"),
    "no =": ("[l1]\ncapacity 4\n", "line 2, column 10"),
    "no value": ("[l1]\nuse =\n", "line 2, column 6"),
    "an unclosed string": ('[l1]\nuse = "pinned\nsize = 1\n', "line 2, column 14"),
    "an unclosed array at the end": ("allow = [1,", "end of document"),
    "a path of Windows": ('path = "C:\\Users\\kv"\n', "line 1"),
    "two keys in a line": ("a = 1 b = 2\n", "line 1, column 7"),
    "an invisible character": ("a = 1\x00\n", "line 1"),
    "Windows' line ends": ("[l1]\r\nuse = pinned\r\n", "line 2, column 7"),
}


def refusal(text: str) -> ConfigFileError | ConfigFieldError | None:
    try:
        parse_toml(text, where="kvf.toml")
    except (ConfigFileError, ConfigFieldError) as error:
        return error
    return None


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_its_place_and_a_hint(name: str) -> None:
    text, place = MISTAKES[name]
    error = refusal(text)
    assert error.fact.startswith(f"not valid TOML, {place}")
    assert "\n" not in error.fact
    assert "quotes" in error.hint


@pytest.mark.parametrize(
    "line",
    [
        "url = redis://kv:hunter2@cache",
        "password = hunter2",
        "auth_token = 'hunter2",
        'password: "hunter2"',
        'x = {password = "hunter2" y = 1}',
        'password = """\nhunter2 \\q"""',
        'tokens = [\n  "hunter2" x,\n]',
    ],
)
def test_no_value_of_a_wrong_line_is_shown(line: str) -> None:
    with pytest.raises(ConfigFileError) as caught:
        parse_toml(line, where="kvf.toml")
    assert "hunter2" not in str(caught.value)


@given(
    st.lists(st.sampled_from(['"', "'", '"""', "\n", "=", "[", "]", "{", "}", ",", "a", "#", "\\", " "]), max_size=25)
)
@example(["'", "\n", "]", "\n", '"'])
def test_no_text_of_an_array_of_secrets_is_shown(pieces: list[str]) -> None:
    assert "hunter2" not in str(refusal('tokens = [\n  "hunter2", ' + "hunter2".join(pieces)))


@pytest.mark.parametrize("piece", ["://", "token!", "[1],", "[ ", '"",'])
def test_a_file_of_one_line_is_explained_in_a_time_that_grows_with_its_length_alone(piece: str) -> None:
    text = "a = [1," + piece * (MOST_BYTES // len(piece)) + "x"
    began = time.process_time()
    assert refusal(text) is not None
    assert time.process_time() - began < 5  # takes 0.4 s; with a square in it 15 s and more


def test_no_line_of_a_file_commands_the_terminal() -> None:
    with pytest.raises(ConfigFileError) as caught:
        parse_toml("a = \x1b]0;owned\x07\x9b2J", where="kvf.toml")
    assert all(letter.isprintable() or letter == "\n" for letter in str(caught.value))


@pytest.mark.parametrize("name", ["/dev/zero", "large.toml"])
def test_what_is_too_large_for_a_configuration_is_not_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "large.toml":
        with path.open("wb") as file:
            file.truncate(100 << 20)
    with pytest.raises(ConfigFileError, match="more than 256 KiB"):
        read_toml(path)


@given(st.text(alphabet="ab=\"'[]{}.,#\n\\1 _é\t", max_size=60))
def test_any_text_is_read_or_explained(text: str) -> None:
    error = refusal(text)
    assert error is None or error.hint


def dotted(levels: int) -> str:
    return ".".join(["a"] * levels)


# What is nested this deep, and no deeper; each becomes deeper by its argument alone.
DEEP = {
    "a dotted key": lambda levels: f"x = 1\n{dotted(levels)} = 1",
    "a table's name": lambda levels: f"x = 1\n[{dotted(levels)}]",
    "a name of quoted parts": lambda levels: "x = 1\n[" + ". ".join(['"a.b"'] * levels) + "]",
    "an array of tables": lambda levels: f"x = 1\n[[{dotted(levels - 1)}]]",
    "a key in a table": lambda levels: f"x = 1\n[{dotted(levels // 2)}]  # a.b.c\n{dotted(levels - levels // 2)} = 1",
    "arrays": lambda levels: "x = 1\na = " + "[" * (levels - 1) + "]" * (levels - 1),
    "arrays in lines": lambda levels: "x = 1\na = [" + "[" * (levels - 2) + "\n1.5,\n" + "]" * (levels - 1),
    "inline tables": lambda levels: "x = 1\na = " + "{a = " * (levels - 1) + "1.5" + "}" * (levels - 1),
    "dots in an inline table": lambda levels: f"x = 1\na = {{b = 1.5, {dotted(levels - 1)} = 1}}",
    "both": lambda levels: "x = 1\na = " + "[{a = " * ((levels - 1) // 2) + "1" + "}]" * ((levels - 1) // 2),
}


@pytest.mark.parametrize("name", DEEP)
def test_what_is_nested_too_deep_is_an_error_at_its_place(name: str) -> None:
    parse_toml(DEEP[name](MOST_LEVELS), where="kvf.toml")
    for levels in (MOST_LEVELS + 3, 3000):
        with pytest.raises(ConfigFieldError, match=f"nested more than {MOST_LEVELS} levels deep") as caught:
            parse_toml(DEEP[name](levels), where="kvf.toml")
        assert caught.value.where in ("kvf.toml: line 2", "kvf.toml: line 3")
        assert len(str(caught.value)) < 400
        assert "put names with dots in quotes, and close every [ and {" in caught.value.hint


VALUES = st.recursive(
    st.one_of(st.floats(allow_nan=False), st.text(alphabet="a.,[]{}=\"'#\n", max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a.[=", max_size=3), inner, max_size=3),
)


def levels_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(levels_of, value.values()), default=0)
    return 1 + max(map(levels_of, value), default=0) if isinstance(value, list) else 0


@given(st.dictionaries(st.text("a.", max_size=3), VALUES, max_size=3))
def test_the_levels_of_a_text_are_those_of_what_it_says(table: dict[str, object]) -> None:
    text = "".join(f"{toml_value(key)} = {toml_value(value)}\n" for key, value in table.items())
    levels = levels_of(table)
    assert levels_of(parse_toml(text, where="")) == levels


def test_many_keys_one_after_the_other_are_not_deep() -> None:
    text = "\n".join(f"[a{number}.b]\nc.d = [[1.5], {{e.f = 1}}]" for number in range(1000))
    assert len(parse_toml(text, where="kvf.toml")) == 1000


@pytest.mark.parametrize("piece", ["a.", "[", "{a=", "[a."])
def test_a_file_that_is_one_deep_key_is_refused_at_once(piece: str) -> None:
    text = ("" if piece in ("a.", "[a.") else "a = ") + piece * (MOST_BYTES // len(piece)) + "a = 1"
    began = time.process_time()
    with pytest.raises((ConfigFieldError, ConfigFileError)):
        parse_toml(text, where="kvf.toml")
    assert time.process_time() - began < 5  # the parser takes an hour for a key of 128,000 parts


def test_no_secret_is_shown_of_what_is_nested_too_deep() -> None:
    with pytest.raises((ConfigFieldError, ConfigFileError)) as caught:
        parse_toml('tokens = ["hunter2", ' + "[" * 99, where="kvf.toml")
    assert "hunter2" not in str(caught.value)
