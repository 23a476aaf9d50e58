"""Where checkpoints of MindFormers and of plain MindSpore lie: `lastgasp.mindspore.layout`, under the plugin's name."""

from __future__ import annotations

from lastgasp.mindspore.layout import (
    FORMAT,
    ITERATIONS,
    LEGACY,
    META,
    PLAIN,
    Extension,
    LegacyName,
    decode_small,
    encode_small,
)

__all__ = [
    "FORMAT",
    "ITERATIONS",
    "LEGACY",
    "META",
    "PLAIN",
    "Extension",
    "LegacyName",
    "decode_small",
    "encode_small",
]
