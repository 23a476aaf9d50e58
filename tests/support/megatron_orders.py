"""Starts of a training with stand-ins of Megatron 0.12.1 and MindSpeed; prints what was called, as JSON.

Run as a program, because it imports, patches and repatches: `megatron_orders.py` runs every order, each in a child
that is forked once torch is imported, and prints `{order: {code, stderr, hooked, called}}`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed

STANDINS = Path(__file__).parents[1] / "contract/standins"

hooked: list[str] = []
"""Names of the hooks that were called, in order."""


def _recorded(installation: Any, hook: Any) -> Any:
    def around(call: Any, args: Any, kwargs: Any) -> Any:
        hooked.append(hook.name)
        if hook.name == "train":
            installation.check()
        result = call(*args, **kwargs)
        if hook.name == "setup_model_and_optimizer":
            installation.check()
        return result

    return dataclasses.replace(hook, around=around)


def late(installation: Any) -> list[Any]:
    """The real hooks, by name and needs, which only record."""
    from lastgasp_megatron.hooks import Training

    return [_recorded(installation, hook) for hook in Training(installation.check).hooks()]


def _install() -> Any:
    from lastgasp_megatron import installation as module

    module.Installation.__init__.__defaults__ = (late,)
    module.install()
    module.install()  # idempotent
    return module


def _pretrain(source: str) -> None:
    importlib.import_module(source).pretrain(None, None, None, None)


def _mindspeed() -> Any:
    return importlib.import_module("mindspeed_llm.megatron_adaptor")


def order_stock() -> None:
    """No MindSpeed; install before Megatron is imported."""
    _install()
    _pretrain("megatron.training")


def order_stock_late() -> None:
    """No MindSpeed; Megatron is imported and `pretrain` copied before install."""
    from megatron.training import pretrain

    globals()["copied"] = pretrain
    _install()
    globals()["copied"](None, None, None, None)


def order_a() -> None:
    """Install, then MindSpeed's wrappers and replacements."""
    _install()
    importlib.import_module("megatron.training.training")
    _mindspeed()
    _pretrain("megatron.training.training")


def order_b() -> None:
    """Install, then MindSpeed; the user calls MindSpeed-LLM's own pretrain."""
    _install()
    _mindspeed()
    _pretrain("mindspeed_llm.training.training")


def order_c() -> None:
    """MindSpeed, then install."""
    _mindspeed()
    _install()
    _pretrain("megatron.training.training")


def order_d() -> None:
    """MindSpeed, then install; its own pretrain, which was copied into the script."""
    _mindspeed()
    globals()["copied"] = importlib.import_module("mindspeed_llm.training.training").pretrain
    _install()
    globals()["copied"](None, None, None, None)


def order_e() -> None:
    """As B, and MindSpeed removes and reapplies everything in between."""
    adaptor = _mindspeed()
    _install()
    adaptor.repatch()
    _pretrain("mindspeed_llm.training.training")


def order_g() -> None:
    """MindSpeed removes and reapplies everything while the model is set up, before train."""
    adaptor = _mindspeed()
    _install()
    importlib.import_module("megatron.training.training")
    log = importlib.import_module("megatron.training.log")

    class Calls(list[str]):
        def append(self, name: str) -> None:
            super().append(name)
            if name == "load_checkpoint":
                adaptor.repatch()

    calls = Calls(log.calls)
    for module in list(sys.modules.values()):
        if "calls" in vars(module) and module.__name__.startswith(("megatron", "mindspeed")):
            vars(module)["calls"] = calls
    _pretrain("megatron.training.training")


def order_missing() -> None:
    """A Megatron without train_step."""
    training = importlib.import_module("megatron.training.training")
    del vars(training)["train_step"]
    _install()
    _pretrain("megatron.training.training")


def order_changed() -> None:
    """A Megatron whose train_step has other parameters."""
    training = importlib.import_module("megatron.training.training")
    vars(training)["train_step"] = lambda state: None
    _install()
    _pretrain("megatron.training.training")


