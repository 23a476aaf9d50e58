"""What is said of a peer that cannot be reached, or ends: who it is, and what may be wrong."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lastgasp.errors import ControlError, DeadlineExceeded
from lastgasp.gasp import link as link_module
from lastgasp.gasp.buddy_sender import _SenderLink
from lastgasp.gasp.link import Link
from support.fake_controller import HELLO, TOKEN


@contextmanager
def listener() -> Iterator[str]:
    """Takes one connection, and closes it at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=lambda: server.accept()[0].close())
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            thread.join(60.0)


def test_a_launcher_that_has_just_died_is_no_matter_of_tls() -> None:
    with listener() as address, pytest.raises(ControlError, match="has its launcher just ended") as error:
        Link(address, TOKEN, HELLO)
    assert str(error.value).startswith(f"the controller at {address} broke the greeting off: the controller closed")
    assert "TLS" not in str(error.value)


def test_one_that_has_said_nothing_for_long_may_use_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a greeting of TLS, and gives up in the end."""
    monkeypatch.setattr(link_module, "SILENT", -1.0)
    with listener() as address, pytest.raises(ControlError, match="where the job uses TLS"):
        Link(address, TOKEN, HELLO)


def test_a_partner_host_is_called_one() -> None:
    with listener() as address, pytest.raises(ControlError) as error:
        _SenderLink(address, TOKEN, 0)
    name = "the launcher of the partner host"
    assert str(error.value).startswith(f"{name} at {address} broke the greeting off: {name} closed the connection")


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "CONNECT_TIMEOUT", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    words = r"the controller at.*Has its launcher ended, is this the address .*LASTGASP_CONTROLLER"
    with pytest.raises(DeadlineExceeded, match=words):
        Link(address, TOKEN, HELLO)
    with pytest.raises(DeadlineExceeded) as error:
        _SenderLink(address, TOKEN, 0)
    assert "the launcher of the partner host at" in str(error.value)
    assert "Has its launcher ended, is there a firewall in between?" in str(error.value)
