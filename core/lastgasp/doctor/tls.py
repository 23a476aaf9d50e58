"""Traps of MindIO's TLS set-up; its failures end the process (docs/facts/mindio_tft.md §10)."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from .checks import Match, check
from .machine import Machine

LONGEST = 10 << 10
_NEEDED = ("tlsCert", "tlsCaPath", "tlsCaFile", "tlsPk", "tlsPkPwd", "packagePath")
_LIBRARIES = ("libssl.so", "libcrypto.so")
_FILE_MODE = 0o550
_SOURCE = "mindio_tft.md §10"


def parse(tls_info: str) -> dict[str, str]:
    """The items of a `tls_info`, cut as MindIO does: at `;`, then at the first `:`."""
    items = (item.partition(":") for item in tls_info.split(";") if ":" in item)
    return {key.strip(): value.strip() for key, _, value in items}


@check("tls-items", "error", _SOURCE, "tls_info lacks something")
def tls_items(machine: Machine) -> Iterator[Match]:
    """Or is too long."""
    info = machine.job.tls_info
    if info and len(info.encode()) > LONGEST:
        yield Match(f"tls_info has {len(info.encode())} bytes, MindIO reads {LONGEST}", "Shorten it.")
    missing = [one for one in _NEEDED if not parse(info).get(one)]
    if info and missing:
        yield Match(f"tls_info lacks {', '.join(missing)}", "Add them, as in tlsCert: /path/cert.pem; ...")


@check("tls-key", "error", _SOURCE, "tlsPk is not PEM text that MindIO can cut")
def tls_key(machine: Machine) -> Iterator[Match]:
    """The text itself, without the headers of old keys."""
    key = parse(machine.job.tls_info).get("tlsPk", "")
    if key and "-----BEGIN" not in key:
        yield Match("tlsPk is not the PEM text of the key; MindIO takes no path there", "Put the file's content in.")
    elif "Proc-Type" in machine.job.tls_info or "BEGIN RSA PRIVATE KEY" in key:
        fix = "openssl pkcs8 -topk8 makes an ENCRYPTED PRIVATE KEY of it."
        yield Match("tlsPk is an old key with headers, whose colons MindIO cuts at", fix)


@check("tls-files", "error", _SOURCE, "A file of tls_info is not there or not readable")
def tls_files(machine: Machine) -> Iterator[Match]:
    """Certificate and authorities."""
    items = parse(machine.job.tls_info)
    paths = [items["tlsCert"]] if items.get("tlsCert") else []
    for folder, names in (("tlsCaPath", "tlsCaFile"), ("tlsCrlPath", "tlsCrlFile")):
        files = [name.strip() for name in items.get(names, "").split(",") if name.strip()]
        paths += [f"{items.get(folder, '').rstrip('/')}/{name}" for name in files]
    for path in paths:
        try:
            os.close(os.open(machine.at(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))  # a pipe must not hang
        except OSError as error:
            yield Match(f"{path} of tls_info: {error.strerror}", "Correct the path or its permissions.")


@check("tls-libraries", "error", _SOURCE, "packagePath has no OpenSSL that MindIO takes")
def tls_libraries(machine: Machine) -> Iterator[Match]:
    """Real files, no symlinks, not writable."""
    folder = parse(machine.job.tls_info).get("packagePath", "")
    for name in _LIBRARIES if folder else ():
        path = machine.at(folder) / name
        if path.is_symlink():
            yield Match(
                f"{path} is a symlink, which MindIO refuses", f"cp --dereference it, with mode {_FILE_MODE:04o}."
            )
        elif not path.is_file():
            yield Match(f"{path} is not there", "Copy OpenSSL 3's library there under that name.")
        elif stat.S_IMODE(path.stat().st_mode) & ~_FILE_MODE:
            yield Match(f"{path} has mode {stat.S_IMODE(path.stat().st_mode):04o}", f"chmod {_FILE_MODE:04o} {path}")
