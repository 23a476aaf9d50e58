"""Where checkpoints of MindFormers and of plain MindSpore lie: `lastgasp.mindspore.layout`, under the plugin's name."""

from __future__ import annotations

from lastgasp.adapter.mindspore import (
    FORMAT,
    ITERATIONS,
    LEGACY,
    META,
    PLAIN,
    Extension,
    LegacyName,
    ModelCheckpointLayout,
    decode_aux,
    encode_aux,
    layout_of,
    rank_of,
)
from lastgasp.adapter.mindspore import SavePlace as Place
from lastgasp.adapter.mindspore import place_of_callback as place_of

__all__ = [
    "FORMAT",
    "ITERATIONS",
    "LEGACY",
    "META",
    "PLAIN",
    "Extension",
    "LegacyName",
    "ModelCheckpointLayout",
    "Place",
    "decode_aux",
    "encode_aux",
    "layout_of",
    "place_of",
    "rank_of",
]
