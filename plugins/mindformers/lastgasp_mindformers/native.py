"""What a checkpoint of this job looks like: as CheckpointMonitor writes it, or MindSpore's own where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mindspore
from mindspore._c_expression import TensorPy

from lastgasp.adapter import ConfigError
from lastgasp.adapter.mindspore import Extension, LegacyName
from lastgasp_mindformers.aux_state import Numbers, loss_scale
from lastgasp_mindformers.image import Held, Image
from lastgasp_mindformers.targets import Target, iteration_target, legacy_target

PREFIX = "lastgasp"
"""The prefix of names if there is no CheckpointMonitor."""
_NOT_SAVED = ("accu_grads",)
_SPLIT = ("semi_auto_parallel", "auto_parallel")


class Native:
    """Names and writes checkpoints.

    Args:
        train_network: what `Model` trains: the network and its optimizer.
        callbacks: those of the training.
        directory: for a job without a CheckpointMonitor.

    Raises:
        ConfigError: CheckpointMonitor is set to what cannot be written by the survivors.
    """

    def __init__(self, train_network: Any, callbacks: Sequence[Any], directory: Path) -> None:
        self._network, self._directory = train_network, directory
        self._monitor = monitor_of(callbacks)
        if self._monitor is not None:
            _check(self._monitor)

    @property
    def directory(self) -> Path:
        """Where `rank_R` folders are; the same on all ranks."""
        return Path(self._monitor._directory).absolute().parent if self._monitor is not None else self._directory

    @property
    def completed_before(self) -> int:
        """Steps that earlier runs of the job completed, as CheckpointMonitor counts them."""
        return int(getattr(self._monitor, "_append_step_num", 0) or 0)

    def target(self, numbers: Numbers, ranks: Iterable[int]) -> Target:
        """The path of the checkpoint of a step. Looked up late: CheckpointMonitor settles its prefix at the start."""
        if self._monitor is None:
            return legacy_target(LegacyName(PREFIX, numbers.epoch, numbers.within, "ckpt"), ranks)
        extension: Extension = "ckpt" if self._monitor._config.format == "ckpt" else "safetensors"
        name = LegacyName.of_monitor(self._monitor._prefix, numbers.epoch, numbers.within, extension)
        return legacy_target(name, ranks)

    def parameters(self) -> dict[str, Any]:
        """What `write` writes of the live parameters, by the names in a file.

        Raises:
            ValueError: a parameter that lies elsewhere.
        """
        found = {}
        split = mindspore.get_auto_parallel_context("parallel_mode") in _SPLIT
        for _, param in self._network.parameters_and_names():
            unused = split and (not param.sliced or param.has_init)  # as MindSpore's own save says
            if unused or param.param_info.is_pipeline_shared_param or not self._is_saved(param.name):
                continue
            if param.cache_enable or param.data.offload_file_path():
                raise ValueError(f"{param.name} is not all in the device's memory (a cache, or offloaded)")
            found[param.name] = param
        return found

    def write(self, folder: Path, files: Sequence[str], numbers: Numbers, statistics: Mapping[str, Any]) -> None:
        """Write the live parameters, with the values in `statistics` where given. Raises OSError.

        MindSpore writes; nothing in it is a collective, since nothing is integrated over ranks.
        """
        count = None if self._monitor is None else _optimizer(self._network).global_step
        self._save(self._network, folder / files[0], numbers, statistics, count)

    def write_image(
        self, folder: Path, files: Sequence[str], image: Image, numbers: Numbers, statistics: Mapping[str, Any]
    ) -> None:
        """The same with what the image holds in place of the live parameters."""
        held = {one.name: tensor_of(image, one) for one in image.held.values()}
        count = None if self._monitor is None else held[_optimizer(self._network).global_step.name]
        stored = [{"name": name, "data": data} for name, data in held.items()]
        self._save(stored, folder / files[0], numbers, statistics, count)

    def _save(self, stored: Any, path: Path, numbers: Numbers, statistics: Mapping[str, Any], count: Any) -> None:
        monitor, keep = self._monitor, self._kept(statistics)
        config = monitor._config if monitor is not None else None
        tensors = {name: mindspore.Tensor(value) for name, value in statistics.items() if self._is_saved(name)}
        extra = {} if config is None else {"enc_key": config.enc_key, "enc_mode": config.enc_mode}
        mindspore.save_checkpoint(
            stored,
            str(path),
            integrated_save=False,
            append_dict=tensors | self._appended(numbers, statistics, count),
            choice_func=keep,
            format=path.suffix[1:],
            **extra,
        )

    def _appended(self, numbers: Numbers, statistics: Mapping[str, Any], count: Any) -> dict[str, Any]:
        """What CheckpointMonitor adds to the parameters (docs/facts/mindformers.md §5)."""
        given = dict(getattr(self._monitor, "_append_dict", None) or {})
        given.pop("__exception_save__", None)
        given |= {"epoch_num": numbers.epoch, "step_num": numbers.step}
        if self._monitor is not None:
            given["global_step"] = count
            batch = getattr(self._monitor, "global_batch_size", None)
            given |= {"global_batch_size": batch} if batch is not None else {}
        if (scale := loss_scale(numbers, statistics)) is not None:
            given["loss_scale"] = scale
        return given

    def _is_saved(self, name: str) -> bool:
        if hasattr(self._monitor, "_filter_ckpt_not_save"):
            return bool(self._monitor._filter_ckpt_not_save(name, self._monitor.filter_list))
        return not name.startswith(_NOT_SAVED)

    def _kept(self, statistics: Mapping[str, Any]) -> Callable[[str], bool]:
        return lambda name: self._is_saved(name) and name not in statistics


def monitor_of(callbacks: Sequence[Any]) -> Any:
    """MindFormers' CheckpointMonitor among `callbacks`; None where there is none."""
    return next((callback for callback in callbacks if _is_monitor(type(callback))), None)


