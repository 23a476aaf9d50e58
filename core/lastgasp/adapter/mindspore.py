"""How MindSpore and MindFormers lay down checkpoints, read without MindSpore."""

from __future__ import annotations

from lastgasp.mindspore.content import Unreadable, read_content
from lastgasp.mindspore.layout import (
    FORMAT,
    ITERATIONS,
    LEGACY,
    META,
    Extension,
    LegacyName,
    decode_aux,
    encode_aux,
    layout_of,
    rank_of,
)
from lastgasp.mindspore.modelcheckpoint import (
    PLAIN,
    ModelCheckpointLayout,
)
from lastgasp.mindspore.modelcheckpoint import (
    Place as SavePlace,
)
from lastgasp.mindspore.modelcheckpoint import (
    place_of as place_of_callback,
)
from lastgasp.mindspore.probe import probe, told_batch, told_step

__all__ = [
    "FORMAT",
    "ITERATIONS",
    "LEGACY",
    "META",
    "PLAIN",
    "Extension",
    "LegacyName",
    "ModelCheckpointLayout",
    "SavePlace",
    "Unreadable",
    "decode_aux",
    "encode_aux",
    "layout_of",
    "place_of_callback",
    "probe",
    "rank_of",
    "read_content",
    "told_batch",
    "told_step",
]
