"""Where the jobs of tests train: on CPUs with gloo, or with TESTS_DEVICE=cuda on one GPU, with NCCL.

NCCL takes no two ranks of a host on one card, so each rank says that it is a host of its own: then they talk over
sockets of the loopback, and all else is as between hosts.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

KIND = os.environ.get("TESTS_DEVICE", "cpu")
"""`cpu`, `cuda`; and `alone`, as `cuda` but on a CPU, to try its arrangement where no card is."""
ENVIRONMENT = {"NCCL_SOCKET_IFNAME": "lo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def one_card() -> None:
    """To be called by a rank before all else: it is the only one of its host, and takes the first card."""
    if KIND == "cpu":
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["NCCL_HOSTID"] = f"rank-{os.environ.get('RANK', '0')}"
    os.environ["LOCAL_RANK"] = "0"
    if KIND == "cuda":
        import torch

        torch.cuda.set_device(0)


def device() -> torch.device:
    """Of models and batches."""
    import torch

    return torch.device("cuda", 0) if KIND == "cuda" else torch.device("cpu")


def backend() -> str:
    """Of process groups."""
    return "nccl" if KIND == "cuda" else "gloo"


def put(batch: Any) -> Any:
    """A batch on the device."""
    return [one.to(device(), non_blocking=True) for one in batch] if KIND == "cuda" else batch


def trainer(devices: int, nodes: int = 1) -> dict[str, Any]:
    """Arguments of Lightning's Trainer for so many ranks."""
    if KIND == "cpu":
        return {"accelerator": "cpu", "devices": devices, "num_nodes": nodes}
    return {"accelerator": device().type, "devices": 1, "num_nodes": devices * nodes}
