"""Resilience for PyTorch Lightning: `Trainer(callbacks=[LastGasp("ckpts")])`."""

from __future__ import annotations

from lastgasp.adapter import MissingExtra

try:
    import lightning.pytorch as _lightning
except ModuleNotFoundError as error:
    raise MissingExtra("lightning", "lightning") from error

from lastgasp_lightning.callback import LastGasp
from lastgasp_lightning.selection import last_good

del _lightning

__all__ = ["LastGasp", "last_good"]
