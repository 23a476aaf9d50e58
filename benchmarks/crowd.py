"""Connections of many ranks in one process, for `bench_scale`: they join at once, and send heartbeats until terminated.

Usage: LASTGASP_TOKEN=... crowd.py HOST:PORT RANKS. Prints the seconds until all have been welcomed.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time

from lastgasp import __version__
from lastgasp.gasp import messages as m
from lastgasp.gasp.groups import pack

HEARTBEAT = 0.5
AGAIN = 0.1


async def main(address: str, ranks: int) -> None:
    """All ranks of one job."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * ranks)), hard))
    groups = pack(tuple((rank, rank + ranks // 2) for rank in range(ranks // 2)))
    begun = time.monotonic()
    writers = await asyncio.gather(*(join(address, rank, ranks, groups) for rank in range(ranks)))
    print(time.monotonic() - begun, flush=True)
    tick = 0
    while True:
        tick += 1
        for place, writer in enumerate(writers):
            writer.write(m.frame(m.Status(step=7, durable=0, tick=tick, phase="forward")))
            if place % 100 == 99:
                await asyncio.sleep(HEARTBEAT * 100 / ranks)


async def join(address: str, rank: int, ranks: int, groups: bytes) -> asyncio.StreamWriter:
    """One rank, until it has begun."""
    while True:
        try:
            return await greeted(address, rank, ranks, groups)
        except (OSError, EOFError):  # too many that prove nothing at once: a rank tries again
            await asyncio.sleep(AGAIN)


async def greeted(address: str, rank: int, ranks: int, groups: bytes) -> asyncio.StreamWriter:
    """One try, from the address of the rank's host (eight ranks each)."""
    host, _, port = address.rpartition(":")
    node = rank // 8
    reader, writer = await asyncio.open_connection(
        host, int(port), local_addr=(f"127.0.{node // 250 + 1}.{node % 250 + 1}", 0)
    )
    challenge = m.from_controller(await frame(reader))
    if not isinstance(challenge, m.Challenge):
        raise EOFError(m.BUSY)
    mac = m.proof(os.environ["LASTGASP_TOKEN"], "rank", challenge.nonce, rank)
    hello = m.Hello(
        protocol=m.PROTOCOL, version=__version__, nonce=bytes(32), mac=mac, job="crowd", attempt=0, rank=rank,
        world_size=ranks, replicas=groups, host=f"host-{rank // 8}", pid=1, directory="/nowhere", hang_timeout=0.0,
        save_timeout=600.0, finish_timeout=10.0,
    )  # fmt: skip
    writer.write(m.frame(hello))
    welcome = m.from_controller(await frame(reader))
    if isinstance(welcome, m.Refused) and welcome.reason == m.BUSY:
        raise EOFError(welcome.reason)
    assert isinstance(welcome, m.Welcome), welcome
    writer.write(m.frame(m.Begin(step=7, durable=0, buffer_fd=-1)))
    return writer


async def frame(reader: asyncio.StreamReader) -> bytes:
    """The body of the next one."""
    return await reader.readexactly(m.body_size(await reader.readexactly(m.HEADER), m.MAX_FRAME))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
