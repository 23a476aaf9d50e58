"""One short training with the real Megatron in this process; prints as JSON what differs in its modules afterwards.

`megatron_off.py MODE ARGUMENTS`: `stock` without lastgasp; `undone` with install before and uninstall after it.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))
_HOMES = ("megatron", "torch.distributed", "torch.optim", "torch.utils.data")
_OURS = tuple(str(TESTS.parent / folder) for folder in ("core", "plugins"))


def attributes() -> dict[str, Any]:
    """Functions and classes in modules, and everything in the classes, by dotted name."""
    return dict(_attributes())


def _attributes() -> Iterator[tuple[str, Any]]:
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(_HOMES) or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if callable(value):
                yield f"{module_name}.{name}", value
            if isinstance(value, type) and str(getattr(value, "__module__", "")).startswith(_HOMES):
                yield from ((f"{module_name}.{name}.{key}", inner) for key, inner in list(vars(value).items()))


def is_ours(value: Any) -> bool:
    """Whether its code belongs to lastgasp, whatever its name says."""
    code = getattr(inspect.unwrap(value, stop=_is_ours) if callable(value) else value, "__code__", None)
    return _is_ours(value) or str(getattr(code, "co_filename", "")).startswith(_OURS)


def _is_ours(value: Any) -> bool:
    wrapper = getattr(value, "_self_wrapper", None)  # wrapt's
    files = [getattr(getattr(one, "__code__", None), "co_filename", "") for one in (value, wrapper)]
    return any(str(file).startswith(_OURS) for file in files)


def train(arguments: list[str]) -> None:
    """As the script does when it is the program."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from support.megatron import train_gpt

    sys.argv[1:] = arguments
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, train_gpt.datasets, ModelType.encoder_or_decoder, train_gpt.forward_step)


def main(mode: str, arguments: list[str]) -> None:
    """Run with Megatron's arguments, and compare."""
    from support.megatron import cpu

    cpu.apply()
    import megatron.training  # what the script has loaded when it installs

    from support.megatron import train_gpt  # noqa: F401

    before = attributes()
    if mode == "undone":
        import lastgasp_megatron

        lastgasp_megatron.install()
    train(arguments)
    placed = [name for name, value in attributes().items() if is_ours(value)]
    if mode == "undone":
        lastgasp_megatron.uninstall()
    after = attributes()
    told = {
        "changed": sorted(name for name, value in before.items() if after.get(name) is not value),
        "placed": placed,
        "left": [name for name, value in after.items() if is_ours(value)],
        "loaded": sorted(name for name in sys.modules if name.partition(".")[0] in ("lastgasp", "lastgasp_megatron")),
        "iteration": megatron.training.get_args().curr_iteration,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    main(sys.argv[1], sys.argv[2:])
