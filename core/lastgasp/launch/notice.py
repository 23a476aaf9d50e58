"""What the first launcher of a job tells those of the other nodes, through a store that anybody may read and write."""

from __future__ import annotations

import hmac
import logging
import os

import msgspec

from lastgasp.gasp.secret import FILE, TOKEN, UNCOORDINATED, Secret

log = logging.getLogger("lastgasp.launch")

_STRANGER = "-"
"""In place of a token that this node does not know: the controller refuses its ranks, and says why."""


class Notice(msgspec.Struct, frozen=True):
    """What the first agent tells the others.

    Attributes:
        token: empty where the nodes share a secret: it does not travel.
        why: why there is no controller; empty where there is one.
        seal: by which an agent that knows the secret knows that this comes from one that does.
    """

    controller: str
    token: str
    job: str
    attempt: int
    why: str = ""
    seal: str = ""

    def sealed(self, secret: Secret) -> bytes:
        """For the store."""
        bare = msgspec.structs.replace(self, seal="", token="" if secret.token else self.token)
        return msgspec.json.encode(msgspec.structs.replace(bare, seal=secret.seal(msgspec.json.encode(bare))))

    def genuine(self, secret: Secret) -> bool:
        """It comes from who knows the secret; as far as there is one."""
        bare = msgspec.structs.replace(self, seal="")
        return hmac.compare_digest(self.seal, secret.seal(msgspec.json.encode(bare)))

    def known_by(self, secret: Secret) -> Notice:
        """What of it can be believed, with the token that ranks of this node prove."""
        if self.why:
            return msgspec.structs.replace(self, controller="", token="")
        if not self.genuine(secret):
            log.warning("the first node's launcher does not know this node's secret (%s, %s): are they the same there?",
                        FILE, TOKEN)  # fmt: skip
        return msgspec.structs.replace(self, token=secret.token or self.token or _STRANGER)

    @property
    def environment(self) -> dict[str, str]:
        """For the ranks. A round without a controller takes back what the one before has said."""
        found = {"LASTGASP_JOB": self.job, "LASTGASP_ATTEMPT": str(self.attempt)}
        found |= {"LASTGASP_CONTROLLER": self.controller, UNCOORDINATED: self.why}
        if self.controller:
            found[TOKEN] = self.token
        return found | {"LASTGASP_LAUNCHER": os.environ.get("LASTGASP_LAUNCHER", "torchrun")}
