"""The words between a server and its keeper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.keeper import sd_notify

names = st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters=":"), min_size=1, max_size=255)


@given(names)
def test_a_note_is_read_as_it_was_meant(name: str) -> None:
    assert sd_notify.parse_note(sd_notify.store_note(name)) == sd_notify.Note(name, store=True)
    assert sd_notify.parse_note(sd_notify.remove_note(name)) == sd_notify.Note(name, remove=True)
    assert len(sd_notify.store_note(name)) < sd_notify.MAX_NOTE_BYTES


@given(st.binary(max_size=200))
def test_any_bytes_have_a_meaning_or_none(payload: bytes) -> None:
    note = sd_notify.parse_note(payload)
    assert note.name == "" or sd_notify.is_name(note.name)


def test_unknown_words_mean_nothing() -> None:
    assert sd_notify.parse_note(b"STATUS=well\nREADY=1\nMAINPID=1\nX") == sd_notify.Note(ready=True)
    assert sd_notify.parse_note(b"STOPPING=1\nREADY=0") == sd_notify.Note(stopping=True)
    assert sd_notify.parse_note(b"FDSTORE=1\nFDNAME=a:b") == sd_notify.Note(store=True)


@pytest.mark.parametrize("name", ["", "a:b", "a\nb", "\u00e4", "x" * 256, "\x7f"])
def test_a_name_that_no_keeper_takes_is_refused(name: str) -> None:
    for note in (sd_notify.store_note, sd_notify.remove_note):
        with pytest.raises(ValueError, match="not a valid name of a descriptor:"):
            note(name)


@given(st.lists(names, max_size=20), st.integers(1, 1 << 22))
def test_a_process_reads_the_names_that_it_was_given(given_names: list[str], pid: int) -> None:
    variables = sd_notify.listen_variables(given_names, pid)
    assert sd_notify.listened_names(variables, pid) == given_names
    assert sd_notify.listened_names(variables, pid + 1) == []


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, []),
        ({"LISTEN_FDS": "1", "LISTEN_FDNAMES": "a"}, []),
        ({"LISTEN_PID": "7", "LISTEN_FDNAMES": "a"}, []),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "-1"}, []),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "x"}, []),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "9" * 5000}, []),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "\u0661"}, []),
        ({"LISTEN_PID": " 7", "LISTEN_FDS": "1"}, []),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "2"}, ["", ""]),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a"}, ["", ""]),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:"}, ["a", ""]),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "\u00e4"}, [""]),
    ],
)
def test_variables_of_strangers(variables: dict[str, str], found: list[str]) -> None:
    assert sd_notify.listened_names(variables, 7) == found
