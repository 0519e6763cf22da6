"""How a server's threads share the interpreter: the serving thread has it back soon, whatever the others compute."""

from __future__ import annotations

from pathlib import Path

from kvframework.wire import messages as m
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

WATCHED = """
import sys, threading, time
def watch():
    while True:
        with open({file!r}, "w") as file:
            file.write(str(sys.getswitchinterval()))
        time.sleep(0.1)
threading.Thread(target=watch, daemon=True).start()
from kvframework.cli.main import main
sys.argv[0] = "kvframework"
main()
"""


def test_a_server_does_not_wait_for_the_interpreter_as_long_as_by_default(tmp_path: Path) -> None:
    """At Python's 5 ms, four threads that make DUMPs hold up a LOOKUP for 12 to 14 ms (median)."""
    file = tmp_path / "interval"
    with ServerProcess(program=("-c", WATCHED.format(file=str(file)))) as server, server.client() as client:
        client.call("PING", m.Ping())
        wait_until(lambda: float(file.read_text() or 1) <= 0.0005, 20, "a short interval")
