"""The notice of a job's first launcher to those of the other nodes, via a store that anyone may read and write."""

from __future__ import annotations

import hmac
import logging
import os

import msgspec

from lastgasp.gasp.secret import FILE, TOKEN, UNCOORDINATED, Secret

log = logging.getLogger("lastgasp.launch")

_STRANGER = "-"
"""Replaces a token that this node does not know: the controller then refuses its ranks with a reason."""


class Notice(msgspec.Struct, frozen=True):
    """The first agent's notice to the others.

    Attributes:
        since_ns: when the first attempt of the launchers began, for all of them (`topology.Place`).
        token: empty if the nodes share a secret, which is not transmitted.
        why: why there is no controller; empty if there is one.
        seal: proves to agents that know the secret that the sender knows it as well.
    """

    controller: str
    token: str
    job: str
    attempt: int
    since_ns: int = 0
    why: str = ""
    seal: str = ""

    def sealed(self, secret: Secret) -> bytes:
        """Encode it for the store."""
        bare = msgspec.structs.replace(self, seal="", token="" if secret.token else self.token)
        return msgspec.json.encode(msgspec.structs.replace(bare, seal=secret.seal(msgspec.json.encode(bare))))

    def genuine(self, secret: Secret) -> bool:
        """Whether its sender knows the secret, if there is one."""
        bare = msgspec.structs.replace(self, seal="")
        return hmac.compare_digest(self.seal, secret.seal(msgspec.json.encode(bare)))

    def known_by(self, secret: Secret) -> Notice:
        """The trustworthy part of it, with the token that ranks of this node prove."""
        if self.why:
            return msgspec.structs.replace(self, controller="", token="")
        if not self.genuine(secret):
            log.warning("the first node's launcher does not know this node's secret (%s, %s): are they the same there?",
                        FILE, TOKEN)  # fmt: skip
        return msgspec.structs.replace(self, token=secret.token or self.token or _STRANGER)

    @property
    def environment(self) -> dict[str, str]:
        """The ranks' environment. Without a controller it clears what the previous attempt has set."""
        found = {"LASTGASP_JOB": self.job, "LASTGASP_ATTEMPT": str(self.attempt)}
        found["LASTGASP_SINCE"] = str(self.since_ns)
        found |= {"LASTGASP_CONTROLLER": self.controller, UNCOORDINATED: self.why}
        if self.controller:
            found[TOKEN] = self.token
        return found | {"LASTGASP_LAUNCHER": os.environ.get("LASTGASP_LAUNCHER", "torchrun")}
