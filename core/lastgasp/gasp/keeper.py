"""A launcher keeps the crash-safe buffers of its host's ranks open and reports their contents once a rank is dead.

The controller does so itself on its own host; it cannot reach descriptors on another one. By the same connection the
launcher learns which of its ranks need new processes, and says whether it can make some.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections import deque

from lastgasp import __version__, _clock, arena
from lastgasp.crash_safe_buffer import CrashSafeBuffer, newest_step
from lastgasp.errors import LastgaspError
from lastgasp.topology import host_identity

from . import messages as m
from .buddies import Buddies
from .link import Channel
from .operator import NOBODY

log = logging.getLogger("lastgasp.launch")

REACH = 5.0
"""Seconds for one try to reach the controller."""
_PATH = "/proc/{}/fd/{}"
AGAIN = 1.0
"""Seconds between two tries."""


def open_buffer(pid: int, number: int) -> int:
    """Open a rank's crash-safe buffer by a descriptor that outlives the rank; -1 if that fails."""
    if number < 0:
        return -1
    try:
        return os.open(_PATH.format(pid, number), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        log.warning("the buffer of process %d cannot be opened (%s): its random state is lost when it dies", pid, error)
        return -1


def states(buffer_fd: int) -> dict[int, bytes]:
    """Records of the newest step (first), the one before, and the step that was begun."""
    newest = newest_step(buffer_fd)
    near = (newest, newest - 1, newest + 1) if newest is not None else ()
    return {step: found for step in near if (found := CrashSafeBuffer.read(buffer_fd, step)) is not None}


class _KeeperLink(Channel):
    """The keeper's end of the connection."""

    def __init__(self, address: str, token: str) -> None:
        super().__init__(address, REACH, retry=False)
        hello = m.Keeper(protocol=m.PROTOCOL, version=__version__, nonce=b"", mac=b"", host=host_identity())
        self._greet(token, "keeper", NOBODY, hello)


class BufferKeeper:
    """A thread of a launcher that reconnects whenever the connection is lost. Close it when the job ends.

    Args:
        address, token: of the controller.

    Attributes:
        agreed: how the last recovery has ended; agreed_at: when that was heard, monotonic seconds.
        connected: the controller can be reached.
        refused: the last attempt in which a rank has refused to start; -1 where none has.
        over: the first launcher has ended the job for good, and says why; None while it has not.
        completed: the attempt of which all ranks have completed their training; -1 where they have not.
    """

    def __init__(self, address: str, token: str) -> None:
        self.address = address
        self._token = token
        self.agreed: m.Agreed | None = None
        self.agreed_at = 0.0
        self.connected = False
        self.refused = self.completed = -1
        self.over: m.JobOver | None = None
        self._forks: m.Forks | None = None
        self._to_tell: deque[m.Message] = deque()
        self._buffers: dict[int, int] = {}
        self._arenas: dict[int, tuple[int, bytes]] = {}
        """Our descriptor and the identity, by rank."""
        self._of: dict[int, tuple[int, int]] = {}
        """Process and its descriptor, by rank."""
        self._buddies = Buddies(token, self._has, lambda text: self._tell(m.Remarked(text=text)))
        self._listening: Channel | None = None
        self._closed, self._telling = threading.Event(), threading.Lock()
        self._poke_r, self._poke_w = os.pipe()
        os.set_blocking(self._poke_w, False)
        self._thread = threading.Thread(target=self._run, name="lastgasp-keeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; idempotent."""
        if self._closed.is_set():
            return
        with self._telling, contextlib.suppress(BlockingIOError):
            self._closed.set()
            os.write(self._poke_w, b"x")
        self._thread.join(2 * REACH + AGAIN)
        self._buddies.close()
        if not self._thread.is_alive():
            arenas = (fd for fd, _ in self._arenas.values())
            for descriptor in (*self._buffers.values(), *arenas, self._poke_r, self._poke_w):
                os.close(descriptor)

    def over_for(self, attempt: int) -> float | None:
        """Seconds since the recovery of this attempt ended, as far as this launcher knows; None while it has not."""
        agreed = self.agreed
        if agreed is None or agreed.attempt != attempt or agreed.ending in ("in_place", "open"):
            return None
        return _clock.monotonic() - self.agreed_at

    def can_fork(self, forks: m.Forks) -> None:
        """Tell the controller whether ranks of this host can get new processes; does not wait."""
        if forks != self._forks:
            self._forks = forks
            self._tell(forks)

    def exited(self, exited: m.Exited) -> None:
        """Tell it that a process which was to be a rank has ended before it joined; does not wait."""
        self._tell(exited)

    def _has(self, copied: m.Copied) -> None:
        if self.connected:  # else all are told once it is
            self._tell(copied)

    def _tell(self, message: m.Message) -> None:
        with self._telling:  # from any thread, and never after the pipe was closed
            if not self._closed.is_set():
                self._to_tell.append(message)
                with contextlib.suppress(BlockingIOError):  # it is full: the thread will wake up
                    os.write(self._poke_w, b"x")

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                link = _KeeperLink(self.address, self._token)
            except (LastgaspError, OSError, EOFError) as error:
                log.debug("no controller at %s: %s", self.address, error)
            else:
                with contextlib.closing(link), contextlib.suppress(OSError, EOFError, LastgaspError):
                    if self._forks is not None:
                        link.send(self._forks)
                    self.connected = True
                    for copied in self._buddies.held():
                        link.send(copied)
                    self._serve(link)
                self.connected = False
            self._closed.wait(AGAIN)

    def _serve(self, link: Channel) -> None:
        while not self._closed.is_set():
            if not link.unread:
                poll = select.poll()  # select() ends at descriptor 1023
                for number in (link.fileno(), self._poke_r):
                    poll.register(number, select.POLLIN)
                ready = {number for number, _ in poll.poll()}
                if self._poke_r in ready:
                    os.read(self._poke_r, 4096)
                while self._to_tell:
                    link.send(self._to_tell.popleft())
                if self._closed.is_set():
                    return
                if link.fileno() not in ready:
                    continue
            for message in link.receive():
                if isinstance(message, m.Keep):
                    self._keep(message)
                    if message.buddy and message.rank in self._arenas:  # its process lives, or did
                        self._listen(link)
                elif isinstance(message, m.AskKept):
                    link.send(self._kept(message.rank))
                elif isinstance(message, m.Agreed):
                    self.agreed_at, self.agreed = _clock.monotonic(), message  # in this order for other threads
                elif isinstance(message, m.RefusedToStart):
                    self.refused = message.attempt
                elif isinstance(message, m.JobOver):
                    self.over = message
                elif isinstance(message, m.Completed):
                    self.completed = message.attempt
                elif isinstance(message, m.Pair):
                    self._buddies.pair(message, self._arenas)

    def _keep(self, message: m.Keep) -> None:
        """Replace the buffer of an earlier attempt's rank of the same number.

        After a lost connection the controller repeats the order: the process may have died meanwhile, and then the
        open descriptor is all that is left of it.
        """
        process = (message.pid, message.buffer_fd)
        if self._of.get(message.rank) == process and not os.path.lexists(_PATH.format(*process)):
            return
        if (old := self._buffers.pop(message.rank, -1)) >= 0:
            os.close(old)
        if (buffer_fd := open_buffer(*process)) >= 0:
            self._buffers[message.rank], self._of[message.rank] = buffer_fd, process
        before = self._arenas.get(message.rank)
        if before is not None and message.arena_fd >= 0 and before[1] == message.arena_id:
            return  # it has entered its training again, with the same memory
        if before is not None:
            del self._arenas[message.rank]
            os.close(before[0])
        if (arena_fd := open_buffer(message.pid, message.arena_fd)) >= 0:
            self._arenas[message.rank] = arena_fd, message.arena_id

    def _listen(self, link: Channel) -> None:
        """Take copies of other hosts' arenas, and say where; once on each connection."""
        if self._listening is link:
            return
        self._listening = link
        try:
            link.send(m.Listens(port=self._buddies.listen(link.own_address)))
        except (OSError, LastgaspError) as error:
            link.send(m.Remarked(text=f"a host cannot take copies of the arenas of others: {m.one_line(error)}"))

    def _kept(self, rank: int) -> m.Kept:
        buffer_fd = self._buffers.get(rank, -1)
        try:
            found = states(buffer_fd) if buffer_fd >= 0 else {}
        except OSError as error:
            log.warning("the crash-safe buffer of rank %d cannot be read: %s", rank, error)
            found = {}
        fd, identity = self._arenas.get(rank, (-1, b""))
        steps = arena.steps(fd, identity) if fd >= 0 else ()
        return m.Kept(
            rank=rank, steps=tuple(found), states=tuple(found.values()), arena=steps, arena_pid=os.getpid(), arena_fd=fd
        )
