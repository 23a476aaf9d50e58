"""Describe the training data without reading them, so that a resume with other data is reported.

MindFormers lets data and batch size change between two starts on purpose (it counts epochs and steps anew), so this is
a note, not a refusal.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

log = logging.getLogger("lastgasp")

DEEP = 32
"""Most stages of a pipeline that are described."""
_DRAWS = re.compile("Random|Augment|CutMix|CutOut|MixUp")
"""In the names of MindSpore's transforms that draw."""
UNSEEDED = (
    "the training data are shuffled without a seed (mindspore.set_seed sets one): behind a resume in the middle of an "
    "epoch some of its samples come again and others not at all"
)
_OWN_ORDER = (
    "the training data come in the order of the script's own sampler: where that draws, some samples of this epoch may "
    "come again and others not at all"
)
_DRAWN_ANEW = (
    "random augmentations behind this resume are others than without the fault. "
    "mindspore.dataset.config.set_fast_recovery(False) repeats them, by running all the data before it once more"
)


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


def steps_of_epoch(arguments: Mapping[str, Any], device: str) -> int:
    """Of what this `Model.train` counts as one: where data sink, `sink_size` steps. On CPU they never do."""
    sink = int(arguments.get("sink_size") or -1)
    if arguments.get("dataset_sink_mode") and sink > 0 and device != "CPU":
        return sink
    return int(arguments["train_dataset"].get_dataset_size())


def not_repeated(dataset: Any, *, seeded: bool, fast: bool, within: int) -> list[str]:
    """What of the data is not as it would have been, where training resumes. Never raises.

    Args:
        dataset: of a plain training; seeded: whether MindSpore's pipelines have a seed.
        fast: whether it skips what was trained on without running it; within: completed steps of the epoch.
    """
    try:
        stages = _tree(dataset)
        told = [UNSEEDED] * (not seeded and bool(within) and any(map(_shuffles, stages)))
        told += [_OWN_ORDER] * (bool(within) and any(map(_has_own_sampler, stages)))
        return told + [_DRAWN_ANEW] * (seeded and fast and any(map(_augments, stages)))
    except Exception as error:  # as above
        log.debug("the training data do not say what they are: %s", error)
        return []


def _shuffles(stage: Any) -> bool:
    if _goes_by_itself(stage):
        return False
    sampler = getattr(stage, "sampler", None)
    if sampler is not None:  # `shuffle` is a bool, or a string of MindSpore's enum
        return "Random" in type(sampler).__name__ or getattr(sampler, "shuffle", None) not in (None, False, "false")
    return type(stage).__name__ == "ShuffleDataset" or getattr(stage, "shuffle_flag", 0) != 0


def _has_own_sampler(stage: Any) -> bool:
    kind = type(getattr(stage, "sampler", None))
    own = kind is not type(None) and not kind.__module__.startswith("mindspore.")
    return (own or kind.__name__ == "IterSampler") and not _goes_by_itself(stage)


def _goes_by_itself(stage: Any) -> bool:
    """Whether it is a GeneratorDataset of what can only be iterated: MindSpore gives it a sampler that nobody uses."""
    return not hasattr(getattr(stage, "source", []), "__getitem__")


def _augments(stage: Any) -> bool:
    return any(map(_draws, getattr(stage, "operations", None) or ()))


def _draws(operation: Any) -> bool:
    inner = getattr(operation, "transforms", None) or ()
    return bool(_DRAWS.search(type(operation).__name__)) or any(map(_draws, inner))


def _stages(dataset: Any) -> list[str]:
    return [type(stage).__name__ for stage in _chain(dataset)]


def _chain(dataset: Any) -> Iterator[Any]:
    for _ in range(DEEP):
        if dataset is None:
            return
        yield dataset
        dataset = next(iter(getattr(dataset, "children", None) or ()), None)


def _tree(dataset: Any) -> list[Any]:
    """All of its stages, up to a limit."""
    found = [dataset]
    for stage in found:
        found.extend((getattr(stage, "children", None) or ())[: DEEP - len(found)])
    return found
