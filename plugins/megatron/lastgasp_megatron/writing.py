"""The files of one place in the model parallel grid, from the image of its first rank and the slices of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lastgasp.adapter.checkpoint import Staged
from lastgasp.adapter.torch import save_verified
from lastgasp_megatron.compose import with_random
from lastgasp_megatron.image import Image
from lastgasp_megatron.merge import merged, with_values
from lastgasp_megatron.shards import Slice


def write_file(
    image: Image,
    slices: Mapping[str, Slice],
    aux: Mapping[int, bytes],
    staged: Staged,
    taken: Callable[[str], Slice],
) -> None:
    """The file of a rank, and before it that of the optimizer of all ranks with the same part of the model.

    Args:
        image: with its content; slices: those that are here, by name; aux: random states by rank.
        taken: returns a slice that another rank has passed on.

    Raises:
        NotSaveable: a random state is not known.
        OSError: the disk refused.
    """
    assert image.content is not None
    state: dict[Any, Any] = {}
    if image.layout is not None:
        names = image.shard.names
        others = {name: taken(name) for name in names if name not in slices}
        state = merged(image.layout, [{**slices, **others}[name] for name in names])
        save_verified(state, staged, image.file.rpartition("/")[0] + "/distrib_optim.pt")
    content = with_random(with_values(image.content, state), image.rank, image.shard, aux)
    save_verified(content, staged, image.file)
