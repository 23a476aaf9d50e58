"""Describe the training data without reading them, so that a resume with other data is reported.

MindFormers lets data and batch size change between two starts on purpose (it counts epochs and steps anew), so this is
a note, not a refusal.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("lastgasp")

DEEP = 32
"""Most stages of a pipeline that are described."""


def described(params: Any) -> str:
    """The data of this training in words: `40 batches of 8 (BatchDataset of MapDataset of GeneratorDataset)`.

    Args:
        params: the parameters of MindSpore's callbacks, when training begins.

    Returns:
        Equal for equal data; empty where they do not say. Never raises.
    """
    try:
        dataset = params.train_dataset
        return f"{int(params.batch_num)} batches of {int(dataset.get_batch_size())} ({' of '.join(_stages(dataset))})"
    except Exception as error:  # from a user's dataset; training does not need this
        log.debug("the training data do not say what they are: %s", error)
        return ""


def changed(saved: str, now: str) -> str:
    """The message where the checkpoint's data are not those of this start; empty where they are, or nobody knows."""
    if not saved or not now or saved == now:
        return ""
    return f"the training data are not those of the checkpoint: {saved} there, {now} here; the step counts continue"


def _stages(dataset: Any) -> list[str]:
    found: list[str] = []
    while dataset is not None and len(found) < DEEP:
        found.append(type(dataset).__name__)
        dataset = next(iter(getattr(dataset, "children", None) or ()), None)
    return found
