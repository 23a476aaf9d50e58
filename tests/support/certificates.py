"""Certificates of a job's nodes, made for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trustme

from lastgasp.gasp.tls import CA, CERT, KEY


def issue(folder: Path, authority: trustme.CA, name: str, **more: Any) -> dict[str, str]:
    """A node's files, and the variables that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    found = authority.issue_cert(name, **more)
    paths = {CERT: folder / "cert.pem", KEY: folder / "key.pem", CA: folder / "ca.pem"}
    found.cert_chain_pems[0].write_to_path(str(paths[CERT]))
    found.private_key_pem.write_to_path(str(paths[KEY]))
    authority.cert_pem.write_to_path(str(paths[CA]))
    paths[KEY].chmod(0o600)
    return {name: str(path) for name, path in paths.items()}
