"""The controller pairs hosts: each sends copies of its ranks' arenas to the next, so that they outlive a lost host."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping

from lastgasp.errors import LastgaspError
from lastgasp.topology import ReplicaGroups

from . import messages as m
from .arena_decision import Buddies as Held
from .buddies import Buddies
from .keepers import Keepers

log = logging.getLogger("lastgasp.controller")


def ring(hosts: Mapping[int, str], replicas: ReplicaGroups) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Where each host sends which ranks' arenas: to the next one. Pure.

    A shard that ranks of two hosts hold outlives the loss of one of them without that.

    Args:
        hosts: of all ranks.
    """
    alone = {rank for shard in replicas if len({hosts.get(rank) for rank in shard}) == 1 for rank in shard[:1]}
    order = list(dict.fromkeys(hosts[rank] for rank in sorted(hosts)))
    if len(order) < 2:
        return {}
    nexts = dict(zip(order, [*order[1:], order[0]], strict=True))
    return {host: (nexts[host], tuple(sorted(rank for rank in alone if hosts[rank] == host))) for host in order}


class Partners:
    """All methods run on the event loop.

    Args:
        keepers: the launchers of other hosts; host: this one.
        token: the job's; note: takes what people should know.
        arena: our descriptor of a rank's arena on this host, and its identity; None where there is none.
    """

    def __init__(
        self,
        keepers: Keepers,
        host: str,
        token: str,
        note: Callable[[str], None],
        arena: Callable[[int], tuple[int, bytes] | None],
    ) -> None:
        self._keepers, self.host, self._token, self._note, self._arena = keepers, host, token, note, arena
        self._own: Buddies | None = None
        self._hosts: dict[int, str] = {}
        self._addresses: dict[str, str] = {}
        self._number = self._world_size = 0
        self._orders: dict[str, m.Pair] = {}
        self._replicas: ReplicaGroups = ()
        self._copies: dict[int, tuple[str, m.Copied]] = {}
        keepers.on_buddy = self._heard

    def begins(self, rank: int, host: str, world_size: int, replicas: ReplicaGroups) -> None:
        """Copies of this rank's arena are to go to a partner; once all ranks have said so they are told to which."""
        self._hosts[rank], self._world_size, self._replicas = host, world_size, replicas
        self._pair()

    def _pair(self) -> None:
        if len(self._hosts) < max(1, self._world_size) or self._orders:
            return
        plan = ring(self._hosts, self._replicas)
        if not plan or any(host not in self._addresses for host in plan if host != self.host):
            return
        if self.host in plan and not self._listen():
            return
        self._number += 1
        self._copies = {}
        for host, (to, owners) in plan.items():
            self._orders[host] = m.Pair(pair=self._number, address=self._addresses[to] if owners else "", owners=owners)
        for host in plan:
            self._send(host)

    def _send(self, host: str) -> None:
        order = self._orders[host]
        if host != self.host:
            self._keepers.send(host, order)
        elif self._own is not None:
            found = {rank: own for rank in order.owners if (own := self._arena(rank)) is not None}
            self._own.pair(order, found)

    def _listen(self) -> bool:
        """Whether this host can take copies, too."""
        if self._own is None:
            loop = asyncio.get_running_loop()
            self._own = Buddies(
                self._token,
                lambda copied: _soon(loop, lambda: self._copied(self.host, copied)),
                lambda text: _soon(loop, lambda: self._note(text)),
            )
        try:
            address = self._keepers.own_address
            self._addresses[self.host] = f"{address}:{self._own.listen(address)}"
        except (OSError, LastgaspError) as error:
            self._note(f"copies for partner hosts are off: this host cannot take any ({error})")
            self._orders = {self.host: m.Pair(pair=self._number)}  # and is not tried again
            return False
        return True

    def _heard(self, host: str, address: str, message: m.Listens | m.Copied | m.Remarked) -> None:
        """A launcher of another host, at `address`, has said it."""
        if isinstance(message, m.Listens):
            before, self._addresses[host] = self._addresses.get(host), f"{address}:{message.port}"
            if host in self._orders and before == self._addresses[host]:  # its connection was lost meanwhile
                self._send(host)
            else:  # also another launcher than before: those that send to it have to know
                self._orders = {}
                self._pair()
        elif isinstance(message, m.Copied):
            self._copied(host, message)
        else:
            self._note(message.text)

    def _copied(self, host: str, copied: m.Copied) -> None:
        if copied.pair == self._number:
            self._copies[copied.rank] = host, copied

    def begin(self) -> None:
        """Another attempt begins: its ranks are paired anew, and what there was is freed."""
        self._hosts, self._copies = {}, {}
        if not self._orders:
            return
        self._number += 1
        for host in list(self._orders):
            self._orders[host] = m.Pair(pair=self._number)
            self._send(host)
        self._orders = {}

    def held(self) -> Held:
        """As `ArenaLook.buddies`."""
        return {rank: (host, copied.steps) for rank, (host, copied) in self._copies.items()}

    def reference(self, rank: int) -> m.ArenaRef:
        """How a rank of the partner host opens the copy."""
        if rank not in self._copies:
            return m.ArenaRef(rank=rank)
        host, copied = self._copies[rank]
        pid = os.getpid() if host == self.host else copied.pid
        return m.ArenaRef(rank=rank, pid=pid, fd=copied.fd, identity=copied.identity)

    def close(self) -> None:
        """Free all."""
        if self._own is not None:
            self._own.close()


def _soon(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(work)
