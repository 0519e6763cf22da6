"""What is announced to go warns whoever uses it, and is gone in the release that it named."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import kvframework
from kvframework.deprecation import deprecated
from tests.api.deprecations import announced, due, number

PLANTED = """
from kvframework.deprecation import deprecated

@deprecated("old", since="0.2", gone="0.10", instead="new")
def old(): ...

def read(options):
    deprecated("the option `url`", since="0.2", gone="0.4", instead="`urls`").warn(stacklevel=3)
"""
GONE = deprecated("old()", since="0.2", gone="0.4", instead="new()")
TEXT = r"old\(\) is deprecated since kvframework 0\.2 and gone in 0\.4: use new\(\)"


def test_nothing_outlives_the_release_in_which_it_is_to_be_gone() -> None:
    assert due(kvframework.__version__) == []


def test_whatever_is_announced_is_announced_for_two_minor_releases() -> None:
    for each in announced():
        assert number(each.gone)[1] >= number(each.since)[1] + 2 or number(each.gone)[0] > number(each.since)[0], each


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("0.3.9", []),
        ("0.4", ["the option `url`"]),
        ("0.4.0", ["the option `url`"]),
        ("1.0", ["the option `url`", "old"]),
    ],
)
def test_what_is_due_is_found(tmp_path: Path, release: str, expected: list[str]) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    assert [each.what for each in due(release, [tmp_path])] == expected


def test_who_calls_a_deprecated_function_is_warned() -> None:
    @GONE
    def old(number: int) -> int:
        """Doubles."""
        return 2 * number

    with pytest.warns(DeprecationWarning, match=TEXT) as caught:
        assert old(2) == 4
    assert caught[0].filename == __file__, "the author's line, not ours"
    assert (old.__name__, old.__doc__) == ("old", "Doubles.")


def test_who_makes_one_of_a_deprecated_class_is_warned_and_it_stays_a_class() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        @GONE
        class Old:
            def __init__(self, number: int) -> None:
                self.number = number

        class Mine(Old):
            pass

    for kind in (Old, Mine):
        with pytest.warns(DeprecationWarning, match=TEXT) as caught:
            made = kind(3)
        assert caught[0].filename == __file__
        assert isinstance(made, Old)
        assert made.number == 3


def test_anything_else_warns_in_place() -> None:
    def read() -> None:
        GONE.warn(stacklevel=3)

    with pytest.warns(DeprecationWarning, match=TEXT) as caught:
        read()
    assert caught[0].filename == __file__
