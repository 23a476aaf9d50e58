"""Which Megatron trainings can go on with fewer ranks, and with how many."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from lastgasp.adapter.again import Fewer
from lastgasp.jobs.acjob.recover import NOT_FEWER
from lastgasp_megatron import fewer
from lastgasp_megatron.fewer import fewer_of, note_of

USUAL: dict[str, Any] = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
    "expert_model_parallel_size": 1, "use_distributed_optimizer": False, "dataloader_type": "single",
    "step_batch_size_schedule": None, "rampup_batch_size": None, "decrease_batch_size_if_needed": False,
    "data_parallel_random_init": False, "full_validation": False, "num_experts": None, "global_batch_size": 24,
    "micro_batch_size": 2, "eval_global_batch_size": 24, "eval_micro_batch_size": 2, "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}  # fmt: skip


SAMPLES = "which samples a step has depends on the number of ranks"


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({}, 12), ({"eval_global_batch_size": 16}, 4), ({"eval_micro_batch_size": 8}, 3),
        ({"eval_global_batch_size": None, "eval_micro_batch_size": None}, 12),
    ],
)  # fmt: skip
def test_a_step_and_an_evaluation_are_shared_evenly(settings: dict[str, Any], parts: int) -> None:
    assert fewer_of(Namespace(**USUAL | settings), True) == Fewer(may=True, parts=parts)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tensor_model_parallel_size": 2}, "--tensor-model-parallel-size is 2"),
        ({"pipeline_model_parallel_size": 4}, "--pipeline-model-parallel-size is 4"),
        ({"use_distributed_optimizer": True}, "--use-distributed-optimizer: each rank has a part of "
                                              "the optimizer's state"),
        ({"step_batch_size_schedule": "0:8 1K:16"}, "--step-batch-size-schedule: the global batch grows"),
        ({"rampup_batch_size": ["8", "8", "100"]}, "--rampup-batch-size: the global batch grows"),
        ({"dataloader_type": "external"}, f"--dataloader-type external: {SAMPLES}"),
        ({"dataloader_type": "cyclic"}, f"--dataloader-type cyclic: {SAMPLES}"),
        ({"dataloader_type": None}, f"--dataloader-type None: {SAMPLES}"),
        ({"data_parallel_random_init": True}, "--data-parallel-random-init: each rank has random numbers of its own"),
        ({"num_experts": 4}, "--num-experts: it was not tried with experts"),
        ({"global_batch_size": None}, "the sizes of its batches are not known"),
    ],
)  # fmt: skip
def test_what_is_in_the_way_is_said(settings: dict[str, Any], why: str) -> None:
    assert fewer_of(Namespace(**USUAL | settings), True) == Fewer(why=why)


def test_a_version_that_would_derive_the_global_batch_again_cannot() -> None:
    """It is the micro-batch times the ranks, where the user has not given it."""
    assert fewer_of(Namespace(**USUAL), False).why == "this version of Megatron parses its options within pretrain()"


def test_job_check_knows_the_options_that_are_in_the_way() -> None:
    for name in (*fewer._SIZES, *fewer._IN_THE_WAY):
        option = f"--{name.replace('_', '-')}"
        [found] = NOT_FEWER.finditer(f"p.py --dataloader-type single {option} 16 --context-parallel-size 1")
        assert found[0].startswith(option)
    assert NOT_FEWER.search("--dataloader-type=cyclic") and not NOT_FEWER.search("--no-use-distributed-optimizer")


def test_dropout_is_told_of() -> None:
    assert note_of(Namespace(**USUAL), 7) == ""
    assert "behind iteration 7" in note_of(Namespace(**USUAL | {"attention_dropout": 0.1}), 7)
