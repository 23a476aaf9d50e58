"""What of `FSDPStrategy` is refused, and when its fit is not entered again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from lastgasp.errors import ConfigError
from lastgasp_lightning import fsdp
from lastgasp_lightning.ranks import is_sharded_by, require_supported


class Derived(FSDPStrategy):
    """Changes nothing of what a checkpoint has."""

    def barrier(self, name: str | None = None) -> None:
        """As in the base."""
        super().barrier(name)


class Elsewhere(FSDPStrategy):
    """Saves in a form of its own."""

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        """Nothing."""


@pytest.mark.parametrize("strategy", [FSDPStrategy(), Derived(), FSDPStrategy(state_dict_type="sharded")])
def test_it_and_classes_derived_from_it_are_supported(strategy: FSDPStrategy) -> None:
    require_supported(SimpleNamespace(strategy=strategy, callbacks=[]))
    assert is_sharded_by(strategy) and fsdp.cannot_again(strategy) == ""


@pytest.mark.parametrize(
    ("strategy", "field"),
    [(Elsewhere(), "Elsewhere.save_checkpoint"), (FSDPStrategy(cpu_offload=True), "cpu_offload")],
)
def test_what_cannot_be_saved_alike_is_refused(strategy: FSDPStrategy, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        require_supported(SimpleNamespace(strategy=strategy, callbacks=[]))
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("options", "what"),
    [({"sharding_strategy": "NO_SHARD"}, "NO_SHARD"), ({"sharding_strategy": "SHARD_GRAD_OP"}, "SHARD_GRAD_OP"),
     ({"use_orig_params": False}, "use_orig_params=False"),
     ({"activation_checkpointing_policy": {nn.Linear}}, "activation checkpointing")],
)  # fmt: skip
def test_what_is_not_entered_again(options: dict[str, Any], what: str) -> None:
    assert what in fsdp.cannot_again(FSDPStrategy(**options))


def test_names_in_a_checkpoint_are_found_again() -> None:
    for path in (("model", "net.0.weight"), ("optimizer", "1", "state", "net.0.weight", "exp_avg"),
                 ("optimizer", "0", "param_groups", 0, "lr")):  # fmt: skip
        assert fsdp.read(fsdp.named(path)) == path
