"""A GPT on text, as a user of Megatron writes it: `pretrain` with a dataset, a model and a forward step.

No line of lastgasp stands here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import megatron_on_cpu

megatron_on_cpu.apply()  # on GPUs leave this out

# ruff: noqa: E402
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def datasets(numbers: list[int]) -> Any:
    """Training, validation and test sets out of --data-path and --split."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(args.data_path),
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, numbers, lambda: True, config).build()


datasets.is_distributed = True  # type: ignore[attr-defined]


def loss_of(mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, ...]:
    """Sum over tokens, their number, and both for the log."""
    tokens = mask.sum().int()
    loss = (output.float().view(-1) * mask.view(-1)).sum()
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def forward_step(iterator: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """One micro-batch."""
    batch = next(iterator)
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss_of, batch["loss_mask"])


if __name__ == "__main__":
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
