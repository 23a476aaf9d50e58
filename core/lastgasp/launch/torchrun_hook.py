"""Entry point of the group `torchrun.handlers`: loaded in every torchrun agent without any flag.

torch calls `factory` while it imports torch.distributed.elastic.rendezvous (docs/facts/torchrun.md); the agent
class is swapped once torch.distributed.launcher.api has been imported. A job whose ranks do not use
lastgasp sees no difference.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from types import ModuleType
from typing import Any

import wrapt

log = logging.getLogger("lastgasp.launch")

_API = "torch.distributed.launcher.api"
TASKD_PATCH = "taskd.python.adaptor.patch"
"""Once imported, TaskD's agent runs the workers: its manager restarts them (docs/facts/taskd.md §2)."""


def factory() -> Any:
    """Register the swap; returns what torch expects, a creator of rendezvous handlers."""
    if not _disabled():
        api = sys.modules.get(_API)
        if api is not None and "LocalElasticAgent" not in vars(api):
            _swap_at_launch(api)
        else:
            wrapt.register_post_import_hook(swap_agent, _API)
    return _no_handler


def _disabled() -> bool:
    if not os.environ.get("LASTGASP_DISABLE"):
        return False  # this is torch's own import, of any job: nothing more is loaded for it
    from lastgasp.config import env_flag
    from lastgasp.errors import ConfigError

    try:
        return env_flag("LASTGASP_DISABLE")
    except ConfigError as error:
        log.warning("torchrun is left as it is: %s", error)
        return True


def _swap_at_launch(api: ModuleType) -> None:
    """Where the import of `api` itself has led here (a script that uses `elastic_launch`), it sets the name later.

    A launch asks for its rendezvous handler before it makes the agent.
    """
    from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry as registry

    def create_handler(*args: Any, **kwargs: Any) -> Any:
        vars(registry).pop("create_handler", None)
        swap_agent(api)
        return registry.create_handler(*args, **kwargs)

    vars(registry)["create_handler"] = create_handler


class _Unpatched:
    """Stands for TaskD's patch where it is not imported; lastgasp-taskd's has the same attribute."""

    __lastgasp__ = True


def swap_agent(api: ModuleType) -> None:
    """Replace the agent class in torch.distributed.launcher.api, except TaskD's own."""
    if not hasattr(sys.modules.get(TASKD_PATCH, _Unpatched), "__lastgasp__"):
        return
    if why := _differs():
        log.warning("torchrun is left as it is (%s): the job runs without lastgasp's hold", why)
        return
    from lastgasp.launch.agent import GaspAgent

    vars(api)["LocalElasticAgent"] = GaspAgent


_OVERRIDDEN: dict[str, tuple[tuple[str, ...], ...]] = {
    "_rendezvous": (("self", "worker_group"),),
    "_assign_worker_ranks": (("self", "store", "group_rank", "group_world_size", "spec"),),
    "_start_workers": (("self", "worker_group"),),
    "_monitor_workers": (("self", "worker_group"),),
    "_exit_barrier": (("self",),),
    "_shutdown": (
        ("self", "death_sig", "timeout"),  # 2.13
        ("self", "death_sig"),  # 2.11
        ("self", "death_sig", "is_restart"),  # 2.6 and 2.7
    ),
    "run": (("self", "role"),),
}
"""Methods of torch's agent, some of them private, and the parameters that they have in the releases known here."""


def _differs() -> str:
    """How torch's agent, or this machine, differs from the supported one; empty if it does not."""
    if not os.path.exists("/proc/self/stat"):
        return "/proc is not mounted, in which the ends of processes are seen"
    try:
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

        import lastgasp.launch.agent  # noqa: F401
    except (ImportError, AttributeError) as error:
        return str(error)
    for name, parameters in _OVERRIDDEN.items():
        method = getattr(LocalElasticAgent, name, None)
        if method is None:
            return f"no {name}"
        if tuple(inspect.signature(method).parameters) not in parameters:
            return f"{name} takes other arguments"
    return ""


def _no_handler(params: object) -> Any:
    raise ValueError("--rdzv-backend lastgasp is not a rendezvous backend; leave the flag out, or use c10d")
