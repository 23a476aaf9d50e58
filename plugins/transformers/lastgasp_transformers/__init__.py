"""Resilience for Hugging Face's Trainer: `Trainer(..., callbacks=[LastGasp()])`."""

from __future__ import annotations

from lastgasp.adapter import MissingExtra

try:
    import accelerate as _accelerate
    import transformers as _transformers
except ModuleNotFoundError as error:
    raise MissingExtra("transformers", error.name or "transformers") from error

from lastgasp_transformers.supported import require_known_version, restore_numbered_cpus

require_known_version()
restore_numbered_cpus()

from lastgasp_transformers.callback import LastGasp  # noqa: E402

del _accelerate, _transformers

__all__ = ["LastGasp"]
