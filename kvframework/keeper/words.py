"""The words between a server and its keeper: those of systemd, see sd_notify(3) and sd_listen_fds(3). Pure."""

from __future__ import annotations

from typing import NamedTuple

NOTIFY_VARIABLE = "NOTIFY_SOCKET"
# The descriptors that a started process has from its keeper, from this number on.
FIRST_FD = 3
PID_VARIABLE, COUNT_VARIABLE, NAMES_VARIABLE = "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"
LISTEN_VARIABLES = (PID_VARIABLE, COUNT_VARIABLE, NAMES_VARIABLE, "LISTEN_PIDFDID")

READY = b"READY=1"
STOPPING = b"STOPPING=1"
MAX_NOTE_BYTES = 4096
_MAX_NAME = 255
_MAX_LISTENED = 1024


class Note(NamedTuple):
    """One message of a server; unknown words are ignored, as systemd ignores them. `name` is "" where none is valid."""

    name: str = ""
    store: bool = False
    remove: bool = False
    ready: bool = False
    stopping: bool = False


def is_name(text: str) -> bool:
    """Whether a descriptor can have this name."""
    return 0 < len(text) <= _MAX_NAME and all(" " <= letter <= "~" and letter != ":" for letter in text)


def store_note(name: str) -> bytes:
    """The message with the descriptor to keep. Raises `ValueError` for a name that none can have."""
    # Kept whatever poll(2) says of it.
    return f"FDSTORE=1\nFDNAME={_checked(name)}\nFDPOLL=0".encode("ascii")


def remove_note(name: str) -> bytes:
    """The message that ends the keeping of all descriptors of the name. Raises `ValueError` as `store_note` does."""
    return f"FDSTOREREMOVE=1\nFDNAME={_checked(name)}".encode("ascii")


def parse_note(payload: bytes) -> Note:
    """The meaning of a message. Never raises: bytes without a meaning are an empty note."""
    words = dict(line.split("=", 1) for line in payload.decode("latin-1").split("\n") if "=" in line)
    name = words.get("FDNAME", "")
    return Note(
        name=name if is_name(name) else "",
        store=words.get("FDSTORE") == "1",
        remove=words.get("FDSTOREREMOVE") == "1",
        ready=words.get("READY") == "1",
        stopping=words.get("STOPPING") == "1",
    )


def listened_names(environ: dict[str, str], pid: int) -> list[str]:
    """The names of the descriptors from `FIRST_FD` on, "" for one without a valid name; empty if the variables are
    absent, malformed or meant for another process than `pid`."""
    count = environ.get(COUNT_VARIABLE, "")
    if environ.get(PID_VARIABLE, "") != str(pid) or not (count.isascii() and count.isdigit() and len(count) < 5):
        return []
    number = min(int(count), _MAX_LISTENED)
    names = environ.get(NAMES_VARIABLE, "").split(":")
    if len(names) != number:
        return [""] * number
    return [name if is_name(name) else "" for name in names]


def listen_variables(names: list[str], pid: int) -> dict[str, str]:
    """The variables of a process that has descriptors of these names; none without descriptors."""
    if not names:
        return {}
    return {PID_VARIABLE: str(pid), COUNT_VARIABLE: str(len(names)), NAMES_VARIABLE: ":".join(names)}


def _checked(name: str) -> str:
    if not is_name(name):
        raise ValueError(f"no descriptor can have the name {name!r}")
    return name
