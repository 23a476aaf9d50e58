"""Random operations in the graph whose place in their sequence is in a kernel of MindSpore, and in no checkpoint.

Those of the default generator (`mint`, `ops` with a generator) go on behind a resume. One with a seed of its own, which
`mindspore.set_seed` gives to `nn.Dropout`, begins its sequence anew in each process.
"""

from __future__ import annotations

from typing import Any

_SEEDS = ("seed0", "seed1", "Seed0", "Seed1")


def repeated(network: Any) -> str:
    """What to say of those in cells of the network, where training resumes; empty where there is none.

    What a function draws inside of `construct` (`ops.standard_normal`) is made by the compiler, and not seen here.
    """
    found = [
        type(primitive).__name__
        for _, cell in network.cells_and_names()
        for primitive in (getattr(cell, "_primitives", None) or {}).values()
        if any(_number(primitive, name) for name in _SEEDS) and _number(primitive, "keep_prob") != 1
    ]
    if not found:
        return ""
    return (
        f"random operations of the network ({', '.join(sorted(set(found))[:3])}; {len(found)} in all) begin their "
        "sequences anew behind this resume: its first steps draw what the first steps of the training drew (masks of "
        "dropout). MindSpore keeps their place in its kernels, and in no checkpoint"
    )


def _number(primitive: Any, name: str) -> Any:
    value = getattr(primitive, name, None)
    return value if isinstance(value, int | float) else None
