"""The secret that the nodes of one job share. It is given to each node and never travels through the rendezvous store.

Whoever reaches the port of torch's rendezvous store can read and write everything in it, so nothing there may give
access to the job. A job on one node needs no secret from outside: its launcher generates one for its ranks.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass

from lastgasp.config import env_flag
from lastgasp.errors import ConfigError

from .tls import CA, CERT, KEY, TlsFiles, readable_by_others

TOKEN, FILE, INSECURE = "LASTGASP_TOKEN", "LASTGASP_TOKEN_FILE", "LASTGASP_INSECURE"
UNCOORDINATED = "LASTGASP_NO_CONTROLLER"
"""From the launcher to its ranks: why the job has no controller."""
SHORTEST, LONGEST = 16, 4096
"""Least characters of a secret: whoever overhears a greeting can try short ones offline."""
REMEDY = (
    f"Put the output of `openssl rand -hex 32` into a file that only you can read and name it in {FILE} on every node; "
    f"or set {TOKEN} to the same secret on every node; or set {CERT}, {KEY} and {CA}. {INSECURE}=1 starts without: "
    "whoever reaches the rendezvous port can then take part in the job."
)

WRONG_TOKEN = (
    "wrong token: the rank does not belong to this job. In a job of several nodes each of them needs the same secret, "
    f"in {FILE} or {TOKEN}"
)


@dataclass(frozen=True)
class Secret:
    """What authenticates this node to the others.

    Attributes:
        token: the shared secret; empty if none was given.
        tls: only holders of a certificate of the job's CA can connect.
        insecure: the user wants to start without either.
    """

    token: str = ""
    tls: bool = False
    insecure: bool = False

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None) -> Secret:
        """What the environment names.

        Raises:
            ConfigError: a file cannot be used, or a secret is too short.
        """
        env = os.environ if env is None else env
        tls = TlsFiles.from_environment(env) is not None
        return cls(token_from_environment(env), tls, env_flag(INSECURE, env))

    @property
    def missing(self) -> bool:
        """The nodes have no way to authenticate each other, and the user has not asked to start without."""
        return not (self.token or self.tls or self.insecure)

    def require(self, what: str) -> None:
        """Raise ConfigError where it is `missing`; `what` says which job needs it."""
        if self.missing:
            raise ConfigError(FILE, None, f"a secret that all nodes share, because {what}", REMEDY)

    def seal(self, text: bytes) -> str:
        """Authenticate `text` to everyone who knows the token; empty without a token."""
        if not self.token:
            return ""
        return hmac.new(self.token.encode(), b"notice:" + text, hashlib.sha256).hexdigest()


def token_from_environment(env: Mapping[str, str] | None = None) -> str:
    """The secret of `LASTGASP_TOKEN_FILE`, else of `LASTGASP_TOKEN`; empty where neither is set.

    Raises:
        ConfigError: the file cannot be used, or the secret is too short.
    """
    env = os.environ if env is None else env
    if path := env.get(FILE):
        return _checked(FILE, _content(path), path)
    return _checked(TOKEN, env[TOKEN], "(not shown)") if env.get(TOKEN) else ""


def _checked(name: str, token: str, shown: str) -> str:
    if SHORTEST <= len(token) <= LONGEST and token.isprintable():
        return token
    allowed = f"a secret of {SHORTEST} to {LONGEST} printable characters on one line, not {len(token)}"
    raise ConfigError(name, shown, allowed, "Make one with `openssl rand -hex 32`.")


def _content(path: str) -> str:
    allowed = "a file with the job's secret that nobody but its owner can read"
    try:
        fd = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(FILE, path, allowed, f"It cannot be read: {error.strerror or error}.") from error
    try:
        if why := readable_by_others(os.fstat(fd)):
            mounted = "In Kubernetes: defaultMode: 0400 in the secret's volume, 0440 where the container is not root."
            raise ConfigError(FILE, path, allowed, f"{why} chmod 600 {path}. {mounted}")
        data = os.read(fd, LONGEST + 2)
        return data.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(FILE, path, allowed, f"It cannot be read as text: {error}.") from error
    finally:
        os.close(fd)