def order_undo() -> None:
    """Install and uninstall: not one attribute differs."""
    _mindspeed()
    before = _attributes()
    module = _install()
    _pretrain("megatron.training.training")
    module.uninstall()
    module.uninstall()
    after = _attributes()
    changed = [key for key in before | after if before.get(key) is not after.get(key) and not _same(before, after, key)]
    hooked[:] = changed


def _same(before: dict[str, Any], after: dict[str, Any], key: str) -> bool:
    """MindSpeed builds its wrappers anew when one is taken out: what they wrap is what counts."""
    return bool(key.endswith((".train_step", ".save_checkpoint"))) and "lastgasp" not in after[key].__module__


def _attributes() -> dict[str, Any]:
    return {
        f"{name}.{attribute}": value
        for name, module in list(sys.modules.items())
        if name.startswith(("megatron", "mindspeed", "torch.distributed"))
        for attribute, value in list(vars(module).items())
        if callable(value)
    }


def order_off() -> None:
    """LASTGASP=0."""
    os.environ["LASTGASP"] = "0"
    _install()
    _pretrain("megatron.training")


def order_arguments() -> None:
    """The options are in Megatron's own parser, next to the user's."""
    _install()
    sys.argv += ["--lastgasp-dir", "/somewhere", "--lastgasp-require-manifest", "--mine", "3"]

    def provider(parser: Any) -> Any:
        parser.add_argument("--mine", type=int)
        return parser

    importlib.import_module("megatron.training").pretrain(None, None, None, None, extra_args_provider=provider)
    parsed = importlib.import_module("megatron.training.initialize").parsed[0]
    hooked[:] = [str(parsed.lastgasp_dir), str(parsed.lastgasp_require_manifest), str(parsed.mine)]


def order_marks() -> None:
    """MindSpeed replaces what is marked, before and in between; `hooked` is what was marked."""
    adaptor = _mindspeed()
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    manager = importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager
    mine = importlib.import_module("lastgasp_megatron.marks").MegatronMarks
    rows = importlib.import_module("lastgasp.steps.marks").Marks.open(rank=0, world_size=1)

    def theirs(*args: Any) -> Any:
        importlib.import_module("megatron.training.log").calls.append("mindspeed.forward_step")

    def step(number: int) -> None:
        marks.step_begins()
        schedules.forward_backward_no_pipelining(forward_step_func=print, data_iterator="", model="")
        marks.step_ends(number)

    manager.register_patch(f"{schedules.__name__}.forward_step", theirs)
    manager.apply_patches()
    marks = mine(rows, torch.device("cpu"))
    marks.install(SimpleNamespace(step=None))
    step(1)
    adaptor.repatch()
    marks.place()
    step(2)
    marks.close()
    schedules.forward_backward_no_pipelining(forward_step_func=print, data_iterator="", model="")
    hooked[:] = [one.name for one in importlib.import_module("support.ranges").seen(rows)]
    rows.close(remove=True)


def orders() -> list[str]:
    """Names of all."""
    return [name.removeprefix("order_") for name in globals() if name.startswith("order_")]


def _run(order: str, out: Path, err: Path) -> None:
    """In the child: its own output files, then the order; an exception ends it as it would end a script."""
    for path, stream in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    code = 1
    try:
        globals()[f"order_{order}"]()
        log = sys.modules.get("megatron.training.log")
        print(json.dumps({"hooked": hooked, "called": log.calls if log is not None else []}), flush=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _forked(order: str, folder: Path) -> dict[str, Any]:
    out, err = folder / f"{order}.out", folder / f"{order}.err"
    pid = os.fork()
    if pid == 0:
        _run(order, out, err)
    _, status = os.waitpid(pid, 0)
    lines = out.read_text().splitlines()
    said: dict[str, Any] = json.loads(lines[-1]) if lines else {"hooked": [], "called": []}
    return said | {"code": os.waitstatus_to_exitcode(status), "stderr": err.read_text()}


def main() -> None:
    """Run all."""
    sys.path[:0] = [str(STANDINS), str(Path(__file__).parents[1])]
    sys.argv = sys.argv[:1]
    importlib.import_module("lastgasp_megatron.hooks")
    torch.distributed.init_process_group = lambda *args, **kwargs: None
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({order: _forked(order, Path(folder)) for order in orders()}))


if __name__ == "__main__":
    main()
