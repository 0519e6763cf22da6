"""Owns how text becomes one line for people, whoever wrote it: nothing in it begins a line or moves a cursor. Pure."""

from __future__ import annotations


def one_line(text: str) -> str:
    """Lines are joined by "; ", and what cannot be printed is written as an escape sequence."""
    joined = "; ".join(filter(None, (line.strip() for line in text.splitlines())))
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in joined)
