"""Parts of DeepSpeed's engines as bytes, and where their updates begin and end: without DeepSpeed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lastgasp.errors import CheckpointMismatch, ConfigError
from lastgasp.pytorch import TorchState
from lastgasp.pytorch.deepspeed import EngineOptimizer, capture, files_of, parse, restore, unsupported
from lastgasp.pytorch.deepspeed.engine import load_engine
from lastgasp.pytorch.deepspeed.layout import LAYOUT, gasp_path, periodic_path
from lastgasp.pytorch.loop.not_saved import NotSaved


class DeepSpeedEngine(nn.Module):
    """Has what is asked of DeepSpeed's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        inside = torch.optim.AdamW(self.module.parameters(), lr=0.5)
        self.optimizer = SimpleNamespace(
            optimizer=inside, param_groups=inside.param_groups, state_dict=inside.state_dict
        )
        self.lr_scheduler, self.config = object(), {"zero": 3}
        self.global_steps = self.micro_steps = self.updates = 0
        self.stage, self.has_moe_layers, self.mp_world_size, self.seq_dp_world_size = 3, False, 1, 2
        self.save_non_zero_checkpoint = self.save_zero_checkpoint = True
        self.checkpoint_engine = SimpleNamespace(is_decoupled=lambda: False)
        self._config = SimpleNamespace(zero_config=SimpleNamespace(offload_optimizer=None))

    def zero_optimization_stage(self) -> int:
        return self.stage

    def zero_optimization(self) -> bool:
        return True

    zero_optimization_partition_gradients = zero_optimization

    def module_state_dict(self) -> dict[str, Any]:
        return dict(self.module.state_dict())

    def _get_ckpt_name(self, folder: str, tag: str) -> str:
        return f"{folder}/{tag}/model.pt"

    def _get_zero_ckpt_name(self, folder: str, tag: str) -> str:
        return f"{tag}/zero.pt"

    def _common_checkpoint_state(self, module: dict[str, Any], zero: bool, frozen: bool) -> dict[str, Any]:
        return {"module": module, "global_steps": self.global_steps}

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % 2 == 0

    def load_checkpoint(self, path: str) -> tuple[str | None, dict[str, Any]]:
        return (path if "there" in path else None), {}

    def step(self) -> str:
        if self.is_gradient_accumulation_boundary():
            self.updates += 1
            if self.updates == 2:
                raise RuntimeError("a peer is gone")
        self.micro_steps += 1
        return "stepped"


def test_objects_come_back_from_bytes() -> None:
    line = torch.arange(10.0)
    part = line[2:5]
    given = {
        "line": line, "same": [part, part], "bf16": torch.ones(3, 2).bfloat16(), "none": torch.empty(0),
        "turned": torch.arange(6).view(2, 3).t(), "step": torch.tensor(7), "more": ("text", {1: None}),
    }  # fmt: skip
    captured = capture(given, 1, 2)
    line[3] = -1.0  # tensors are followed where they lie
    raw = b"".join(bytes(piece) for piece in captured.payload())
    assert (parse(raw)[0].rank, parse(raw)[0].world_size) == (1, 2)
    for found in (restore(raw), restore(bytearray(raw)), captured.objects()):
        assert found["more"] == given["more"] and found["same"][0] is found["same"][1]
        assert found["same"][0].tolist() == [2.0, -1.0, 4.0] and found["none"].shape == (0,)
        for name in ("line", "bf16", "turned", "step"):
            assert torch.equal(found[name], given[name]) and found[name].dtype == given[name].dtype  # type: ignore[arg-type, attr-defined]
    for damaged in (b"", raw[:20], raw[:-1], b"\0" + raw[1:], raw[:40] + b"\xff" * 20 + raw[60:]):
        with pytest.raises(ValueError):
            parse(damaged)
    with pytest.raises(ValueError, match="cannot be pickled"):
        capture({"x": lambda: None}, 0, 1)


def test_files_of_an_engine() -> None:
    """Buffers as they are now; a parameter that stage 3 keeps whole leaves no more than its place."""
    engine = DeepSpeedEngine()
    weight: Any = engine.module[0].weight
    weight.ds_id = 0
    engine.global_steps = 5
    found = files_of(engine)
    assert list(found) == ["global_step5/model.pt", "global_step5/zero.pt"]
    module = found["global_step5/model.pt"]["module"]
    engine.module[1].running_mean.fill_(9.0)  # type: ignore[operator]
    assert module["0.weight"].shape == (0,) and module["0.bias"].shape == (4,)
    assert module["1.running_mean"].tolist() == [0.0] * 4


def test_an_update_is_a_step_of_the_engine_at_the_boundary() -> None:
    engine, seen = DeepSpeedEngine(), list[str]()
    shown = EngineOptimizer(engine)
    before = shown.register_step_pre_hook(lambda *_: seen.append("begins"))
    shown.register_step_post_hook(lambda *_: seen.append("ends"))
    assert [engine.step(), engine.step()] == ["stepped", "stepped"] and seen == ["begins", "ends"]
    engine.step()
    with pytest.raises(RuntimeError):
        engine.step()
    assert seen == ["begins", "ends", "begins"]  # this update never ended
    before.remove()
    before.remove()
    assert shown.inner is engine.optimizer.optimizer and shown.param_groups[0]["lr"] == 0.5


