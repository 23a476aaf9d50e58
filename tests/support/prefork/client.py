"""The caller's end of images: `subprocess.Popen` forks from them where they can stand in."""

from __future__ import annotations

import functools
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lastgasp.launch.warm_process import NoFork, _collecting_orphans, order_for
from lastgasp.testing.jobs import ends_with_its_parent
from support.prefork.images import ALONE, MODULES, image_of, is_warm_process
from support.prefork.order import ROOM, Order, room_for
from support.prefork.server import BOOT

COLD = "TESTS_COLD"
"""A variable; where it is set, all processes are started as ever."""
PATIENCE = 150.0
"""Seconds that an image may take to import, and to fork, on a loaded machine; then a process is started as ever."""
LINE, VARIABLES = 1 << 13, 1 << 14
"""Bytes of room for command lines and environments in /proc."""
TESTS = str(Path(__file__).parents[2])
_FORKABLE = {
    "executable": (None,), "preexec_fn": (None, ends_with_its_parent), "close_fds": (True,),
    "shell": (False,), "restore_signals": (True,), "gid": (None,), "gids": (None,), "uid": (None,), "umask": (-1,),
    "process_group": (-1, None),
}  # fmt: skip
_RESTORED = {signal.SIGPIPE, signal.SIGXFSZ}


class Image:
    """One process that has imported, and its connection. Close it."""

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self.connection, self._process = connection, process
        self.pid = process.pid if process is not None else 0

    @classmethod
    def started(cls, python: str, name: str, environment: Mapping[str, str]) -> Image:
        """Start it and wait until it has imported.

        Raises:
            NoFork: it cannot be forked.
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        plain = {name: value for name, value in environment.items() if not name.startswith("LASTGASP_")}
        arguments = [str(theirs.fileno()), ",".join(MODULES[name]), TESTS, "." * LINE]
        with theirs:
            process = subprocess.Popen(
                [python, "-c", BOOT, *arguments],
                env=plain | {ROOM: "." * VARIABLES},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if "TESTS_PREFORK_LOG" in os.environ else subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        image = cls(mine, process)
        try:
            image.answer()
        except NoFork:
            image.close()
            raise
        return image

    def fork(self, order: Order, streams: Sequence[int], folder: str) -> int:
        """The process id of a child of this process, which has begun.

        Raises:
            NoFork: there is none, and will be none.
        """
        with ExitStack() as stack:
            reading, writing = os.pipe()
            stack.callback(os.close, writing)  # the child ends where this is closed and nothing was written
            stack.callback(os.close, reading)
            place = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, place)
            with _collecting_orphans():
                self._send(order, *streams[:3], place, reading, *streams[3:])
                pid = int(self.answer()["pid"])
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises where it is no child
            os.write(writing, b"x")  # only now may it end, and leave orphans of its own
            return pid

    def answer(self) -> dict[str, Any]:
        """The next one. Raises NoFork where it says why not, or is none; a process that gave up is collected."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        try:
            data = self.connection.recv(4096) if poll.poll(PATIENCE * 1000) else b""
        except OSError:
            data = b""
        if not data:
            raise Gone("the image is gone, or too slow")
        answer: dict[str, Any] = json.loads(data)
        if why := answer.get("why"):
            if pid := answer.get("pid"):
                os.waitpid(pid, 0)
            raise NoFork(why)
        return answer

    def close(self) -> None:
        """End it; idempotent. Who was forked from it goes on."""
        self.connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _send(self, order: Order, *descriptors: int) -> None:
        memory = os.memfd_create("tests-prefork", os.MFD_CLOEXEC)
        try:
            os.write(memory, order.encoded())
            socket.send_fds(self.connection, [b"x"], [memory, *descriptors])
        except OSError as error:
            raise Gone("the image is gone") from error
        finally:
            os.close(memory)


class Gone(NoFork):
    """The image itself."""


