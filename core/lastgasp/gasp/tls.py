"""TLS 1.3 with client certificates on the control connection, where the environment names the files.

The token proves that both ends belong to one job; TLS hides what they exchange, the proofs of the token included, from
others on the network. Addresses in a cluster change, so a certificate is checked against the job's CA, not for a name.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lastgasp import _clock
from lastgasp.errors import ConfigError

CERT, KEY, CA = "LASTGASP_TLS_CERT", "LASTGASP_TLS_KEY", "LASTGASP_TLS_CA"
_WHAT = {CERT: "a PEM file with this node's certificate", KEY: "a PEM file with its private key, without a password",
         CA: "a PEM file with the CA that has signed all nodes' certificates"}  # fmt: skip


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of one node.

    Args:
        cert, key: its own certificate and private key; ca: the authority that signs all nodes' certificates.
    """

    cert: Path
    key: Path
    ca: Path

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None) -> TlsFiles | None:
        """The files named by `LASTGASP_TLS_CERT`, `_KEY` and `_CA`; None if none of them is set.

        Raises:
            ConfigError: one of them is missing, cannot be read, or the key can be read by others.
        """
        env = os.environ if env is None else env
        named = {name: env.get(name, "") for name in (CERT, KEY, CA)}
        if not any(named.values()):
            return None
        return cls(*(_readable(name, value) for name, value in named.items()))

    def server(self) -> ssl.SSLContext:
        """The controller's context, which requires a certificate of each peer.

        Raises:
            ConfigError: the files are not a certificate and key, or do not match.
        """
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client(self) -> ssl.SSLContext:
        """The context of ranks and operators. Raises as `server`."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            allowed = "a certificate and the private key that belongs to it, without a password, in PEM"
            given = f"{self.cert}, {self.key}"
            raise ConfigError(f"{CERT}, {KEY}", given, allowed, f"OpenSSL says: {error}") from error
        _must_be_valid(CERT, self.cert)
        try:
            context.load_verify_locations(self.ca)
        except ssl.SSLError as error:
            raise ConfigError(CA, str(self.ca), _WHAT[CA], f"OpenSSL says: {error}") from error
        return context


def _must_be_valid(name: str, path: Path) -> None:
    """Check the validity period: the peer would refuse the certificate, and TLS 1.3 does not say why.

    Raises:
        ConfigError: it has expired, or is not valid yet.
    """
    decode = getattr(ssl._ssl, "_test_decode_cert", None)  # type: ignore[attr-defined]
    if decode is None:
        return  # another Python: the handshake decides
    found, now = decode(str(path)), _clock.wall_ns() / 1e9
    begin, end = (ssl.cert_time_to_seconds(found[key]) for key in ("notBefore", "notAfter"))
    if not begin <= now <= end:
        allowed = f"a certificate that is valid now; this one is from {found['notBefore']} to {found['notAfter']}"
        raise ConfigError(name, str(path), allowed, "Have a new one signed, or set this host's clock.")


def _no_password() -> str:
    raise ValueError("the key asks for a password")


def _readable(name: str, value: str) -> Path:
    if not value:
        raise ConfigError(name, None, _WHAT[name], f"Set {CERT}, {KEY} and {CA}, or none of them.")
    path = Path(value).expanduser()
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
    except OSError as error:
        raise ConfigError(name, value, _WHAT[name], f"It cannot be read: {error.strerror or error}.") from error
    why = readable_by_others(found) if name == KEY and found.st_mode & 0o077 else ""
    if why:
        remedy = f"chmod 600 {value}; in Kubernetes mount it with defaultMode 0400, or 0440 where root does not run it"
        raise ConfigError(name, value, "a file that only its owner can read, or root's that its group can, too",
                          f"{why} {remedy}.")  # fmt: skip
    return path


def readable_by_others(found: os.stat_result) -> str:
    """Why the file must not hold a secret; empty if it may.

    The rule is PostgreSQL's: only the owner may read it, or also the group if root owns it. Kubernetes mounts files for
    containers that do not run as root in the latter way.
    """
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode):
        return "It is not a regular file."
    if found.st_uid == os.geteuid():
        return f"Its mode is {mode:04o}." if mode & 0o077 else ""
    if found.st_uid != 0:
        return f"It belongs to user {found.st_uid}."
    return f"Its mode is {mode:04o}." if mode & 0o037 else ""
