"""What is wrapped when, in a process with the real MindFormers. Prints one JSON object.

Usage: hooks_child.py CASE DIRECTORY, with CASE off, quiet, yaml, again, entry, object, plain, drift.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

if __name__ == "__main__":
    gc.disable()  # until everything is imported: a quarter of the time

import mindspore.train.model as model_module
from mindformers.generation.text_generator import GenerationMixin
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.trainer import base_trainer, trainer
from mindspore import nn

from lastgasp.adapter import HookNotPlaced
from lastgasp_mindformers import hooks, install, uninstall

gc.freeze()
gc.enable()
Snapshot = Mapping[str, int]
CLASSES = (model_module.Model, trainer.Trainer, base_trainer.BaseTrainer, GenerationMixin)
PACKAGES = ("mindspore", "mindformers")


class Stop(Exception):
    """Ends the real `Trainer.train` at its first look at the configuration."""


class Config(dict):  # type: ignore[type-arg]
    """A configuration that reports what is wrapped while the real `Trainer.train` looks at it."""

    look: Callable[[], None]

    @property
    def runner_config(self) -> Any:
        """The first thing that every version reads."""
        self.look()
        raise Stop


def snapshot() -> Snapshot:
    """Every attribute of every module of the two, and of the classes that we may touch."""
    found: dict[str, int] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in PACKAGES and isinstance(module, ModuleType):
            found |= {f"{name}.{key}": id(value) for key, value in list(vars(module).items())}
    for owner in CLASSES:
        found |= {f"{owner.__name__}.{key}": id(value) for key, value in vars(owner).items()}
    for kind, entries in MindFormerRegister.registry.items():
        found |= {f"registry.{kind}.{key}": id(value) for key, value in entries.items()}
    return found


def changes(before: Snapshot) -> list[str]:
    """What has another value now, or has gone or come."""
    now = snapshot()
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


class FakeRun:
    """Takes notes in place of a session."""

    notes: list[Any]

    def __init__(self, options: Any) -> None:
        self.notes.append(["run", str(options.gasp.directory)])
        self.selector = self

    def steer(self, config: Any, arguments: dict[str, Any]) -> None:
        self.notes.append(["steer", sorted(arguments)])
        arguments["resume_training"] = False

    def check(self, config: Any) -> None:
        self.notes.append(["check", config["name"]])

    def attach(self, model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        self.notes.append(["attach", type(arguments["callbacks"]).__name__, sorted(arguments)])
        return arguments

    def end_early(self, error: BaseException) -> None:
        self.notes.append(["end_early", type(error).__name__])

    def close(self, goodbye: bool) -> None:
        self.notes.append(["close", goodbye])


def train(config: Config, callbacks: object, **arguments: Any) -> str:
    """The real `Trainer.train`, up to its first look."""
    try:
        trainer.Trainer.train(SimpleNamespace(config=config, callbacks=callbacks), **arguments)
    except Stop:
        return "Stop"
    return ""


def model_train(*more: Any, **arguments: Any) -> str:
    """The real `Model.train`, which refuses an epoch that is not a number."""
    network = nn.Dense(2, 2)
    model = model_module.Model(network, nn.MSELoss(), nn.SGD(network.trainable_params()))
    try:
        model.train("no number", None, *more, **arguments)
    except Exception as error:
        return type(error).__name__
    return ""


def main() -> dict[str, Any]:
    """One case."""
    case, directory = sys.argv[1:]
    told: dict[str, Any] = {}
    FakeRun.notes = told["notes"] = []
    vars(hooks)["new_run"] = FakeRun
    model_train()  # MindSpore imports more of its modules with the first one
    before = snapshot()
    if case == "drift":
        del model_module.Model.fit
        os.environ["LASTGASP"] = "1"
        try:
            install()
        except HookNotPlaced as error:
            told |= {"expected": error.expected, "found": error.found, "message": str(error)}
        return told
    told["installed"] = [install(), install()]
    told["waiting"] = changes(before)
    config = Config(name="given", output_dir=directory)
    if case == "again":
        from lastgasp_mindformers import run

        run.begins(Path(directory))
    if case in ("yaml", "again"):
        config["lastgasp"] = {"enable": True}
    if case == "entry":
        config["callbacks"] = [{"type": "LastGasp"}]
    callbacks = None
    if case == "object":
        from lastgasp_mindformers import LastGasp

        callbacks = [LastGasp(Path(directory, "object"))]
    config.look = lambda: told.update(training=changes(before))
    told["trained"] = train(config, callbacks, resume_training=True)
    told["after"] = changes(before)
    if case == "entry":
        told["entry"] = config["callbacks"][0]
        told["registered"] = MindFormerRegister.get_cls(MindFormerModuleType.CALLBACK, "LastGasp").__module__
    if case in ("plain", "off", "quiet"):
        told["plain"] = model_train(())
    uninstall()
    uninstall()
    told["end"] = [name for name in changes(before) if not name.startswith("registry.")]
    return told


if __name__ == "__main__":
    print("TOLD " + json.dumps(main()), flush=True)
