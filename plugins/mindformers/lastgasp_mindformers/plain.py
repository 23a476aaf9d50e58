"""Resume a plain `Model.train`: weights, epoch and step, and the position in the data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mindspore

from lastgasp.adapter import CheckpointError, Layout
from lastgasp_mindformers import data
from lastgasp_mindformers.preload import FilePreload

if TYPE_CHECKING:
    from lastgasp_mindformers.reload import MindFormersSelector

_NO_SEED = 5489
"""What `get_seed` says where none was set."""


def load(
    selector: MindFormersSelector, network: Any, arguments: dict[str, Any], places: Sequence[tuple[Path, Layout]]
) -> tuple[dict[str, Any], bytes]:
    """Load the newest good checkpoint, if there is one.

    Args:
        selector: says which, the same on all ranks; network: the train network.
        arguments: of the call of `Model.train`; places: where to look, with the layout of checkpoints there.

    Returns:
        The arguments to call it with, and the auxiliary state of this rank (empty where there is none).

    Raises:
        CheckpointError: all are of another network, or bad.
    """
    choice = selector.choose_plain(places, partial(_into, network), FilePreload)
    if choice is None:
        return arguments, b""
    dataset = arguments["train_dataset"]
    size = data.steps_of_epoch(arguments, mindspore.get_context("device_target"))
    dataset.set_init_step(choice.step)
    begun = choice.step // size
    if arguments.get("initial_epoch"):  # the user's own count of epochs, in which the file is named
        begun = choice.epoch if choice.step % size == 0 else choice.epoch - 1
    return arguments | {"initial_epoch": begun}, choice.aux


def not_repeated(dataset: Any, step: int) -> list[str]:
    """What of these data is not as it would have been behind a resume from that step."""
    config = mindspore.dataset.config
    seeded, fast = config.get_seed() != _NO_SEED, config.get_fast_recovery()
    return data.not_repeated(dataset, seeded=seeded, fast=fast, within=step % int(dataset.get_dataset_size()))


def fewer(saved: int, now: int) -> str:
    """The message where fewer epochs are asked for than when the checkpoint was saved; empty where not, or unknown."""
    if now >= saved:
        return ""
    return (
        f"Model.train was to train {saved} epochs in all, and is to train {now} now: it ends behind epoch {now}. Where "
        "the script loads its newest checkpoint itself and passes the number of epochs that are left, it must pass all "
        "of them: lastgasp resumes, and counts the epochs that are trained"
    )


def _into(network: Any, path: Path, values: Any) -> None:
    if values is None:
        values = mindspore.load_checkpoint(str(path), format=path.suffix[1:])
    missing, _ = mindspore.load_param_into_net(network, values)
    if missing:
        few = ", ".join(sorted(missing)[:3])
        raise CheckpointError(
            f"{path} does not hold {len(missing)} parameters of this training ({few}, ...). It is of another network "
            "or optimizer: give LastGasp another directory, or resume='never'."
        )
