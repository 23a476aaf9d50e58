"""What `recovery` is where nobody has said it: the one rule of all adapters of torch frameworks (docs/in-place.md)."""

from __future__ import annotations

from lastgasp.backends import choose_backend
from lastgasp.config import Recovery
from lastgasp.session import launched


def recovery_here(asked: Recovery | None, device: str, groups: str) -> Recovery:
    """What was asked for; else "auto" where recovery in place was proven, and "restart" everywhere else.

    Proven: ranks on CPUs whose process groups are gloo's, under a launcher, led by the embedded engine. For a custom
    loop, `lastgasp.pytorch.train` asks for it, wherever the model is on a CPU.

    Args:
        asked: the argument or the variable (`asked_recovery`).
        device: of this rank's model, as torch writes it: "cpu", "cuda:0".
        groups: backend of the process groups, as torch names it: "gloo", "cpu:gloo,cuda:nccl".

    Raises:
        ConfigError: `LASTGASP_BACKEND` cannot be had.
    """
    if asked is not None:
        return asked
    gloo = all(one.rpartition(":")[2] == "gloo" for one in groups.split(","))
    proven = device.partition(":")[0] == "cpu" and gloo and launched()
    return "auto" if proven and choose_backend().backend == "embedded" else "restart"