def _is_monitor(kind: type) -> bool:
    return any(one.__name__ == "CheckpointMonitor" and one.__module__.startswith("mindformers.") for one in kind.mro())


class Iterations:
    """The newer format of MindFormers, in a job of one process: a directory `iteration_NNNNNNNN`.

    Args:
        train_network: what `Model` trains; monitor: its CheckpointMonitor.
        ranks: of the job.

    Raises:
        ConfigError: of several ranks, whose `metadata.json` only all of them together can write.
    """

    def __init__(self, train_network: Any, monitor: Any, ranks: int) -> None:
        if ranks > 1:
            remedy = "Set use_legacy_format: True, or leave the section `checkpoint:` out of the YAML."
            raise ConfigError("use_legacy_format", False, "True in a job of several ranks", remedy)
        self._network, self._monitor = train_network, monitor

    @property
    def directory(self) -> Path:
        """Where `iteration_*` are."""
        if self._monitor.directory:
            return Path(self._monitor.directory).resolve()
        from mindformers.tools.utils import get_output_subpath

        return Path(get_output_subpath("checkpoint", append_rank=False)).absolute()

    @property
    def completed_before(self) -> int:
        """As `Native.completed_before`."""
        return int(self._monitor._append_step_num or 0)

    def target(self, numbers: Numbers, ranks: Iterable[int]) -> Target:
        """The path of the checkpoint of a step."""
        return iteration_target(numbers.step, self._monitor.origin_prefix, ["model", *self._optimizer()])

    def _optimizer(self) -> list[str]:
        return ["opt"] if self._monitor.save_optimizer else []

    def write(self, folder: Path, files: Sequence[str], numbers: Numbers, statistics: Mapping[str, Any]) -> None:
        """The files of MindFormers' own `save_checkpoint`, which has barriers and removes before it writes."""
        network, optimizer = self._network.network, self._network.optimizer
        content = {
            "epoch_num": numbers.epoch,
            "step_num": numbers.step,
            "global_step": int(optimizer.global_step),
            "loss_scale": loss_scale(numbers, statistics),
            "global_batch_size": self._monitor.global_batch_size,
            "ckpt_status": None,
        }
        write_iteration(folder, files, (network, optimizer if self._optimizer() else None), statistics, content)


def write_iteration(
    folder: Path,
    files: Sequence[str],
    cells: tuple[Any, Any],
    statistics: Mapping[str, Any],
    content: Mapping[str, Any],
) -> None:
    """The files of one `iteration_*` directory of one process: weights, optimizer, common.json.

    Args:
        folder: where to; files: names of the weights' file, of the optimizer's where there is one, of the last.
        cells: the network, and the optimizer or None.
        statistics: name -> value, in place of what the network holds.
        content: of the last file.
    """
    network, optimizer = cells
    weights = {param.name for param in network.get_parameters()}
    own = {param.name for param in optimizer.get_parameters()} - weights if optimizer is not None else set()

    def save(cell: Any, file: str, names: set[str]) -> None:
        told = {name: mindspore.Tensor(value) for name, value in statistics.items() if name in names}
        live = names - told.keys()
        path = str(folder / file)
        mindspore.save_checkpoint(cell, path, append_dict=told, choice_func=live.__contains__, format="safetensors")

    save(network, files[0], weights)
    if optimizer is not None:
        save(optimizer, files[1], own)
    (folder / files[-1]).write_text(json.dumps(content, indent=4))


def native_of(train_network: Any, callbacks: Sequence[Any], directory: Path, ranks: int) -> Native | Iterations:
    """How this job writes checkpoints.

    Raises:
        ConfigError: as `Native` and `Iterations`.
    """
    monitor = monitor_of(callbacks)
    if monitor is not None and not getattr(monitor, "use_legacy_format", True):  # 1.6.0 has only that one
        return Iterations(train_network, monitor, ranks)
    return Native(train_network, callbacks, directory)


def tensor_of(image: Image, one: Held) -> Any:
    """A parameter of an image as MindSpore's own; a copy."""
    kind = mindspore.bool_ if one.kind == "Bool" else getattr(mindspore, one.kind.lower())
    return mindspore.Tensor(TensorPy.convert_bytes_to_tensor(bytes(image.bytes_of(one)), one.shape, kind))


def _check(monitor: Any) -> None:
    if getattr(monitor._config, "remove_redundancy", False):
        remedy = "Leave remove_redundancy out: a file without its redundant parts needs the files of dead ranks."
        raise ConfigError("remove_redundancy", True, "False", remedy)
    if getattr(monitor._config, "saved_network", None) is not None:
        remedy = "Leave saved_network out: a training resumes from its checkpoints. Export weights by another callback."
        raise ConfigError("saved_network of CheckpointMonitor", "a network", "None", remedy)


def _optimizer(train_network: Any) -> Any:
    return train_network.optimizer if hasattr(train_network, "optimizer") else train_network.network.optimizer
