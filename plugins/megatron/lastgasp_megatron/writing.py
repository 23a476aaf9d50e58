"""The files of one place in the model parallel grid, from the image of its first rank and the slices of the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from lastgasp.adapter.checkpoint import Staged
from lastgasp.adapter.torch import save_verified
from lastgasp_megatron.compose import with_random
from lastgasp_megatron.image import Image
from lastgasp_megatron.merge import Merged, merged, with_values
from lastgasp_megatron.own_buffers import record_of
from lastgasp_megatron.shards import Slice, copied


def write_file(
    image: Image,
    slices: Mapping[str, Slice],
    aux: Mapping[int, bytes],
    staged: Staged,
    taken: Callable[[str], Slice],
) -> None:
    """The file of a rank, and before it that of the optimizer of all ranks with the same part of the model.

    Args:
        image: with its content; slices: those that are here, by name.
        aux: random states by rank, and buffers behind them (`own_buffers.with_own`).
        taken: returns a slice that another rank has passed on.

    Raises:
        NotSaveable: a random state is not known.
        OSError: the disk refused.
    """
    assert image.content is not None
    cuts = image.shard.cuts if image.layouts else ()
    states: list[Merged] = []
    for cut, layout in zip(cuts, image.layouts, strict=True):
        found = [slices[name] if name in slices else taken(name) for name in cut.names]
        states.append(merged(layout, found, weights_only=cut.part != 0))
    # As Megatron's chain of optimizers saves it: a rank has those whose first slice it holds.
    stored = [state if cut.part == 0 else None for cut, state in zip(cuts, states, strict=True)]
    if any(state is not None for state in stored):
        content: Any = stored if len(stored) > 1 else stored[0]
        save_verified(content, staged, image.file.rpartition("/")[0] + "/distrib_optim.pt")
    content = with_random(with_values(image.content, states), image.rank, image.shard, aux)
    save_verified(content | record_of(image, aux), staged, image.file)


def slices_of(image: Image) -> dict[str, Slice]:
    """An image's slices by name, in memory of their own."""
    cuts = image.shard.cuts if image.held else ()
    return {cut.name: copied(held) for cut, held in zip(cuts, image.held, strict=True)}


def passed_on(image: Image, written: Collection[tuple[int, ...]]) -> list[str]:
    """The names of an image's slices that other ranks need for their files.

    Args:
        written: the folders (`Shard.folder`) whose files are written here.
    """
    cuts, (*where, _) = image.shard.cuts if image.held else (), image.shard.folder
    return [cut.name for cut in cuts if not {(*where, expert) for expert in cut.experts} <= {*written}]
