"""A tiny convolutional network with BatchNorm and an average through the real `megatron.training.pretrain`, on a CPU.

Each data parallel rank has buffers of its own. With `LOSSES_DIR` each rank leaves them in `buffers-R` there at its end.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from support.megatron import cpu

    cpu.apply_here()

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    ArgumentGroupFactory,
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args

ArgumentGroupFactory._get_field_docstrings = lambda self, kind: {}
MODELS: list[torch.nn.Module] = []


class Images(torch.utils.data.Dataset[Any]):
    """Samples that depend on their number."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        made = torch.Generator().manual_seed(int(index))
        return {"x": torch.randn(3, 8, 8, generator=made), "y": int(index) % 10}


class Cnn(MegatronModule):  # type: ignore[misc]
    """Convolutions, BatchNorm, and an average of the outputs."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm, self.conv = torch.nn.BatchNorm2d(3), torch.nn.Conv2d(3, 8, 3)
        self.head = torch.nn.Linear(8, 10)
        self.register_buffer("average", torch.zeros(10))

    def set_input_tensor(self, tensor: Any) -> None:
        """Megatron calls it on each model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        found: torch.Tensor = self.head(torch.relu(self.conv(self.norm(x.to(self.conv.weight.dtype)))).mean((2, 3)))
        self.average.mul_(0.9).add_(found.detach().float().mean(0), alpha=0.1)
        return found


def provider(pre_process: bool = True, post_process: bool = True, config: Any = None, **_: Any) -> Cnn:
    """The model."""
    return Cnn(config or core_transformer_config_from_args(get_args()))


def datasets(numbers: Any, vp_stage: Any = None) -> tuple[Images, ...]:
    """As many samples to train with as are needed, and no more."""
    return Images(numbers[0]), Images(200), Images(200)


datasets.is_distributed = True  # type: ignore[attr-defined]


def loss_of(batch: Any, out: torch.Tensor) -> Any:
    """For the backward pass, and for the log."""
    loss = torch.nn.functional.cross_entropy(out.float(), batch["y"])
    return loss, {"loss": loss.detach().clone()}


def forward_step(data: Any, model: torch.nn.Module) -> Any:
    """As Megatron wants it."""
    MODELS[:] = [model]
    batch = {name: value.cuda(non_blocking=True) for name, value in next(data).items()}
    return model(batch["x"]), partial(loss_of, batch)


def main() -> None:
    """Train, and leave the buffers."""
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    try:
        pretrain(pretrain_cfg_container_from_args(args, None), datasets, ModelType.encoder_or_decoder, forward_step,
                 model_provider=provider)  # fmt: skip
    finally:
        if MODELS:
            buffers = {name: value.double().tolist() for name, value in MODELS[0].named_buffers()}
            Path(os.environ["LOSSES_DIR"], f"buffers-{os.environ['RANK']}").write_text(repr(buffers))


if __name__ == "__main__":
    main()
