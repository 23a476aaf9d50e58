"""Makes MindFormers load what was selected (docs/facts/mindformers.md §2, §5): its resume options, in both spellings.

`load_checkpoint` up to 1.8, `checkpoint.load_path` from 1.9 on; arguments of `Trainer.train` and `Trainer.finetune`
overrule both inside them, so they are set as well.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastgasp.adapter import ConfigError
from lastgasp.adapter.files import make_directory
from lastgasp.adapter.mindspore import LegacyName

log = logging.getLogger("lastgasp")

Config = MutableMapping[str, Any]
_OLD = ("train_checkpoint", "finetune_checkpoint")
"""Deprecated arguments that beat `resume_from_checkpoint`."""
_IGNORE, _SKIP = "ignore_data_skip", "data_skip_steps"
_ASIDE, _COMPLETE = ".lastgasp-load", "hyper_param.safetensors"


@dataclass(frozen=True)
class ResumeRequest:
    """What the user's configuration and the call's arguments ask for.

    Args:
        load: the path to load from; None where there is none.
        resume: whether training resumes from there; a name where one checkpoint is meant.
        newer: whether checkpoints are of the newer format.
        parallel: whether MindFormers runs in parallel.
        saves: where CheckpointMonitor saves.
    """

    load: Path | None
    resume: bool | str
    newer: bool
    parallel: bool
    saves: Path


@dataclass(frozen=True)
class LoadPlan:
    """What MindFormers is to load, in its own options.

    Args:
        load: for `load_checkpoint`; empty: nothing.
        resume: for `resume_training`.
        ext: for `load_ckpt_format`; empty leaves it.
        ours: whether the user did not ask to resume, so that what he set for other weights must not apply.
        step: completed updates of what is loaded.
        own: whether this training itself has saved it since its options were given.
    """

    load: str
    resume: bool | str
    ext: str = ""
    ours: bool = False
    step: int = 0
    own: bool = False


def resume_request_of(config: Config, arguments: Config) -> ResumeRequest:
    """Read the configuration as MindFormers will."""
    section = config.get("checkpoint") or {}
    newer = not config.get("use_legacy_format", True) or bool(section)
    load: Any = section.get("load_path") or config.get("load_checkpoint")
    for name in ("resume_from_checkpoint", *_OLD):
        given = arguments.get(name)
        load = given if isinstance(given, str) else True if given is True else load
    resume = arguments.get("resume_training")
    resume = config.get("resume_training") if resume is None else resume
    if section.get("no_load_optim") is not None:
        resume = not section.get("no_load_optim")
    output = Path(config.get("output_dir") or "./output").expanduser().absolute()
    saves = _directory_of_monitor(config, newer) or output / "checkpoint"
    if load is True:  # "the last one of the previous round"
        load, resume = str(saves), resume or True
    parallel = bool(config.get("use_parallel"))
    return ResumeRequest(Path(load).absolute() if load else None, resume or False, newer, parallel, saves)


def chooses_itself(config: Config, newer: bool) -> bool:
    """Whether MindFormers is to resume from the newest checkpoint that its own health check has passed.

    Raises:
        ConfigError: in the newer format it then loads that one whatever `load_path` says, and knows no gasp.
    """
    health = (config.get("monitor_config") or {}).get("health_checkpoint") or {}
    monitored = bool(config.get("use_checkpoint_health_monitor"))
    threshold = health.get("embedding_local_norm_threshold")
    if newer and (threshold or monitored):
        field = "monitor_config.health_checkpoint.embedding_local_norm_threshold"
        remedy = (
            "Take it out (and use_checkpoint_health_monitor): with it MindFormers passes over what lastgasp has saved "
            "and verified. Or turn lastgasp off."
        )
        raise ConfigError(field, threshold or f"use_checkpoint_health_monitor: {monitored}", "nothing", remedy)
    return monitored


def _directory_of_monitor(config: Config, newer: bool) -> Path | None:
    for callback in config.get("callbacks") or []:
        if callback.get("type") == "CheckpointMonitor" and callback.get("directory"):
            given = Path(callback["directory"]).absolute()
            return given if newer else given / "checkpoint"
    return None


def load_plan_for(name: LegacyName, directory: Path, rank: int, parallel: bool, ours: bool) -> LoadPlan:
    """For a legacy checkpoint. Raises OSError: the second name of the file cannot be made.

    MindFormers takes the directory and a name, in which it puts the rank, but no safetensors from `rank_*` in a
    job that is not parallel, and from 1.9 on no single file to resume from. Then it gets a directory in which the file
    has the name of complete weights with everything that a resume needs.
    """
    if parallel or name.ext == "ckpt":
        return LoadPlan(str(directory), name.base(rank), name.ext, ours)
    return LoadPlan(str(_alone(directory / name.file(rank), directory / _ASIDE)), True, name.ext, ours)


def _alone(path: Path, folder: Path) -> Path:
    """A directory that holds that file only."""
    make_directory(folder)
    link = folder / _COMPLETE
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(path, folder))
    return folder


def apply(plan: LoadPlan, config: Config, arguments: Config) -> None:
    """Set configuration and arguments."""
    for name in _OLD:
        if arguments.get(name):
            arguments[name] = False
    arguments.pop("resume_from_checkpoint", None)
    if plan.load:
        arguments["resume_from_checkpoint"] = plan.load
    arguments["resume_training"] = plan.resume
    config["load_checkpoint"], config["resume_training"] = plan.load, plan.resume
    section = config.get("checkpoint")
    if section:
        section["load_path"], section["no_load_optim"] = plan.load, not plan.resume
    if plan.ext:
        config["load_ckpt_format"] = plan.ext
    if plan.load and (plan.ours or plan.own) and converts(config, arguments):
        config["auto_trans_ckpt"] = False
        if arguments.get("auto_trans_ckpt"):
            arguments["auto_trans_ckpt"] = False
        log.warning("auto_trans_ckpt was meant for other weights: what this job has saved needs no conversion")
    if plan.load and plan.ours and data_of_the_start(config, arguments):
        _go_on_in_the_data(plan.step, config, arguments)


def converts(config: Config, arguments: Config) -> bool:
    """Whether MindFormers is to convert what it loads from another number of ranks, or another parallel strategy."""
    return bool(config.get("auto_trans_ckpt") or arguments.get("auto_trans_ckpt"))


def data_of_the_start(config: Config, arguments: Config) -> str:
    """The options by which the data of a training begin elsewhere than it does itself; empty where there are none."""
    return ", ".join(name for name in (_IGNORE, _SKIP) if _given(name, config, arguments))


def _go_on_in_the_data(step: int, config: Config, arguments: Config) -> None:
    """A training that has begun there goes on behind what it has seen: MindFormers would begin there once more."""
    skipped = 0 if _given(_IGNORE, config, arguments) else int(_given(_SKIP, config, arguments) or 0)
    for name, value in ((_IGNORE, False), (_SKIP, skipped + step if skipped else 0)):  # 0: those of the steps
        config[name] = value
        if arguments.get(name) is not None:
            arguments[name] = value


def _given(name: str, config: Config, arguments: Config) -> Any:
    return config.get(name) if arguments.get(name) is None else arguments[name]


def check(plan: LoadPlan, config: Config) -> None:
    """Check that the decision is still in effect.

    Raises:
        ConfigError: something has changed it in between.
    """
    section = config.get("checkpoint") or {}
    found = section["load_path"] if "load_path" in section else config.get("load_checkpoint")
    if (found or "").rstrip("/") != plan.load.rstrip("/"):
        remedy = "Is another hook between Trainer.train and training_process? Take it out, or turn lastgasp off."
        raise ConfigError("load_checkpoint", found, repr(plan.load), remedy)
