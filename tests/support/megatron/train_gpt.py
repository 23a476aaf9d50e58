"""A tiny GPT through the real `megatron.training.pretrain`: what a user's `pretrain_gpt.py` does, on a CPU.

No line of lastgasp stands here. With `LOSSES_DIR` each rank that has a loss appends a line per micro-batch to
`rank-R.txt` there: process, completed iterations and the exact loss; and to `script-R` the process, and what variables
of the script say: the number of micro-batches, and a random number. With `NAN_AT` the loss of that iteration is NaN,
and Megatron's rerun machine is asked about each, as pretrain_gpt.py does. With `HOLD` no rank comes to the end of the
iteration behind `HOLD_AT` completed ones before that file exists; with `HOLDS` (iterations) neither to that of each of
those before there is a file `HOLD`-iteration, and a new process for a rank that is missing not to its training before
there is a file `grow` beside it. Each forward pass of an evaluation takes `SLOW_EVALUATION` seconds
longer. With `SAMPLES` each process appends to `samples-PID` what its micro-batches are of (`note_samples`).
With `DIES_AGAIN` (a rank, or `R in I` for one incarnation) that rank kills itself when it makes its data sets in a
training that is entered again in place; with
`DIES_STARTING` the new process of that rank does, before it meets the others. With `STAYS` that rank
does not come out of its forward pass of iteration 7. `TEST_DEVICE_FAULT` and
`TEST_SECOND_FAULT` bring what `support.again_faults` says; `LOSSES_DIR` is its folder.
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):  # spawned children of torch_dist's saving import this file, too
    gc.disable()  # until everything is imported: a third of the time of a start
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from support.megatron import cpu

    cpu.apply_here()

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset, MockGPTLowLevelDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    ArgumentGroupFactory,
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args

from support import again_faults

gc.freeze()
gc.enable()
if os.environ.get("LASTGASP_AGAIN") and os.environ.get("DIES_STARTING") == os.environ["RANK"]:
    os.kill(os.getpid(), signal.SIGKILL)
ArgumentGroupFactory._get_field_docstrings = lambda self, kind: {}  # reading sources for --help takes half a second
MockGPTLowLevelDataset.size = 1000  # of 100000 documents, shuffling the samples takes a second

HOLD_AT, PATIENCE = 2, 300.0
SEEN: list[int] = []
NOISE = random.Random(5)


def hold(file: Path) -> None:
    """Wait for it."""
    done = get_args().curr_iteration
    if str(done) in os.environ.get("HOLDS", "").split(","):
        file = file.with_name(f"{file.name}-{done}")
    elif done != HOLD_AT:
        return
    wait_for(file)


def wait_for(file: Path) -> None:
    """A while."""
    deadline = time.monotonic() + PATIENCE
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def loss_of(mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, ...]:
    """Sum over tokens, their number, and both for the log."""
    tokens = mask.sum().int()
    loss = (output.float().view(-1) * mask.view(-1)).sum()
    if os.environ.get("LOSSES_DIR"):
        args = get_args()
        with Path(os.environ["LOSSES_DIR"], f"rank-{args.rank}.txt").open("a") as log:
            log.write(f"{os.getpid()} {args.curr_iteration} {float(loss).hex()}\n")
    if os.environ.get("HOLD"):
        hold(Path(os.environ["HOLD"]))
    if os.environ.get("NAN_AT"):
        loss = loss * (math.nan if int(os.environ["NAN_AT"]) == get_args().curr_iteration else 1.0)
        get_rerun_state_machine().validate_result(
            result=loss, rejection_func=torch.isnan, message="found NaN in local forward loss calculation", fatal=True
        )
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def note_samples(tokens: torch.Tensor, training: bool) -> None:
    """Append what this micro-batch is of, and a digest of each of its samples."""
    args, when = get_args(), [os.environ.get(n, "0") for n in ("TORCHELASTIC_RESTART_COUNT", "LASTGASP_INCARNATION")]
    what = "train" if training else "evaluate"
    digests = [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16] for row in tokens]
    with Path(os.environ["LOSSES_DIR"], f"samples-{os.getpid()}").open("a") as log:
        print(what, args.curr_iteration, *when, args.rank, args.world_size, *digests, file=log)


def forward_step(iterator: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """One micro-batch; every rank reads it for itself."""
    SEEN.append(get_args().curr_iteration)
    if os.environ.get("LOSSES_DIR"):
        with Path(os.environ["LOSSES_DIR"], f"script-{get_args().rank}").open("a") as log:
            log.write(f"{os.getpid()} {len(SEEN)} {NOISE.random()}\n")
    if not model.training:
        time.sleep(float(os.environ.get("SLOW_EVALUATION", "0")))
    again_faults.at("first step")
    if get_args().curr_iteration == 6:
        again_faults.stay(os.environ.get("STAYS", ""))
    if os.environ.get(again_faults.DEVICE):
        again_faults.device_fault(get_args().curr_iteration)
    batch = next(iterator)
    if os.environ.get("SAMPLES"):
        note_samples(batch["tokens"], model.training)
    batch = {name: value.cuda(non_blocking=True) for name, value in batch.items()}
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss_of, batch["loss_mask"])


def datasets(numbers: list[int], vp_stage: int | None = None) -> Any:
    """Mock data: the same on every run, and for each part of a stage (`vp_stage`)."""
    args = get_args()
    again_faults.at("data sets")
    incarnation = os.environ.get("LASTGASP_INCARNATION")
    if incarnation and os.environ.get("DIES_AGAIN") in (str(args.rank), f"{args.rank} in {incarnation}"):
        os.kill(os.getpid(), signal.SIGKILL)
    config = GPTDatasetConfig(
        random_seed=args.seed, sequence_length=args.seq_length, blend=None, split="90,10,0",
        tokenizer=build_tokenizer(args), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=True,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(MockGPTDataset, numbers, lambda: True, config).build()


datasets.is_distributed = True  # type: ignore[attr-defined]

if __name__ == "__main__":
    if os.environ.get(again_faults.VARIABLE):
        again_faults.install(Path(os.environ["LOSSES_DIR"]), again_faults.FROM_FILES)
    args = parse_and_validate_args()
    if os.environ.get("LASTGASP_JOINS") and os.environ.get("HOLD"):
        wait_for(Path(os.environ["HOLD"]).with_name("grow"))
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
