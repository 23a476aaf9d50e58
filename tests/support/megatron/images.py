"""Images of the stand-in optimizers of `slices`, as objects and as what lies in an arena."""

from __future__ import annotations

from typing import Any

from lastgasp_megatron.image import Image, encoded
from lastgasp_megatron.merge import layout_of, weights_of_merged
from lastgasp_megatron.shards import held_of
from lastgasp_megatron.topology import Shard
from support.megatron.slices import optimizers


def image(part: int, parts: int, **more: Any) -> Image:
    """What the rank of that part holds of step 7; `more` goes into its file, if it has one."""
    params, _, found = optimizers(parts)
    content = {"model": {str(i): weights_of_merged(found[0])[id(param)] for i, param in enumerate(params)}}
    return Image(
        rank=part,
        shard=Shard(tensor=0, pipeline=0, part=part, parts=parts, data_ranks=tuple(range(parts))),
        step=7,
        file="iter_0000007/mp_rank_00/model_optim_rng.pt",
        content=content | more if part == 0 else None,
        held=(held_of(found[part], parts),),
        layouts=(layout_of(found[part]),),
        aux=b"random",
        looked=True,
    )


def payload(one: Image) -> memoryview:
    """Its bytes."""
    return memoryview(bytearray().join(encoded(one, lambda number, flat: flat.cpu())))
