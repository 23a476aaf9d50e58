"""Real Megatron jobs: their command line, their environment, and the losses they logged."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lastgasp.testing.jobs import Finished, run_job
from support import card
from support.megatron import place

SCRIPT = Path(__file__).with_name("train_gpt.py")
REPOSITORY = SCRIPT.parents[3]

_MODEL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 16
--max-position-embeddings 16 --mock-data --tokenizer-type NullTokenizer --vocab-size 126
--make-vocab-size-divisible-by 8 --num-workers 0"""
_TRAINING = """--micro-batch-size 2 --global-batch-size 8 --train-iters 60 --lr 0.01 --min-lr 0.001
--lr-decay-iters 60 --lr-warmup-iters 2 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.01 --log-interval 1
--eval-iters 0 --eval-interval 1000 --distributed-timeout-minutes 1"""
_PLAIN = f"""--transformer-impl local --distributed-backend {card.backend()} --no-gradient-accumulation-fusion
--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion --no-rope-fusion
--no-persist-layer-norm"""

_CARD = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_ALGO": "Ring", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""Between hosts, which the ranks of a card are: the same sums each time, and a dead rank does not end the others."""

DIST_OPT = "--use-distributed-optimizer"
TWO_INSTANCES = f"{DIST_OPT} --num-distributed-optimizer-instances 2"
TENSOR = "--tensor-model-parallel-size 2"
PIPELINE = "--pipeline-model-parallel-size 2"
EXPERTS = """--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05"""
"""Four experts, and a bias of each that changes at every iteration by what the router chose."""
EXPERT_PARALLEL = f"{EXPERTS} --expert-model-parallel-size 2"


@dataclass(frozen=True, kw_only=True)
class GptJob:
    """One tiny GPT.

    Attributes:
        folder: checkpoints go to `ckpt` in it, losses to `losses`.
        ranks: processes; 2 on 2 cores take about 10 s for 30 iterations.
        flags: Megatron's own, such as `TWO_INSTANCES`.
        last: the iteration after which it ends.
        every: iterations between two periodic saves.
        launcher: "torchrun" without lastgasp; "run" is `lastgasp run`; "mindx" an agent as TaskD's, on hosts of one
            rank each.
        script: what each rank runs.
    """

    folder: Path
    ranks: int = 2
    flags: str = "--bf16"
    last: int = 30
    every: int = 10
    launcher: str = "torchrun"
    launch_options: Sequence[str] = field(default=())
    script: Path = SCRIPT

    @property
    def checkpoints(self) -> Path:
        """Where Megatron saves."""
        return self.folder / "ckpt"

    @property
    def losses_folder(self) -> Path:
        """Where its ranks write their losses."""
        return self.folder / "losses"

    def command(self) -> list[str]:
        """The whole command line."""
        run = ["-m", "lastgasp", "run"] if self.launcher == "run" else ["-m", "torch.distributed.run", "--standalone"]
        start = [*run, "--nproc-per-node", str(self.ranks)]
        if self.launcher == "mindx":
            start = ["-m", "support.mindx", str(self.ranks), "-m", "lastgasp_megatron.start"]
        launch = [sys.executable, *start, *self.launch_options, str(self.script)]
        where = ["--save", str(self.checkpoints), "--load", str(self.checkpoints), "--ckpt-format", "torch"]
        ends = ["--save-interval", str(self.every), "--exit-interval", str(self.last)]
        return [*launch, *_MODEL.split(), *_TRAINING.split(), *_PLAIN.split(), *where, *ends, *self.flags.split()]

    def environment(self) -> dict[str, str]:
        """That of this process, with what Megatron needs."""
        given = filter(None, [os.environ.get("PYTHONPATH")])  # stand-ins
        paths = (place.folder(), *(REPOSITORY / p for p in ("core", "plugins/megatron", "tests")), *given)
        own = {
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "LOSSES_DIR": str(self.losses_folder),
        }
        return os.environ | own | (_CARD if card.KIND == "cuda" else {})

    def run(self, environ: Mapping[str, str] | None = None, *, timeout: float = 300.0) -> Finished:
        """Run it to its end, or to `timeout` seconds; `environ` is added to its environment."""
        self.losses_folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / f"log-{len(list(self.folder.glob('log-*')))}"
        return run_job(self.command(), log, timeout=timeout, environ=self.environment() | dict(environ or {}))

    def losses(self) -> dict[tuple[int, int], list[list[str]]]:
        """(rank, completed iterations) -> for each time that it was trained the losses of its micro-batches."""
        found: dict[tuple[int, int], list[list[str]]] = {}
        for path in sorted(self.losses_folder.glob("rank-*.txt")):
            rank, before = int(path.stem.split("-")[1]), ("", "")
            for line in path.read_text().splitlines():
                process, iteration, loss = line.split()
                times = found.setdefault((rank, int(iteration)), [])
                if before != (process, iteration):
                    times.append([])
                times[-1].append(loss)
                before = process, iteration
        return found

    def begun_before_restart(self) -> int:
        """The newest iteration that any rank's first process computed a loss in, counted in completed iterations."""
        newest = -1
        for path in self.losses_folder.glob("rank-*.txt"):
            lines = [line.split() for line in path.read_text().splitlines()]
            newest = max(newest, *(int(iteration) for process, iteration, _ in lines if process == lines[0][0]))
        return newest
