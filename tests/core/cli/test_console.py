"""What reaches a terminal: letters that can be shown, whoever chose them."""

from __future__ import annotations

import io
import json
import sys

from rich.table import Table
from rich.text import Text

from kvframework.api.console import PlainConsole
from kvframework.api.toml import toml_value
from tests.core.cli.command import run
from tests.core.config.test_toml import refusal

HOSTILE = "model\x1b]0;owned\x07\x9b2J\u202e\U000e0041\udcff"
SHOWN = "model\\u001b]0;owned\\u0007\\u009b2J\\u202e\\udb40\\udc41\\udcff"


def printed(what: object) -> str:
    out = io.StringIO()
    PlainConsole(file=out, width=100, highlight=False).print(what)
    return out.getvalue()


def test_a_text_commands_no_terminal() -> None:
    assert printed(Text(f"{HOSTILE}\nnext")) == f"{SHOWN}\nnext\n".replace("\\u0007", "")
    table = Table("name")
    table.add_row(Text(HOSTILE))
    assert "\x1b" not in printed(table)
    assert "\udcff" not in printed(table)


def test_what_is_shown_of_json_is_the_same_json() -> None:
    text = json.dumps(HOSTILE, ensure_ascii=False)
    shown = printed(Text(text))
    assert shown.isascii()
    assert json.loads(shown) == json.loads(json.dumps(HOSTILE))


def test_a_value_as_toml_can_be_shown() -> None:
    text = "a\x1b\x7f\x9b\u202e\U000e0041b"
    shown = toml_value(text)
    assert shown.isprintable()
    assert refusal(f"a = {shown}") is None


def test_the_name_of_a_file_that_is_no_text() -> None:
    name = b"/\xff\x1b.toml".decode(sys.getfilesystemencoding(), "surrogateescape")
    done = run("config", "check", name)
    assert done.returncode == 2
    assert "/\\udcff\\u001b.toml" in done.stderr
