"""Certificates of servers on loopback, by OpenSSL."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.harness.debian import installed


def make_certificate(folder: Path, name: str = "cert", days: int = 2) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 that its own key has signed; return the files of key and certificate.

    Certificates in one folder have the same key. One of a negative number of days has expired.
    """
    openssl = installed("openssl", "openssl")
    key, certificate = folder / "key.pem", folder / f"{name}.pem"
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    extensions.write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=critical,CA:FALSE\n")
    steps = [
        f"req -new -key {key} -subj /CN=server -out {request}",
        f"x509 -req -in {request} -signkey {key} -days {days} -extfile {extensions} -out {certificate}",
    ]
    if not key.exists():
        steps.insert(0, f"ecparam -name prime256v1 -genkey -noout -out {key}")
    for words in steps:
        subprocess.run([openssl, *words.split()], check=True, capture_output=True)
    return key, certificate
