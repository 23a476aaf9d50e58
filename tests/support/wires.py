"""The network between the hosts of a test: a switch in this process, which delays, loses or drops packets at will.

Each host holds a TUN device and this process its other end, so that nothing but these hosts is ever reached, and no
kernel module (netem) is needed.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

MTU = 9000
_TUNSETIFF, _TUN, _NO_PI = 0x400454CA, 0x0001, 0x1000
_DESTINATION = slice(16, 20)  # of an IPv4 header
_TCP = 6


@dataclass
class Wire:
    """One host's way to all others, in both directions.

    Attributes:
        cut: nothing gets through.
        closed: TCP ports, of either end; nothing of their connections gets through.
        delay: seconds that each packet takes on this wire; on the way from one slow host to another it counts twice.
        loss: share of the packets that are lost on this wire.
        lost: packets that were dropped for the one or the other.
    """

    descriptor: int
    cut: bool = False
    closed: frozenset[int] = frozenset()
    delay: float = 0.0
    loss: float = 0.0
    lost: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(12))

    def drops(self, packet: bytes) -> bool:
        """Whether this packet is lost here."""
        if self.cut or not self.closed.isdisjoint(_ports(packet)) or (self.loss and self.chance.random() < self.loss):
            self.lost += 1
            return True
        return False


def _ports(packet: bytes) -> tuple[int, ...]:
    """Of both ends, if it is TCP over IPv4."""
    words, protocol = packet[0] & 15, packet[9]
    return struct.unpack_from("!HH", packet, 4 * words) if protocol == _TCP else ()


class Switch:
    """Carries packets between wires on a thread of its own. Close it to take all wires away."""

    def __init__(self) -> None:
        self._wires: dict[bytes, Wire] = {}
        self._underway: list[tuple[float, int, bytes, bytes]] = []
        self._sent = 0
        self._poll = select.poll()
        self._wake, self._waker = os.pipe()
        self._poll.register(self._wake, select.POLLIN)
        self._by_descriptor: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="test-switch", daemon=True)
        self._thread.start()

    def plug(self, address: bytes, device: str, move: Callable[[str], None]) -> Wire:
        """A new wire for the host with this address.

        Args:
            device: a name that no other network device has.
            move: takes the device to its host and brings it up.
        """
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TUN | _NO_PI))
            move(device)
        except BaseException:
            os.close(descriptor)
            raise
        wire = Wire(descriptor)
        with self._lock:
            self._wires[address], self._by_descriptor[descriptor] = wire, address
            self._poll.register(descriptor, select.POLLIN)
        os.write(self._waker, b"x")
        return wire

    def unplug(self, address: bytes) -> None:
        """Take a wire away, with all that is underway on it; unknown addresses are fine."""
        with self._lock:
            wire = self._wires.pop(address, None)
            if wire is not None:
                self._poll.unregister(wire.descriptor)
                del self._by_descriptor[wire.descriptor]
                os.close(wire.descriptor)

    def close(self) -> None:
        """Take all wires away."""
        self._closed = True
        os.write(self._waker, b"x")
        self._thread.join()
        for address in list(self._wires):
            self.unplug(address)
        os.close(self._wake)
        os.close(self._waker)

    def _run(self) -> None:
        while not self._closed:
            wait = self._underway[0][0] - time.monotonic() if self._underway else 60.0
            for descriptor, _ in self._poll.poll(max(0.0, wait) * 1000):
                if descriptor == self._wake:
                    os.read(self._wake, 64)
                else:
                    self._take(descriptor)
            with self._lock:
                while self._underway and self._underway[0][0] <= time.monotonic():
                    _, _, address, packet = heapq.heappop(self._underway)
                    self._deliver(address, packet)

    def _take(self, descriptor: int) -> None:
        """Up to so many packets as are there; each is delivered, dropped or put on its way."""
        with self._lock:
            if descriptor not in self._by_descriptor:
                return
            source = self._wires[self._by_descriptor[descriptor]]
            for _ in range(64):
                try:
                    packet = os.read(descriptor, MTU + 4)
                except OSError:  # none is left, or the host has just gone
                    return
                self._send(source, packet[_DESTINATION], packet)

    def _send(self, source: Wire, address: bytes, packet: bytes) -> None:
        target = self._wires.get(address)
        if target is None or source.drops(packet) or target.drops(packet):
            return
        if delay := source.delay + target.delay:
            self._sent += 1
            heapq.heappush(self._underway, (time.monotonic() + delay, self._sent, address, packet))
        else:
            self._deliver(address, packet)

    def _deliver(self, address: bytes, packet: bytes) -> None:
        target = self._wires.get(address)
        if target is None or target.cut:
            return
        try:
            os.write(target.descriptor, packet)
        except OSError:  # its host has just gone
            target.lost += 1
