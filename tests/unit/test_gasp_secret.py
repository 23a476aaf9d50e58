"""The secret of a job on several nodes: where it comes from, who is kept out, and that it does not travel."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lastgasp import connect
from lastgasp.errors import AuthenticationError, ConfigError, ControlError
from lastgasp.gasp import rundir, signin
from lastgasp.gasp.link import Link
from lastgasp.gasp.operator import OperatorLink
from lastgasp.gasp.secret import FILE, INSECURE, TOKEN, UNCOORDINATED, Secret, token_from_environment
from lastgasp.gasp.serve import Endpoint
from lastgasp.launch.attempts import LaunchAttempts
from lastgasp.launch.main import require_secret
from lastgasp.launch.notice import Notice
from lastgasp.session import Contact
from lastgasp.steps import ringfile
from lastgasp.topology import Place, data_parallel
from support import leaks
from support.fake_controller import HELLO
from support.worker_group import Group, Store, begun

SECRET = "5" * 32


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the shell of the tests has set; but jobs and rings of the tests stay in places of their own."""
    kept = (rundir.VARIABLE, ringfile.VARIABLE, leaks.MARK)
    for name in [name for name in os.environ if name.startswith("LASTGASP_") and name not in kept]:
        monkeypatch.delenv(name)


def first_and_second(store: Store, second: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Environments of the ranks of two nodes; the second node's own variables are `second`."""
    monkeypatch.setenv("LASTGASP_BIND", "127.0.0.1")
    one = LaunchAttempts()
    monkeypatch.delenv(TOKEN, raising=False)
    for name, value in second.items():
        monkeypatch.setenv(name, value)
    two = LaunchAttempts()
    for current in begun(Group(group_world_size=2, store=store), one, two):
        yield {name: value for name, value in current.environment.items() if name != signin.VARIABLE}
    one.close()
    two.close()


# -- who only reads the store ---------------------------------------------------------------------


def test_nothing_in_the_store_lets_anybody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third host read the token there, listed the job, and joined as attempt 99."""
    monkeypatch.setenv(TOKEN, SECRET)
    store = Store()
    pair = first_and_second(store, {TOKEN: SECRET}, monkeypatch)
    ours, theirs = next(pair), next(pair)
    assert ours == theirs and ours[TOKEN] == SECRET
    stolen = json.loads(store.content["lastgasp/notice"])
    assert SECRET.encode() not in b"".join(store.content.values()) and stolen["token"] == ""
    for guess in (stolen["token"], stolen["seal"], "0"):
        with pytest.raises(AuthenticationError):
            OperatorLink(stolen["controller"], guess, seconds=60.0)
        with pytest.raises(AuthenticationError, match="LASTGASP_TOKEN_FILE"):
            Link(stolen["controller"], guess, msgspec.structs.replace(HELLO, attempt=99))
    list(pair)


def test_the_attempt_is_the_launchers_even_of_one_who_knows_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, SECRET)
    attempts = LaunchAttempts()
    try:
        address = attempts.begin(Group(), "job").environment["LASTGASP_CONTROLLER"]  # type: ignore[arg-type]
        token = attempts.begin(Group(), "job").environment[TOKEN]  # type: ignore[arg-type]
        for wrong in (0, 2, 99):
            with pytest.raises(ControlError, match=f"attempt {wrong} is not the one that runs"):
                Link(address, token, msgspec.structs.replace(HELLO, attempt=wrong))
        with closing(Link(address, token, msgspec.structs.replace(HELLO, attempt=1))):
            pass
    finally:
        attempts.close()


def test_a_forged_notice_leads_ranks_to_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its address may be a stranger's, who cannot prove the token; so the ranks refuse."""
    monkeypatch.setenv(TOKEN, SECRET)
    forged = Notice("127.0.0.1:1", "known-to-the-stranger", "job", 7)
    store = Store()
    store.set("lastgasp/notice/0", msgspec.json.encode(forged).decode())
    attempts = LaunchAttempts()
    with caplog.at_level(logging.WARNING):
        found = attempts.begin(Group(group_world_size=2, group_rank=1, store=store), "job")  # type: ignore[arg-type]
        attempts.close()
    assert found.environment[TOKEN] == SECRET
    assert "does not know this node's secret" in caplog.text


# -- nodes that share none ------------------------------------------------------------------------


def test_without_a_secret_no_controller_listens_to_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job trains on, and its ranks say why nobody coordinates them."""
    store = Store()
    pair = first_and_second(store, {}, monkeypatch)
    for environment in pair:
        assert not environment["LASTGASP_CONTROLLER"] and TOKEN not in environment
        assert "LASTGASP_TOKEN_FILE" in environment[UNCOORDINATED]


def test_nor_does_one_that_a_job_of_one_host_has_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--nnodes 1:2`: the token that its launcher had made was in the store once a second host had come."""
    monkeypatch.setenv("LASTGASP_BIND", "127.0.0.1")
    alone, newcomer, store = LaunchAttempts(), LaunchAttempts(), Store()
    try:
        token = begun(Group(), alone)[0].environment[TOKEN]
        for current in begun(Group(group_world_size=2, store=store), alone, newcomer):
            assert not current.environment["LASTGASP_CONTROLLER"] and TOKEN not in current.environment
            assert "LASTGASP_TOKEN_FILE" in current.environment[UNCOORDINATED]
        assert token.encode() not in b"".join(store.content.values())
        assert begun(Group(), alone)[0].environment[TOKEN] != token
    finally:
        alone.close()
        newcomer.close()


def test_one_node_without_it_is_refused_and_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, SECRET)
    pair = first_and_second(Store(), {}, monkeypatch)
    _, theirs = next(pair), next(pair)
    with pytest.raises(AuthenticationError, match="each of them needs the same secret"):
        Link(theirs["LASTGASP_CONTROLLER"], theirs[TOKEN], HELLO)
    list(pair)


