"""The controller: a socket server around the state machine, outside the training ranks.

In the launcher's process it is a thread (`ControllerThread`); without a launcher rank 0 starts it as a
detached process (`python -m lastgasp.gasp.serve`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Iterable
from typing import Any

from lastgasp import __version__, _clock
from lastgasp.errors import ControlError
from lastgasp.topology import host_identity

from . import messages as m
from .actions import Action, AgreedAnew, Kill, Remark, Send, WentOn
from .admission import NotYet, WholeJobRefused, admit, is_newer, order_of
from .again import Offer
from .announced import Announced
from .arenas import Arenas
from .attempt import Attempt
from .buffers import OpenBuffers
from .doorway import Doorway, end_all_others
from .ends import kind_of_end
from .guard import Guard
from .hostloss import vanished
from .incidents import Incidents
from .keepers import Keepers
from .ladder import Ladder
from .operator import NOBODY
from .peers import Peer, by_our_clock, keep_alive, number_after, plain, read_frame, read_out, terminate
from .process_monitor import ProcessMonitor
from .read_ahead import ReadAhead
from .records import RecordWriter
from .service import Service
from .tls import TlsFiles

log = logging.getLogger("lastgasp.controller")

GREETING_TIMEOUT = 10.0
"""Seconds within which a connection must prove that it knows the token."""
RECORDS_LIMIT = 10.0
"""Seconds to wait at the end for records to be written; the job does not wait longer for a stalled file system."""
ANNOUNCE_LIMIT = 1.0
"""Seconds that start-up waits for the file by which `lastgasp ps` finds the job."""
TICK = 0.02
"""Seconds between two checks of the deadlines."""


class Controller:
    """Serves all attempts of one job. All methods run on the event loop's thread.

    Args:
        token: the job's secret; ranks prove that they know it.
        host: address to listen on; loopback by default.
    """

    def __init__(self, token: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self._token, self._host, self._port = token, host, port
        self._identity = host_identity()
        self._peers: dict[int, Peer] = {}
        self._by_writer: dict[asyncio.StreamWriter, Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._guard = Guard(log)
        self._framed: tuple[m.Message | None, bytes] = None, b""
        self.records = RecordWriter()
        self.incidents = Incidents(self.records)
        self._expected: int | None = None
        self._offering = -1
        self.keepers = Keepers(self.incidents.died_at, self._not_joining)
        self._buffers = OpenBuffers(self._peers, self.keepers)
        self.arenas = Arenas(self.keepers, token, self.incidents.note)
        self._watch: ProcessMonitor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started_s = _clock.wall_ns() // 1_000_000_000
        self._service = Service(lambda: self.attempt, self._send, self._started_s)
        self._announced = Announced(self.records, token, self._started_s)
        self._ahead = ReadAhead()
        self._replaced: set[int] = set()
        self.not_replaced: dict[int, str] = {}  # who was to enter again, and has ended before any has joined

    async def start(self) -> int:
        """Start listening, with TLS if the environment names the files.

        Raises:
            ConfigError: the TLS files are unusable.

        Returns:
            The port.
        """
        self._loop = asyncio.get_running_loop()
        files = TlsFiles.from_environment()
        self._door = Doorway(self._serve, files.server() if files is not None else None, GREETING_TIMEOUT)
        port = self._door.open(self._host, self._port)
        self._watch = ProcessMonitor(self._saw_death)
        self._ticker = asyncio.create_task(self._tick())
        self._announced.begin(f"{self._host}:{port}")
        await self.records.written(ANNOUNCE_LIMIT)
        return port

    async def stop(self) -> None:
        """Close every connection, thread and descriptor, in bounded time even if a file system stalls."""
        self._door.close()
        await end_all_others()  # all are ours; a connection that is being accepted has a task only later
        for rank in list(self._peers):
            self._drop(rank)
        self.arenas.clear()
        self._ahead.stop()
        assert self._watch is not None
        self._watch.close()
        self.incidents.flush()
        self._announced.withdraw()
        await self.records.written(RECORDS_LIMIT)
        self.records.close()

    @property
    def attempt(self) -> Attempt | None:
        """The current attempt; None before the first rank has joined."""
        return self.incidents.current

    def expect(self, attempt: int) -> None:
        """Accept only ranks of this attempt, as counted by the launcher; without this call the ranks' count is used."""
        self._expected = attempt

    @property
    def connected(self) -> int:
        """The connected ranks."""
        return sum(peer.writer is not None for peer in self._peers.values())

    def stop_ranks(self) -> None:
        """Ask the ranks of this host to save and exit, by SIGTERM as when a job is stopped."""
        terminate(self._peers.values())

    def offers(self, attempt: int) -> None:
        """The launcher will say what it can do for ranks of this attempt."""
        self._offering = attempt

    def offer(self, offer: Offer) -> None:
        """Take what the launcher can do for a recovery in place."""
        if self.attempt is not None:
            self.attempt.offered(offer)

    def report_exit(self, rank: int, how: str, pid: int = 0) -> None:
        """Take the launcher's report that this rank's process ended, even if it never joined."""
        self.keepers.rank_ended(self._expected, how)
        if pid in self._replaced and (before := self.incidents.previous) is not None:
            self.incidents.add_cause(before, rank, how)
        elif self.attempt is not None:
            again = self.attempt.again
            if again is not None and again.members:
                self.not_replaced |= dict.fromkeys(number_after(self._peers, again, rank, pid), how)
            elif again is not None and again.was_to_enter(rank, pid):
                self.not_replaced[rank] = how  # the next incarnation has to know, once its first rank has joined
            if again is None or not again.is_new(rank, pid):
                self._spawn(self._ended(self.attempt, rank, how))

    def _not_joining(self, exited: m.Exited) -> None:
        """Another launcher says that a rank's process has ended before it joined, or could not be made."""
        current, order = self.attempt, (exited.attempt, exited.incarnation)
        if current is not None and current.misses(exited):
            self.not_replaced[exited.rank] = exited.how
        elif current is not None and order_of(current.hello) == order:
            self._spawn(self._ended(current, exited.rank, exited.how))
        elif current is None or order > order_of(current.hello):
            self.keepers.put_off(exited)  # nobody has joined that attempt yet

    async def _ended(self, attempt: Attempt, rank: int, how: str) -> None:
        """It was a rank of `attempt`, which may be over by now: there the next one has taken its number."""
        at, peer = _clock.wall_ns(), self._peers.get(rank)
        if attempt is self.attempt:
            await read_out(peer)
        if attempt is self.attempt:
            self._gone(attempt, rank, how, how, at)
            attempt.machine.lost.setdefault(rank, f"is gone: {how}")  # also behind a training that it has ended
        if attempt.again is None or not attempt.again.members:  # which would be numbers of the next one
            self.incidents.add_cause(attempt, rank, how)
            self.incidents.flush()

    # -- connections ------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(GREETING_TIMEOUT):  # wait_for may swallow the cancellation of stop()
                hello = await self._greet(reader, writer)
            self._door.known()
            if isinstance(hello, m.Operator):
                await self._service.serve(reader, writer)
            elif isinstance(hello, m.Keeper):
                await self.keepers.serve(hello.host, reader, writer)
            else:
                await self._listen(hello.rank, reader, writer)
        except (TimeoutError, ControlError, OSError, EOFError) as error:
            # The end of an authenticated connection is handled elsewhere; a rank's by the state machine.
            if vanished(error) and (lost := self._by_writer.get(writer)) is not None and lost.elsewhere is not None:
                self.keepers.lost(lost.elsewhere[0])
                lost.silent = plain(error)
            say = log.debug if isinstance(error, NotYet) or not self._door.is_stranger() else self._door.log.warning
            say("connection from %s closed: %s", writer.get_extra_info("peername"), plain(error))
        except asyncio.CancelledError:
            writer.transport.abort()  # stop() ends the loop: with TLS, close() would wait for the other side
        finally:
            if (peer := self._by_writer.pop(writer, None)) is not None:
                self._closed(peer)
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> m.Greeting:
        nonce = os.urandom(32)
        challenge = m.Challenge(protocol=m.PROTOCOL, version=__version__, nonce=nonce, host=self._identity)
        writer.write(m.frame(challenge))
        hello = m.greeting(await read_frame(reader, m.MAX_GREETING))
        try:
            if isinstance(hello, m.Operator):
                self._service.admit(hello, self._token, nonce)
            elif isinstance(hello, m.Keeper):
                self.keepers.admit(hello, self._token, nonce)
            else:
                self._admit(hello, nonce)
        except ControlError as error:
            writer.write(m.frame(m.Refused(reason=str(error))))
            await writer.drain()
            raise
        if isinstance(hello, m.Hello):
            self._begin_attempt(hello)
        rank = hello.rank if isinstance(hello, m.Hello) else NOBODY
        mac = m.proof(self._token, "controller", hello.nonce, rank)
        writer.write(m.frame(m.Welcome(mac=mac, started_s=self._started_s)))
        keep_alive(writer.get_extra_info("socket"))
        if isinstance(hello, m.Hello):
            self._join(hello, writer)
        return hello

    def _admit(self, hello: m.Hello, nonce: bytes) -> None:
        try:
            admit(hello, nonce, self._token, self.attempt, self._expected)
        except WholeJobRefused as error:
            self._fail_gathers(str(error))
            raise

    def _join(self, hello: m.Hello, writer: asyncio.StreamWriter) -> None:
        assert self.attempt is not None and self._watch is not None
        self._drop(hello.rank)
        peer = self._peers[hello.rank] = self._by_writer[writer] = Peer(rank=hello.rank, writer=writer)
        peer.elsewhere = (hello.host, hello.pid)
        peer.address = str((writer.get_extra_info("peername") or ("",))[0])
        self._service.roster.joined(hello.rank, _clock.monotonic())
        here = hello.host == self._identity
        self._do(self.attempt.joined(hello.rank, _clock.monotonic(), hello.pid if here else 0))
        if here:
            peer.pid, peer.elsewhere = hello.pid, None
            with self._guard("the watch of a process"):
                self._watch.watch(hello.rank, hello.pid)

    def _begin_attempt(self, hello: m.Hello) -> None:
        """Start an attempt if this rank is its first. Precedes the Welcome: a welcomed rank finds the job in use."""
        if not is_newer(hello, self.attempt):
            return
        if self.attempt is not None and (again := self.attempt.again) is not None:
            self._replaced |= {peer.pid for rank, peer in self._peers.items() if rank in again.lost and peer.pid}
        for rank in list(self._peers):
            self._drop(rank)
        self.arenas.begin(*(self.attempt.leaves(hello) if self.attempt is not None else (0, False)))
        attempt = self.incidents.begin(hello, self._buffers)
        machine = attempt.machine
        machine.arenas = self.arenas
        if isinstance(machine, Ladder):
            machine.offering = lambda: self._offering == hello.attempt
            machine.elsewhere = lambda others: self.keepers.no_process(hello.attempt, others)
            machine.missing = lambda others: self.keepers.missing(hello.attempt, others)
            machine.address = lambda rank: peer.address if (peer := self._peers.get(rank)) is not None else ""
        for rank, how in self.not_replaced.items() if hello.incarnation else ():
            self._spawn(self._ended(attempt, rank, how))
        for exited in self.keepers.were_put_off(*order_of(hello)):
            self._spawn(self._ended(attempt, exited.rank, exited.how))
        self.not_replaced = {}
        self._service.roster.begin()
        self.keepers.begin(hello.attempt)
        self._announced.tell(hello.job, hello.directory)

    def _drop(self, rank: int) -> None:
        assert self._watch is not None
        peer = self._peers.pop(rank, None)
        self._watch.forget(rank)
        if peer is not None:
            self._service.gone(rank, "the job has started it anew")
        if peer is not None and peer.buffer_fd >= 0:
            os.close(peer.buffer_fd)

    async def _listen(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            message = m.from_rank(await read_frame(reader, m.MAX_FRAME))
            peer = self._peers.get(rank)
            if peer is None or peer.writer is not writer:
                return  # a process of an earlier attempt must not be taken for this attempt's
            with self._guard(f"what a rank said ({type(message).__name__})"):
                self._heard(rank, message)

    def _heard(self, rank: int, message: m.FromRank) -> None:
        attempt = self.attempt
        assert attempt is not None
        self._service.heard(rank, message)
        message = by_our_clock(self._peers.get(rank), message)
        if isinstance(message, m.GatherPart):
            if (whole := attempt.gather(rank, message)) is not None:
                self._do(Send(rank=r, message=whole) for r in list(self._peers))
            return
        if isinstance(message, m.Noted):
            self.incidents.note(message.text)
        elif isinstance(message, m.Led):
            attempt.led_by(message.by)
        elif isinstance(message, m.AskLeft | m.DropLeft):
            self._tell_left(rank, message)
        if isinstance(message, m.Noted | m.Led | m.AskLeft | m.DropLeft):
            return
        if isinstance(message, m.Begin):
            self.incidents.resumed(message.step, from_arena=self._keep(rank, message))
            if rank not in attempt.begun and self._watch is not None:
                attempt.took(rank, self._watch.age(rank))
        if isinstance(message, m.Begin | m.Status | m.Prepared):
            attempt.heard_step(rank, message)
            self.incidents.reached(message.step)
        self._do(attempt.machine.said(rank, message, _clock.monotonic()))
        if isinstance(message, m.Goodbye):
            self._send(rank, m.Farewell())

    def _tell_left(self, rank: int, message: m.AskLeft | m.DropLeft) -> None:
        if isinstance(message, m.DropLeft):
            self.arenas.drop_left()
        elif (peer := self._peers.get(rank)) is not None and self.attempt is not None:
            host = peer.elsewhere[0] if peer.elsewhere is not None else self._identity
            self._send(rank, self.arenas.left(rank, host, self.attempt.hello.world_size))

    def _keep(self, rank: int, begin: m.Begin) -> bool:
        """Open what must outlive the rank; on another host its launcher does. Returns as `Arenas.keep`."""
        peer = self._peers.get(rank)
        if peer is None:
            return False
        host, pid = peer.elsewhere or (self._identity, peer.pid or 0)
        self._buffers.keep(peer, begin)
        again = self.arenas.keep(rank, host, pid, begin)
        if begin.buddy and self.attempt is not None:
            self.arenas.partners.begins(rank, host, self.attempt.hello.world_size, self.attempt.machine.replicas)
        return again

    def _closed(self, peer: Peer) -> None:
        peer.writer = None
        with self._guard("the end of a connection"):
            self._lost(peer, *peer.end)

    def _lost(self, peer: Peer, evidence: str, at_ns: int) -> None:
        attempt, rank = self.attempt, peer.rank
        if attempt is None or self._peers.get(rank) is not peer:
            return
        status = self._watch.exit_status(rank) if self._watch is not None else ""
        text = f"{evidence} ({status})" if status else evidence
        self.keepers.ask(rank)
        self._gone(attempt, rank, text, status or (evidence if peer.silent else ""), at_ns)
        self._service.gone(rank, text)
        if peer.death is not None or not attempt.was_ended_by(rank):  # it may come to the script's next training
            self._fail_gathers(f"rank {rank} is gone: {text}")

    def _gone(self, attempt: Attempt, rank: int, text: str, how: str, at_ns: int) -> None:
        text = self._service.roster.on_host(rank) + text
        self._do(attempt.machine.gone(rank, text, kind_of_end(how), at_ns, _clock.monotonic()))

    def _saw_death(self, rank: int, pid: int, evidence: str, at_ns: int) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._died(rank, pid, evidence, at_ns)))

    async def _died(self, rank: int, pid: int, evidence: str, at_ns: int) -> None:
        peer = self._peers.get(rank)
        if peer is not None and peer.pid == pid:  # not of a process that has taken its place meanwhile
            peer.death = (evidence, at_ns)
            await read_out(peer)
            with self._guard("the death of a rank"):
                self._lost(peer, evidence, at_ns)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- actions ----------------------------------------------------------------------------------

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            try:
                self._act(action)
            except Exception as error:  # the other ranks still need their orders
                self._guard.failed("an order to a rank", error)
        self.incidents.flush()  # after the orders, which must not wait for a write

    def _act(self, action: Action) -> None:
        if isinstance(action, Send):
            self._send(action.rank, action.message)
        elif isinstance(action, Remark):
            self.incidents.note(action.text)
        elif isinstance(action, WentOn):
            self.incidents.went_on(action)
        elif isinstance(action, AgreedAnew):
            assert self.attempt is not None
            self.keepers.agreed(self.attempt.agreed())
            self.incidents.refresh(self.attempt)
        elif isinstance(action, Kill):
            log.warning("killing hung rank %d", action.rank)
            assert self._watch is not None
            self._watch.kill(action.rank)
        else:
            self.incidents.phase(action)
            for rank in self.attempt.hung if self.attempt is not None else ():
                self.keepers.ask(rank)
            if action.phase == "released" and self.attempt is not None:
                self.keepers.agreed(self.attempt.agreed())
                path, again = self.attempt.machine.outcome.path, self.attempt.again
                if path and (again is None or again.from_files):
                    self._ahead.begin(path, alone=not self.keepers.most)

    def _send(self, rank: int, message: m.Message) -> bool:
        """Return False if the rank is not connected."""
        peer = self._peers.get(rank)
        if peer is None or peer.writer is None or peer.writer.is_closing():
            return False
        if message is not self._framed[0]:  # an order to all ranks is encoded once
            self._framed = message, m.frame(message)
        peer.writer.write(self._framed[1])
        return True

    def _fail_gathers(self, why: str) -> None:
        if self.attempt is not None:
            answers = self.attempt.failed_gathers(_clock.monotonic(), why)
            self._do(Send(rank=rank, message=answer) for rank, answer in answers)

    async def _tick(self) -> None:
        """Enforce deadlines and detect hangs, whatever the calls below raise."""
        while True:
            await asyncio.sleep(TICK)
            attempt, now = self.attempt, _clock.monotonic()
            if attempt is None or self._watch is None:
                continue
            with self._guard("a look at how ranks ended"):
                self.incidents.explain(self._watch.exit_status)
            with self._guard("a look at the deadlines"):
                self._do(attempt.machine.tick(now, _clock.wall_ns(), self._watch.stopped()))
            with self._guard("a look at the gathers"):
                self._do(Send(rank=rank, message=answer) for rank, answer in attempt.failed_gathers(now))
            self.keepers.completed(attempt.hello.attempt if attempt.was_ended() and not attempt.unprotected else -1)
            self.records.look()
