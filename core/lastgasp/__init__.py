"""lastgasp: a training job loses no step. Importing this package loads no framework."""

from __future__ import annotations

from ._version import __version__

__all__ = ["__version__"]