def test_insecure_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INSECURE, "1")
    store = Store()
    pair = first_and_second(store, {}, monkeypatch)
    ours, theirs = next(pair), next(pair)
    assert ours == theirs and len(ours[TOKEN]) == 64
    list(pair)


@pytest.mark.parametrize("nnodes", ["2", "1:4"])
def test_lastgasp_run_refuses_several_nodes_without_it(monkeypatch: pytest.MonkeyPatch, nnodes: str) -> None:
    with pytest.raises(ConfigError, match=r"--nnodes .*openssl rand -hex 32.*LASTGASP_INSECURE=1"):
        require_secret(nnodes)
    require_secret("1")
    require_secret("1:1")
    monkeypatch.setenv(TOKEN, SECRET)
    require_secret(nnodes)


# -- ranks without a launcher of ours -------------------------------------------------------------


def rank_of_two(rank: int, told: list[Any]) -> Contact | None:
    """What a rank of two nodes finds; rank 0 puts into `told` what it announces."""
    place = Place(rank=rank, world_size=2, replicas=data_parallel(2))

    def from_rank_0(value: Any) -> Any:
        if rank == 0:
            told.append(value)
        return told[-1]

    return connect.contact_of(place, "this job spans 2 nodes", from_rank_0)


def test_rank_0_passes_on_what_all_know_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTGASP_BIND", "127.0.0.1")
    monkeypatch.setenv(TOKEN, SECRET)
    monkeypatch.setattr(connect, "start_detached", lambda host, token: Endpoint(host, 1, token))
    told: list[Any] = []
    assert rank_of_two(0, told) == rank_of_two(1, told) == Contact("127.0.0.1:1", SECRET)
    assert SECRET not in str(told)
    monkeypatch.delenv(TOKEN)
    with pytest.raises(ConfigError, match="because rank 0 has one"):
        rank_of_two(1, told)


def test_ranks_that_share_none_continue_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LASTGASP_BIND", "127.0.0.1")
    told: list[Any] = []
    with caplog.at_level(logging.WARNING):
        assert rank_of_two(0, told) is None
        assert rank_of_two(1, told) is None
    [line] = caplog.records
    assert "each saves on its own" in line.getMessage() and "LASTGASP_TOKEN_FILE" in line.getMessage()


# -- the file -------------------------------------------------------------------------------------


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    assert token_from_environment({FILE: str(path), TOKEN: "another secret of the shell"}) == SECRET
    link = tmp_path / "mounted"  # Kubernetes mounts secrets as links
    link.symlink_to(path)
    assert Secret.from_environment({FILE: str(link)}) == Secret(SECRET)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_file_that_others_can_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(SECRET)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"Its mode is {mode:04o}. chmod 600 .*defaultMode: 0400"):
        token_from_environment({FILE: str(path)})


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "directory", "device", "missing", "short", "two lines", "huge", "binary"])
def test_a_file_that_is_no_secret(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "token"
    if kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "directory":
        path.mkdir(0o700)
    elif kind != "missing":
        path.touch(0o600)
        content = {
            "short": b"abc",
            "two lines": b"a" * 20 + b"\n" + b"b" * 20,
            "huge": b"a" * 9999,
            "binary": b"\xff" * 32,
        }
        path.write_bytes(content.get(kind, b""))
    where = "/dev/zero" if kind == "device" else str(path)
    with pytest.raises(ConfigError, match="LASTGASP_TOKEN_FILE"):
        token_from_environment({FILE: where})


def test_a_short_token_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="16 to 4096") as caught:
        token_from_environment({TOKEN: "hunter2"})
    assert "hunter2" not in str(caught.value)
