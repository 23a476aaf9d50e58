"""The control connection over TLS: a complete job, who is kept out, and problems with files."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from lastgasp.errors import ConfigError, ControlError
from lastgasp.gasp import messages as m
from lastgasp.gasp import operator as operator_module
from lastgasp.gasp.link import Link
from lastgasp.gasp.operator import OperatorLink
from lastgasp.gasp.serve import ControllerThread, new_token
from lastgasp.gasp.tls import CA, CERT, KEY, TlsFiles
from lastgasp.testing.jobs import run_job
from support.certificates import issue
from support.fake_controller import HELLO

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """The job's."""
    return trustme.CA()


@pytest.fixture
def variables(tmp_path: Path, authority: trustme.CA) -> dict[str, str]:
    return issue(tmp_path / "tls", authority, "node-0")


@pytest.fixture
def secured(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[ControllerThread]:
    """A controller with TLS; this process is a node with files, too."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    controller = ControllerThread(new_token())
    yield controller
    controller.stop()


def drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process no longer uses TLS."""
    for name in (CERT, KEY, CA):
        monkeypatch.delenv(name)


# -- who gets in ----------------------------------------------------------------------------------


def test_ranks_and_operators_get_in_and_what_they_say_cannot_be_read(
    secured: ControllerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = secured.endpoint
    with closing(Link(end.address, end.token, HELLO)) as link:
        assert isinstance(link._socket, ssl.SSLSocket) and link._socket.version() == "TLSv1.3"
        monkeypatch.setattr(operator_module, "MARGIN", 60.0)
        with OperatorLink(end.address, end.token, seconds=60.0) as operator:
            assert operator.ranks().world_size == HELLO.world_size


def test_a_rank_without_tls_is_told_what_is_missing(secured: ControllerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    drop(monkeypatch)
    with pytest.raises(ControlError, match="LASTGASP_TLS_CERT"):
        OperatorLink(secured.endpoint.address, secured.endpoint.token, seconds=60.0)


def test_a_rank_with_tls_and_a_controller_without(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    controller = ControllerThread(new_token())
    try:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ControlError, match="no TLS with the controller"):
            Link(controller.endpoint.address, controller.endpoint.token, HELLO)
    finally:
        controller.stop()


def test_a_certificate_of_another_ca_is_refused(
    secured: ControllerThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = issue(tmp_path / "other", trustme.CA(), "stranger")
    for name, value in other.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ControlError):
        Link(secured.endpoint.address, secured.endpoint.token, HELLO)
    monkeypatch.setenv(CA, str(tmp_path / "tls" / "ca.pem"))  # it trusts us; we do not trust it
    with pytest.raises(ControlError):
        Link(secured.endpoint.address, secured.endpoint.token, HELLO)


def test_no_certificate_no_entry(secured: ControllerThread, variables: dict[str, str]) -> None:
    """TLS 1.3 lets the client believe that it is in; the first read shows that it is not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(variables[CA])
    host, _, port = secured.endpoint.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as plain, context.wrap_socket(plain) as wrapped:
        told = b""
        with contextlib.suppress(ssl.SSLError):  # or the end of the connection, whichever comes first
            told = wrapped.recv(100)
    assert told == b""


def test_older_tls_is_refused(secured: ControllerThread, variables: dict[str, str]) -> None:
    context = TlsFiles(*map(Path, (variables[CERT], variables[KEY], variables[CA]))).client()
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    host, _, port = secured.endpoint.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as plain, pytest.raises(OSError):
        context.wrap_socket(plain)


# -- the connection -------------------------------------------------------------------------------


def test_a_controller_that_stops_keeps_no_connection(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also none that waits for the other side's goodbye: the loop that would hear it has ended."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        controller = ControllerThread(new_token())
        with closing(Link(controller.endpoint.address, controller.endpoint.token, HELLO)):
            controller.stop()
            assert len(os.listdir("/proc/self/fd")) == before + 1, "the link's own end"
    finally:
        gc.enable()


def test_both_ways_at_once(secured: ControllerThread) -> None:
    """OpenSSL allows no read beside a write; a long gather goes both ways."""
    end, parts = secured.endpoint, 40
    links = [Link(end.address, end.token, msgspec.structs.replace(HELLO, rank=rank)) for rank in (0, 1)]
    found: dict[int, int] = {0: 0, 1: 0}

    def listen(rank: int) -> None:
        while found[rank] < parts:
            if select.select([links[rank].fileno()], [], [], 60)[0]:
                found[rank] += sum(isinstance(one, m.Gathered) for one in links[rank].receive())

    threads = [threading.Thread(target=listen, args=(rank,)) for rank in (0, 1)]
    try:
        for thread in threads:
            thread.start()
        for number in range(parts):
            for link in links:
                link.send(m.GatherPart(tag=f"t{number}", payload=bytes(200_000)))
        for thread in threads:
            thread.join(300)
        assert found == {0: parts, 1: parts}
    finally:
        for link in links:
            link.close()


@pytest.mark.fault
@pytest.mark.slow
def test_a_job_over_tls_saves_its_step(variables: dict[str, str], tmp_path: Path) -> None:
    """A rank is killed under `lastgasp run`; the survivor saves, and the next attempt resumes."""
    directory = tmp_path / "d"
    paths = os.pathsep.join(filter(None, [str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "lastgasp", "run", "--max-restarts", "0", "--nproc-per-node", "2"]
    command += [str(SUPPORT / "launch_worker.py"), str(directory), "die", "3"]
    done = run_job(command, tmp_path / "log", timeout=300, environ=os.environ | variables | {"PYTHONPATH": paths})
    assert done.returncode == 83, done.output[-4000:]
    assert [path.name for path in directory.glob("step-*")] == ["step-3.toy"]
    assert signal.SIGKILL.name in done.output


# -- files ----------------------------------------------------------------------------------------


def test_none_is_none() -> None:
    assert TlsFiles.from_environment({}) is None


@pytest.mark.parametrize("missing", [CERT, KEY, CA])
def test_all_or_none(variables: dict[str, str], missing: str) -> None:
    with pytest.raises(ConfigError, match=f"{missing}=None"):
        TlsFiles.from_environment({name: value for name, value in variables.items() if name != missing})


def test_a_key_that_others_can_read(variables: dict[str, str]) -> None:
    Path(variables[KEY]).chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        TlsFiles.from_environment(variables)


def test_a_key_of_roots_that_the_group_can_read_is_as_kubernetes_mounts_it(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a container that root does not run; the tests' own user plays that one."""
    key = Path(variables[KEY])
    key.chmod(0o440)
    os.chown(key, 0, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert TlsFiles.from_environment(variables) is not None
    key.chmod(0o444)
    with pytest.raises(ConfigError, match=r"Its mode is 0444.*defaultMode 0400, or 0440"):
        TlsFiles.from_environment(variables)


def test_a_file_that_is_not_there(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        TlsFiles.from_environment(variables | {CA: "/nowhere/ca.pem"})


@pytest.mark.parametrize("wrong", [CERT, KEY, CA])
def test_files_that_are_something_else(variables: dict[str, str], wrong: str) -> None:
    Path(variables[wrong]).write_text("no PEM\n")
    files = TlsFiles.from_environment(variables)
    assert files is not None
    with pytest.raises(ConfigError, match=wrong):
        files.client()


def test_a_key_with_a_password_is_refused_and_asks_nobody(variables: dict[str, str], tmp_path: Path) -> None:
    key = serialization.load_pem_private_key(Path(variables[KEY]).read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    Path(variables[KEY]).write_bytes(locked)
    files = TlsFiles.from_environment(variables)
    assert files is not None
    with pytest.raises(ConfigError, match="without a password"):
        files.server()


@pytest.mark.parametrize(("begin", "end"), [(-30, -1), (1, 30)], ids=["expired", "not yet valid"])
def test_a_certificate_out_of_its_time_is_refused_with_its_dates(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: int, end: int
) -> None:
    """By its owner: TLS 1.3 would tell neither side why."""
    now = datetime.now(UTC)
    span = [now + timedelta(days=days) for days in (begin, end)]
    files = issue(tmp_path / "old", authority, "node-0", not_before=span[0], not_after=span[1])
    for name, value in files.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"LASTGASP_TLS_CERT.*valid now; this one is from .* GMT"):
        ControllerThread(new_token())
    with pytest.raises(ConfigError, match="valid now"):
        Link("127.0.0.1:1", "t", HELLO)
