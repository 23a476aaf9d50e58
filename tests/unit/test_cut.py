"""Connections between ranks are cut, and no others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from lastgasp.pytorch.cut import cut_connections

_PEER = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.recv(1); print('cut')"


def test_only_connections_to_the_given_processes_are_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as own:
        port = str(server.getsockname()[1])
        peer, stranger = (
            subprocess.Popen([sys.executable, "-c", _PEER, port], stdout=subprocess.PIPE, text=True) for _ in range(2)
        )
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


def test_a_process_that_is_gone_is_no_trouble() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait(60)
    assert cut_connections([done.pid]) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(done.pid, 0)