class Prefork:
    """The images of this process. Attribute `counts`: what was forked, and why other commands were not."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.on = not os.environ.get(COLD)
        self._images: dict[tuple[str, ...], Image | str] = {}
        self._lock = threading.Lock()

    def fork(self, command: Sequence[str], order: Order, streams: Sequence[int], folder: str) -> int:
        """A child of this process.

        Raises:
            NoFork: it must be started as ever.
        """
        if sum(map(len, command)) + len(command) > LINE or room_for(order.environment) > VARIABLES:
            raise NoFork("too long")
        with self._lock:
            key = (command[0], image_of(command), order.environment.get("PYTHONPATH", ""))
            try:
                return self._image(key, order.environment).fork(order, streams, folder)
            except (Gone, ChildProcessError) as error:
                self._forget(key)
                raise NoFork(str(error)) from error

    def close(self) -> None:
        """End the images."""
        for key in list(self._images):
            self._forget(key)

    def sockets(self) -> set[str]:
        """Those of this process that lead to images, as /proc shows them."""
        images = [image for image in list(self._images.values()) if isinstance(image, Image)]
        return {f"socket:[{os.fstat(image.connection.fileno()).st_ino}]" for image in images}

    def processes(self) -> list[int]:
        """Process ids of the images."""
        return [image.pid for image in list(self._images.values()) if isinstance(image, Image)]

    def note(self, what: str) -> None:
        """Count it; a file that TESTS_PREFORK_LOG names shows what is forked, and why the rest is not."""
        self.counts[what] += 1
        if path := os.environ.get("TESTS_PREFORK_LOG"):
            with Path(path).open("a") as file:
                file.write(f"{os.getpid()} {what}\n")

    def _image(self, key: tuple[str, ...], environment: Mapping[str, str]) -> Image:
        image = self._images.get(key)
        if image is None:
            try:
                image = Image.started(key[0], key[1], environment)
            except NoFork as error:
                image = f"no image: {error}"
            self._images[key] = image
        if isinstance(image, str):
            raise NoFork(image)
        return image

    def _forget(self, key: tuple[str, ...]) -> None:
        image = self._images.pop(key, None)
        if isinstance(image, Image):
            image.close()


class _Nested(Prefork):
    """In a forked launcher: the one image that was forked along with it."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._only = Image(connection)

    def _image(self, key: tuple[str, ...], environment: Mapping[str, str]) -> Image:
        if key[0] != sys.executable:
            raise NoFork("another interpreter")
        return self._only

    def _forget(self, key: tuple[str, ...]) -> None:
        self.on = False
        self._only.close()


_for_good = ExitStack()


def serve_nested(connection: socket.socket) -> None:
    """From now on this process forks from that image, for good."""
    _for_good.enter_context(installed(_Nested(connection)))


@contextmanager
def installed(prefork: Prefork) -> Iterator[Prefork]:
    """Inside, `subprocess.Popen` gets its processes from there where they can be had."""
    original = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    signature = inspect.signature(original)

    @functools.wraps(original)
    def execute_child(self: Any, *arguments: Any) -> None:
        asked = signature.bind(self, *arguments).arguments
        try:
            self.pid = _fork(prefork, asked)
        except NoFork as error:
            if str(error):
                prefork.note(f"cold: {error}: {_named(asked)}")
            original(self, *arguments)
            return
        prefork.note(f"forked: {_named(asked)}")
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in _PIPES))

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]
    try:
        yield prefork
    finally:
        subprocess.Popen._execute_child = original  # type: ignore[attr-defined]
        prefork.close()


def _words(asked: Mapping[str, Any]) -> list[str]:
    words = asked["args"]
    return [os.fsdecode(word) for word in ([words] if isinstance(words, str | bytes | os.PathLike) else words)]


def _named(asked: Mapping[str, Any]) -> str:
    command = _begun_in(asked)[1]
    return image_of(command) or "warm process"


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _fork(prefork: Prefork, asked: Mapping[str, Any]) -> int:
    folder, command = _begun_in(asked)
    warm, passed = isinstance(prefork, _Nested) and is_warm_process(command), list(asked["pass_fds"])
    if not prefork.on or not (image_of(command) or warm):
        raise NoFork("")
    if (passed and not warm) or any(asked[name] not in allowed for name, allowed in _FORKABLE.items() if name in asked):
        raise NoFork("an option of Popen's")
    given_environment = os.environ if asked["env"] is None else asked["env"]
    environment = {os.fsdecode(name): os.fsdecode(value) for name, value in given_environment.items()}
    if image_of(command) == "toy" and environment.get("LASTGASP_BACKEND") == "ascend":
        raise NoFork("")  # rank 0 starts a controller, and its starter ends: an orphan that a fork would collect, too
    plain = order_for(command, environment)
    order = Order(
        command=command,
        environment=environment,
        umask=plain.umask,
        limits=plain.limits,
        parent=os.getpid(),
        session=bool(asked["start_new_session"]),
        ends_with_parent=asked["preexec_fn"] is ends_with_its_parent,
        ignored=sorted(_ignored() - _RESTORED),
        blocked=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        nested=not warm
        and image_of(command) not in ALONE
        and (not isinstance(prefork, _Nested) or "-m" in command[1:3]),
        passed=passed,
    )
    given = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
    streams = [number if number >= 0 else own for own, number in enumerate(given)]
    return prefork.fork(command, order, [*streams, *passed], folder)


def _begun_in(asked: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The working directory and the command, which `env -C FOLDER` becomes without another process."""
    folder, words = os.fspath(asked["cwd"] or "."), _words(asked)
    return (os.path.join(folder, words[2]), words[3:]) if words[:2] == ["env", "-C"] else (folder, words)


def _ignored() -> set[int]:
    with open("/proc/self/status") as file:
        mask = next((int(line.split()[1], 16) for line in file if line.startswith("SigIgn:")), 0)
    return {int(number) for number in signal.valid_signals() if mask >> (number - 1) & 1}  # make ignores 32 and 33, too
