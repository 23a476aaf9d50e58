"""Which image a command is forked from, and what each image imports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lastgasp.launch.warm_server import BOOT

_LAUNCHER = (
    "torch",
    "torch.distributed.run",  # in its order: a hook of ours is registered halfway
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
    "torch.distributed.elastic.rendezvous.registry",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "lastgasp.cli.run",
    "lastgasp.launch.agent",
    "lastgasp.launch.torchrun_hook",
)
_LOOP = (
    *_LAUNCHER,
    "numpy.random",
    "torch._dynamo",  # by the first optimizer
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.checkpoint",
    "torch.utils.data",
    "torch.utils.serialization",
    "lastgasp.pytorch.faulty",
    "lastgasp.pytorch.loop.session",
)
_LIGHTNING = (*_LOOP, "lightning.pytorch.callbacks", "lastgasp_lightning.entry", "lastgasp_lightning.testing")
_TRANSFORMERS = (*_LOOP, "support.train_transformers")  # which sets a variable before it imports them

MODULES = {
    "bare": ("json", "random", "multiprocessing"), "toy": ("support.engine_worker",), "launcher": _LAUNCHER,
    "loop": _LOOP, "lightning": _LIGHTNING, "transformers": _TRANSFORMERS,
    "mindspore": ("numpy", "mindspore", "mindspore.train"),
}  # fmt: skip

ALONE = ("launcher", "toy", "mindspore")
"""What is forked from these starts nothing of the same kind."""

_SCRIPTS = {
    "prefork_child.py": "bare",
    "engine_worker.py": "toy",
    "marks_worker.py": "toy",
    "lightning_digits/train.py": "lightning",
    "train_tiny.py": "lightning",
    "train_tiny_nodes.py": "lightning",
    "lightning_shapes.py": "lightning",
    "slow_job.py": "lightning",
    "train_loop.py": "loop",
    "train_again.py": "loop",
    "train_again_lightning.py": "lightning",
    "train_again_lightning_sharded.py": "lightning",
    "train_again_sharded.py": "loop",
    "train_users_lightning.py": "lightning",
    "again_faults.py": "loop",
    "train_many_faults.py": "loop",
    "train_many_faults_lightning.py": "lightning",
    "train_shapes.py": "loop",
    "loop_before.py": "loop",
    "loop_after.py": "loop",
    "buckets_worker.py": "loop",
    "sharded_checks.py": "loop",
    "train_gpt.py": "loop",
    "train_transformers.py": "transformers",
    "train_again_transformers.py": "transformers",
    "train_again_shapes.py": "loop",
    "train_elastic.py": "loop",
    "train_lightning_sharded.py": "lightning",
    "train_reused.py": "loop",
    "train_replicated.py": "loop",
    "train_undecorated.py": "loop",
    "train_sharded.py": "loop",
    "train_kept.py": "loop",
    "train_odd.py": "loop",
    "hosts_torch.py": "loop",
    "collectives_child.py": "loop",
    "train_elastic_lightning.py": "lightning",
    "train_outs_lightning.py": "lightning",
    "train_values_lightning.py": "lightning",
    "warm_worker.py": "lightning",
    "compare.py": "loop",
    "trainings_child.py": "mindspore",
}
"""What each imports at its top, or does not go without. Ranks that import no torch must not find it imported."""


def is_warm_process(command: Sequence[str]) -> bool:
    """Whether it is the warm process of a launcher, which imports what the ranks have imported."""
    return BOOT in command[2:4]


_LAUNCHERS = (["-m", "torch.distributed.run"], ["-m", "support.mindx"])


def image_of(command: Sequence[str]) -> str:
    """The image's name; empty for what is started as ever."""
    program = list(command[2:] if command[1:2] == ["-u"] else command[1:])
    if program[:2] == ["-m", "lastgasp_megatron.start"]:
        del program[:2]  # it runs the script that follows
    launcher = (program[:3] == ["-m", "lastgasp", "run"] or program[:2] in _LAUNCHERS) and "mindspore" not in program
    paths = [Path(word) for word in program[: None if launcher else 1]]
    names = (name for path in paths for name in (path.name, f"{path.parent.name}/{path.name}"))
    found = [_SCRIPTS[name] for name in names if name in _SCRIPTS]
    return found[0] if found else "launcher" if launcher else ""
