"""Connections between ranks are cut, and no others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from lastgasp.pytorch import cut
from lastgasp.pytorch.cut import cut_connections, cut_from, cut_hosts
from lastgasp.pytorch.socket_inodes import SocketInodes, listed

_PEER = "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2]))); s.recv(1); print('cut')"
FORMS = {"IPv4": ("127.0.0.1", "127.0.0.1"), "IPv6": ("::1", "::1"), "both": ("::", "127.0.0.1")}
"""Where the listener listens, and what its peer calls it: a listener for both sees IPv4 in the form of IPv6."""


def server_at(address: str) -> socket.socket:
    """It listens."""
    if ":" not in address:
        return socket.create_server((address, 0))
    return socket.create_server((address, 0), family=socket.AF_INET6, dualstack_ipv6=address == "::")


def refuses(*_: object) -> None:
    """Stands for a container where the kernel must not be asked."""
    raise PermissionError(1, "Operation not permitted")


def kernel_answers() -> bool:
    """Not everywhere: it is one of its modules, and containers may forbid to ask."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        try:
            inodes = SocketInodes()
        except OSError:
            return False
        try:
            return inodes.find((one.getsockname(), one.getpeername())) != ""
        finally:
            inodes.close()


needs_answers = pytest.mark.skipif(not kernel_answers(), reason="this kernel does not answer sock_diag (inet_diag)")


WAYS = [pytest.param("the kernel is asked", marks=needs_answers), "it must not be", "it has no such module"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_only_connections_to_the_given_processes_are_cut(
    form: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "it must not be":
        monkeypatch.setattr(SocketInodes, "__init__", refuses)
    elif way == "it has no such module":
        monkeypatch.setattr(SocketInodes, "find", lambda self, ends: "")
    else:
        monkeypatch.setattr(cut, "listed", lambda: pytest.fail("the whole list was read"))
    where, name = FORMS[form]
    with server_at(where) as server, socket.create_server(("127.0.0.1", 0)) as own:
        port = str(server.getsockname()[1])
        command = [sys.executable, "-c", _PEER, name, port]
        peer, stranger = (subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2))
        ends = [server.accept()[0] for _ in range(2)]
        near = socket.create_connection(own.getsockname())
        far = own.accept()[0]
        assert cut_connections([peer.pid, os.getpid()]) == 1
        assert peer.communicate(timeout=200)[0] == "cut\n"
        assert stranger.poll() is None
        near.sendall(b"x")
        assert far.recv(1) == b"x"
        cut_one = [end for end in ends if _is_cut(end)]
        assert len(cut_one) == 1
        for end in (*ends, near, far):
            end.close()
        assert stranger.communicate(timeout=200)[0] == "cut\n"


def _is_cut(end: socket.socket) -> bool:
    end.setblocking(False)
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.mark.parametrize("side", ["of the store", "of who is there"])
def test_who_is_at_the_store_where_all_meet_again_stays_there(side: str) -> None:
    """The store may be in a rank's process (MindIO leads), and that rank the last to cut its connections."""
    with (
        server_at("127.0.0.1") as store,
        socket.create_connection(store.getsockname()) as client,
        store.accept()[0] as served,
    ):
        theirs, port = (client if side == "of the store" else served).fileno(), store.getsockname()[1]
        command = [sys.executable, "-c", "import sys; print('here', flush=True); sys.stdin.read()"]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=[theirs]) as peer:
            assert peer.stdout is not None and peer.stdout.readline() == b"here\n"
            assert cut_connections([peer.pid], keep=port) == 0
            assert cut_connections([peer.pid], keep=port + 1) == 1


def test_a_process_that_is_gone_is_no_trouble() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait(60)
    assert cut_connections([done.pid]) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(done.pid, 0)


@needs_answers
def test_both_ways_find_the_same_inode() -> None:
    inodes = SocketInodes()
    try:
        for where, name in FORMS.values():
            with server_at(where) as server:
                one = socket.create_connection((name, server.getsockname()[1]))
                other = server.accept()[0]
                for end in (one, other):
                    ends = end.getsockname()[:2], end.getpeername()[:2]
                    expected = os.readlink(f"/proc/self/fd/{end.fileno()}")
                    assert inodes.find(ends) == listed()(ends) == expected.removeprefix("socket:[")[:-1]
                    end.close()
        assert inodes.find((("127.0.0.1", 1), ("127.0.0.1", 2))) == listed()((("127.0.0.1", 1), ("127.0.0.1", 2))) == ""
    finally:
        inodes.close()


def test_connections_to_a_host_that_has_vanished_are_cut() -> None:
    """By its address, also in the form of IPv6; those to others stay."""
    with (
        socket.create_server(("127.0.0.2", 0)) as gone,
        socket.create_server(("127.0.0.1", 0)) as here,
        socket.create_connection(gone.getsockname()) as lost,
        socket.create_connection(here.getsockname()) as kept,
        here.accept()[0] as other,
    ):
        cut_hosts(["::ffff:127.0.0.2"])
        assert lost.recv(1) == b""
        other.sendall(b"x")
        assert kept.recv(1) == b"x"
        cut_hosts([])


def test_only_connections_to_that_port_are_cut() -> None:
    """This process has the other end of both, which is not to a port of that number."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ends = [socket.create_connection(server.getsockname()) for server in (one, other)]
        (first, _), (second, _) = one.accept(), other.accept()
        cut_from(one.getsockname()[1])
        second.sendall(b"a")
        assert [end.recv(1) for end in ends] == [b"", b"a"]
        assert first.recv(1) == b""
        for each in (*ends, first, second):
            each.close()