def test_a_loop_that_sees_to_accumulation_itself_updates_in_each_step() -> None:
    engine, seen = DeepSpeedEngine(), list[str]()
    engine.managed_gradient_accumulation = lambda: False  # type: ignore[assignment]
    shown = EngineOptimizer(engine)
    shown.register_step_pre_hook(lambda *_: seen.append("begins"))
    shown.register_step_post_hook(lambda *_: seen.append("ends"))
    assert [engine.step(), engine.step()] == ["stepped", "stepped"] and seen == ["begins", "ends"] * 2


def test_what_the_engine_counts_itself_is_saved_and_not_noted() -> None:
    engine = DeepSpeedEngine()
    engine.module.add_module("more", Counting())
    unsaved = NotSaved(TorchState(engine))
    engine.global_steps, engine.micro_steps = 3, 6
    assert unsaved.notes() == []
    engine.module.more.calls = 1  # type: ignore[union-attr]
    assert ": more.calls. No checkpoint" in unsaved.notes()[0]


class Counting(nn.Module):
    """Keeps a number."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0


def test_what_a_state_takes_and_refuses() -> None:
    engine = DeepSpeedEngine()
    for given in (None, engine.optimizer, engine.optimizer.optimizer):
        state = TorchState(engine, given, engine.lr_scheduler)
        assert state.sharded and not state.schedulers and state.groups(2) == ((0,), (1,))
        assert state.layout.LAYOUT is LAYOUT
    with pytest.raises(ConfigError, match="none beside a DeepSpeed engine"):
        TorchState(engine, torch.optim.SGD(engine.parameters()))
    with pytest.raises(ConfigError, match="alone"):
        TorchState([engine, nn.Linear(1, 1)])
    bare = DeepSpeedEngine()
    bare.optimizer = None  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="without a ZeRO optimizer"):
        TorchState(bare)
    assert unsupported(engine, 2) is None
    for name, value, text in (
        ("stage", 0, "stage 0"), ("has_moe_layers", True, "MoE"), ("mp_world_size", 2, "model parallelism"),
        ("seq_dp_world_size", 1, "sequence"),
        ("checkpoint_engine", SimpleNamespace(is_decoupled=lambda: True), "decoupled"),
        ("_config", SimpleNamespace(zero_config=SimpleNamespace(offload_optimizer=SimpleNamespace(device="cpu"))),
         "offload_optimizer (cpu)"),
    ):  # fmt: skip
        other: Any = DeepSpeedEngine()
        setattr(other, name, value)
        assert text in (unsupported(other, 2) or [""])[0], name
        with pytest.raises(ConfigError):
            TorchState(other).groups(2)
    lacking = unsupported(nn.Module(), 2)
    assert lacking is not None and "without _common_checkpoint_state" in lacking[0]


def test_loading(tmp_path: Path) -> None:
    """By the engine itself, with what its files lack; never of another number of ranks."""
    engine, record = DeepSpeedEngine(), {"lastgasp": {"world_size": 1}, "deepspeed": {"micro_steps": 14}}
    load_engine(engine, tmp_path / "there", record)
    assert engine.micro_steps == 14
    with pytest.raises(CheckpointMismatch, match="finds no checkpoint"):
        load_engine(engine, tmp_path / "gone", record)
    with pytest.raises(CheckpointMismatch, match=r"2 ranks have saved it .*--inject_missing_state"):
        load_engine(engine, tmp_path / "there", {"lastgasp": {"world_size": 2}})


def test_a_start_from_a_universal_checkpoint_says_nothing_of_later_ones(tmp_path: Path) -> None:
    """What this session has written is DeepSpeed's ordinary kind."""
    engine, record = DeepSpeedEngine(), {"lastgasp": {"world_size": 1}}
    engine._config.load_universal_checkpoint = True
    asked = list[bool]()

    def load_checkpoint(path: str) -> tuple[str | None, dict[str, Any]]:
        asked.append(engine._config.load_universal_checkpoint)
        if "bad" in path:
            raise RuntimeError("damaged")
        return path, {}

    engine.load_checkpoint = load_checkpoint  # type: ignore[method-assign]
    load_engine(engine, tmp_path / "there", record)
    with pytest.raises(RuntimeError):
        load_engine(engine, tmp_path / "bad", record)
    assert asked == [False, False] and engine._config.load_universal_checkpoint is True


def test_names(tmp_path: Path) -> None:
    for path in (periodic_path(tmp_path, 4), gasp_path(tmp_path, 5, 1), tmp_path / "mine-step=3.zero"):
        path.mkdir()
    assert [path.name for path in LAYOUT.discover(tmp_path)] == ["gasp-fit=1-step=00000005.zero", "step=00000004.zero"]
    assert json.dumps([LAYOUT.step(path) for path in LAYOUT.discover(tmp_path)]) == "[5, 4]"
