"""How a rank joins its job: its identity and its way to the controller, the same for every framework."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Callable
from typing import Any

import xxhash

from lastgasp import _clock
from lastgasp.config import attempt_in
from lastgasp.errors import ConfigError
from lastgasp.gasp.addresses import address_towards, is_loopback, loopback
from lastgasp.gasp.again import INCARNATION
from lastgasp.gasp.secret import REMEDY, UNCOORDINATED, Secret
from lastgasp.gasp.serve import start_detached
from lastgasp.session import Contact
from lastgasp.steps.places import TASK_VARIABLE
from lastgasp.topology import UNNAMED, Place, ReplicaGroups

log = logging.getLogger("lastgasp")

FromRank0 = Callable[[Any], Any]
"""Returns rank 0's value on all ranks, which call it at the same point."""
SINCE = "LASTGASP_SINCE"
"""Set by each launcher of lastgasp's, on all nodes alike."""


def place_in_job(rank: int, world_size: int, replicas: ReplicaGroups, from_rank_0: FromRank0) -> Place:
    """Determine rank, size, attempt and job; the job's name comes from the launcher or from rank 0."""
    env = os.environ
    job = env.get("LASTGASP_JOB") or env.get("TORCHELASTIC_RUN_ID")
    if job == UNNAMED:
        job = str(from_rank_0(_of_the_launcher()))
    if not job:
        job = str(from_rank_0(uuid.uuid4().hex[:12]))
    since, lasting = env.get(SINCE), job == env.get(TASK_VARIABLE)  # MindCluster's name outlives a job's launchers
    began = from_rank_0(_clock.wall_ns()) if since is None else int(since or 0)
    return Place(
        rank=rank, world_size=world_size, replicas=replicas, attempt=attempt_in(env), job=job,
        incarnation=int(env.get(INCARNATION) or 0), since_ns=0 if lasting else int(since or 0), began_ns=began,
    )  # fmt: skip


def _of_the_launcher() -> str:
    """A name for all attempts of the launcher that has started this process, and for no other job's."""
    parent = os.getppid()
    return xxhash.xxh3_64_hexdigest(f"{socket.gethostname()} {parent} {_clock.born(parent)}".encode())


def contact_of(place: Place, several_nodes: str, from_rank_0: FromRank0) -> Contact | None:
    """Find the launcher's controller, or one that rank 0 starts; none for a job of one rank.

    Args:
        several_nodes: why the controller must be reached from other nodes, such as "this job spans 2 nodes"; empty
            if all ranks are on one.

    Returns:
        None for a job of one rank, and, with a warning, if several nodes share no secret.

    Raises:
        ConfigError: the job spans several nodes and the controller's address is not set; or rank 0 knows a secret
            that this node lacks.
        ControlError, DeadlineExceeded: it could not be started.
    """
    contact = Contact.from_environment()
    if contact is not None or place.world_size == 1:
        return contact
    if why := os.environ.get(UNCOORDINATED):
        _tell_uncoordinated(place, why)
        return None
    bind = os.environ.get("LASTGASP_BIND") or (_towards_rank_0() if several_nodes else "")
    if several_nodes and not bind:
        raise ConfigError(
            "LASTGASP_BIND",
            bind,
            f"this node's address, because {several_nodes} and MASTER_ADDR does not give it",
            "Set it on each node to its own address on the training network; loopback cannot be reached.",
        )
    secret = Secret.from_environment() if several_nodes else Secret()
    found = None
    if place.rank == 0 and not (several_nodes and secret.missing):
        found = start_detached(bind or loopback(), secret.token)
    passed_on = found.token if found is not None and not secret.token else ""
    address, token = from_rank_0((found.address, passed_on) if found is not None else ("", ""))
    if not address:
        _tell_uncoordinated(place, f"{several_nodes} and its nodes share no secret. {REMEDY}")
        return None
    if not (token or secret.token):
        secret.require("rank 0 has one")
    return Contact(address, secret.token or token)


def _towards_rank_0() -> str:
    """This node's address on the route to rank 0's; on rank 0's node the one by which the others reach it."""
    found = address_towards(os.environ.get("MASTER_ADDR", ""))
    return "" if is_loopback(found) else found


def _tell_uncoordinated(place: Place, why: str) -> None:
    """Warn once about what the job lacks; it trains nevertheless."""
    if place.rank == 0:
        log.warning(
            "no rank knows of the others after a fault: each saves on its own, without the random state of the others, "
            "and a hung rank is not noticed. The reason: %s",
            why,
        )
