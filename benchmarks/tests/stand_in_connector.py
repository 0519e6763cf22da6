"""An engine's process with a connector whose processor time is counted: `stand_in_connector.py`. Says "ready" once all
of it is spent, and lives until its stdin ends.

The connector takes 0.1 s in a call, as much in a call within that, 0.2 s in a thread that lives on, as much in a thread
which that one starts, beside the threads of ZMQ, and 0.1 s in one that ends. The engine takes 0.3 s by itself, 0.3 s in
a thread, and in a call that the connector leaves to its base.
"""

from __future__ import annotations

import sys
import threading
import time

import zmq

from kvframework_bench.serving.timed_connector import timed

spent = threading.Semaphore(0)
called, ending = threading.Event(), threading.Event()


def spend(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def stay(seconds: float) -> None:
    spend(seconds)
    spent.release()
    ending.wait()


class Base:
    def __init__(self, role: str) -> None:
        self.role = role

    def left_alone(self) -> None:
        spend(0.3)


class Connector(Base):
    def __init__(self, role: str) -> None:
        super().__init__(role)
        self._threads: list[threading.Thread] = []

    def start(self) -> int:
        """Takes its time."""
        spend(0.1)
        self.within()
        for thread in (threading.Thread(target=self._two), threading.Thread(target=spend, args=(0.1,))):
            thread.start()
            self._threads.append(thread)
        self._threads[-1].join()
        return len(self._threads)

    def within(self) -> None:
        spend(0.1)

    def _two(self) -> None:
        called.wait()  # so that what comes now comes in no call
        self._socket = zmq.Context().socket(zmq.PUB)
        threading.Thread(target=stay, args=(0.2,)).start()
        stay(0.2)


def main() -> None:
    counted = timed(Connector, Base)
    zmq.Context.instance().socket(zmq.PUB)
    connector = counted("worker")
    assert (counted.__name__, connector.role, isinstance(connector, Connector)) == ("Connector", "worker", True)
    assert counted.start.__doc__ == "Takes its time."
    assert connector.start() == 2
    called.set()
    threading.Thread(target=stay, args=(0.3,)).start()
    spend(0.3)
    connector.left_alone()
    for _ in range(3):
        spent.acquire()
    print("ready", flush=True)
    sys.stdin.read()
    ending.set()


main()
