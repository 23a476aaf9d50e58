"""A tiny LLaMA through MindFormers' Trainer: `python train.py llama.yaml`. No line of it concerns lastgasp."""

from __future__ import annotations

import sys

import mindformers_on_cpu
from mindformers import MindFormerConfig, Trainer
from mindformers.core.context import build_context

mindformers_on_cpu.apply()
config = MindFormerConfig(sys.argv[1])
build_context(config)
Trainer(args=config, task="text_generation").train()
