"""A certificate for tests, made by the `openssl` command on demand."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple


class Certificate(NamedTuple):
    """PEM files. The certificate is self-signed, so the other side must trust it as well."""

    certificate: Path
    key: Path

    def options(self) -> dict[str, str]:
        """Of a tier that trusts it and shows it."""
        return {"tls_ca": str(self.certificate), "tls_cert": str(self.certificate), "tls_key": str(self.key)}


def make_certificate(directory: Path, names: str = "DNS:localhost,IP:127.0.0.1") -> Certificate:
    """Make a certificate for servers and clients with these names."""
    made = Certificate(directory / "cert.pem", directory / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", f"subjectAltName={names}"]
    command += ["-keyout", str(made.key), "-out", str(made.certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return made
