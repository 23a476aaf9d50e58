"""What a rank says first to its controller."""

from __future__ import annotations

import os

from lastgasp import __version__
from lastgasp.config import GaspConfig
from lastgasp.topology import Place, host_identity

from . import messages as m
from .groups import pack


def hello_of(config: GaspConfig, place: Place) -> m.Hello:
    """The greeting of this process, without the proof of the token."""
    return m.Hello(
        protocol=m.PROTOCOL,
        version=__version__,
        nonce=b"",
        mac=b"",
        job=place.job,
        attempt=place.attempt,
        rank=place.rank,
        world_size=place.world_size,
        replicas=pack(place.replicas),
        host=host_identity(),
        pid=os.getpid(),
        directory=str(config.directory),
        hang_timeout=0.0 if config.hang_timeout == "auto" else config.hang_timeout,
        save_timeout=config.save_timeout,
        finish_timeout=config.finish_timeout,
        incarnation=place.incarnation,
    )
