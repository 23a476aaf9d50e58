"""`lastgasp doctor` on this machine: what it looks at, what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from lastgasp import cli
from lastgasp.arena import Arena, in_use, needed
from lastgasp.doctor import look
from lastgasp.doctor.machine import JobFacts
from lastgasp.events import Incident, Phases, encode_incident
from lastgasp.options import NAMES
from lastgasp.variables import KNOWN


def run(*words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(cli.main, ["doctor", *map(str, words)])
    return done.exit_code, done.output


def test_this_machine_has_no_errors(tmp_path: Path) -> None:
    code, output = run(tmp_path)
    assert code == 0 and "checks made: 0 errors" in output and "backend embedded" in output
    assert list(tmp_path.iterdir()) == []


def test_json_and_the_code_of_an_error(tmp_path: Path) -> None:
    code, output = run(tmp_path, "--dp-size", "9", "--replicas", "2", "--json")
    said = json.loads(output)
    assert (code, said["version"], said["errors"]) == (1, 1, 1)
    assert said["diagnoses"][0]["check"] == "dp-replicas" and said["diagnoses"][0]["fix"]
    assert said["frameworks"]["torch"].startswith("2.")


def test_what_a_warm_restart_takes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LASTGASP_WARM")
    said = json.loads(run("--json")[1])["restarts"]
    assert "takes the memory of their imports once per node (LASTGASP_WARM=auto): 235 MB with torch" in said
    assert said.endswith(("no running job has one", " MB now"))
    monkeypatch.setenv("LASTGASP_WARM", "off")
    assert "restarts: ranks start anew (LASTGASP_WARM=off)" in run()[1]
    monkeypatch.setenv("LASTGASP_WARM", "maybe")
    assert "LASTGASP_WARM='maybe'" in run()[1]


def test_what_arenas_take_is_reported() -> None:
    own = Arena()
    own.reserve(3_000_000)
    taken, count = in_use()
    assert taken >= needed(3_000_000) and count >= 1
    said = json.loads(run("--json")[1])["arenas"]
    assert "80% of what is available" in said and "of running jobs take" in said
    own.close()


def test_the_directory_may_come_from_the_environment_and_need_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LASTGASP_DIR", str(tmp_path / "new" / "ckpts"))
    assert run()[0] == 0 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [("WARM", "on"), ("MIN_RANKS", "x"), ("TLS_CERT", "/nosuch"), ("KEEP", "0"), ("RECOVERY", "x"), ("FAULT", "q"),
     ("HANG_TIMEOUT", "z"), ("BUDDY", "q"), ("MARKS", "x"), ("DIR", "s3://bucket/x"), ("ARENA", "on"),
     ("ATTEMPTS", "x"), ("DISABLE", "yes"), ("PURE_PYTHON", "yes"), ("INSECURE", "yes")],
)  # fmt: skip
def test_what_no_job_starts_with_is_an_error(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    """Also of a dry run, which is there to be asked before."""
    monkeypatch.setenv(f"LASTGASP_{variable}", value)
    code, output = run("--json")
    errors = [one["what"] for one in json.loads(output)["diagnoses"] if one["severity"] == "error"]
    assert code == 1 and len(errors) == 1 and repr(value) in errors[0], output
    done = CliRunner().invoke(cli.main, ["run", "--dry-run", "train.py"])
    assert done.exit_code == 2 and repr(value) in done.output


def test_a_secret_is_for_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTGASP_TOKEN_FILE", "/nosuch")
    code, output = run("--json")
    assert code == 0 and "a job on several nodes does not start" in output
    assert CliRunner().invoke(cli.main, ["run", "--dry-run", "train.py"]).exit_code == 0
    monkeypatch.delenv("LASTGASP_TOKEN_FILE")
    done = CliRunner().invoke(cli.main, ["run", "--dry-run", "--nnodes", "2", "train.py"])
    assert done.exit_code == 2 and "this job may span several nodes" in done.output


@pytest.mark.parametrize(
    ("name", "meant"), [("KEEEP", "KEEP"), ("RECOVRY", "RECOVERY"), ("TOKENFILE", "TOKEN_FILE"), ("SHA265", "SHA256")]
)
def test_a_misspelt_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, meant: str) -> None:
    monkeypatch.setenv(f"LASTGASP_{name}", "4")
    assert f"Did you mean LASTGASP_{meant}?" in run("--json")[1]
    done = CliRunner().invoke(cli.main, ["run", "--dry-run", "train.py"])
    assert done.exit_code == 0 and f"Did you mean LASTGASP_{meant}?" in done.output


def test_every_variable_of_the_documents_is_known() -> None:
    page = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    assert set(re.findall(r"`(LASTGASP_[A-Z0-9_]+)`", page)) <= KNOWN


def test_known_are_those_in_the_source() -> None:
    project, found = Path(__file__).parents[2], set[str]()
    for path in (*project.glob("core/**/*.py"), *project.glob("plugins/**/*.py")):
        if path.name != "variables.py":
            found.update(re.findall(r"\bLASTGASP_[A-Z0-9_]*[A-Z0-9]\b", path.read_text()))
    assert found | {f"LASTGASP_{name.upper()}" for name in NAMES} == KNOWN


def test_own_options_behind_torchruns_are_told_where_they_go() -> None:
    done = CliRunner().invoke(cli.main, ["run", "--dry-run", "--nproc-per-node", "2", "--min-ranks=2", "train.py"])
    assert done.exit_code == 2 and "come first, before torchrun's options" in done.output


def test_wrong_usage() -> None:
    assert run("--dp-size", "0")[0] == 2
    assert run("--tls-info", "/absent")[0] == 2


def test_tls_info_comes_from_a_file(tmp_path: Path) -> None:
    info = tmp_path / "tls"
    info.write_text("tlsCert: /absent/cert.pem; tlsPk: /absent/key.pem\n")
    code, output = run("--tls-info", info, "--json")
    assert code == 1 and {one["check"] for one in json.loads(output)["diagnoses"]} >= {
        "tls-items",
        "tls-key",
        "tls-files",
    }


@pytest.mark.parametrize("blocked", ["torch", "lightning"])
def test_no_framework_is_imported(blocked: str) -> None:
    code = "import sys, lastgasp.cli as c\ntry:\n  c.main(['doctor'])\nexcept SystemExit: pass\n"
    code += f"assert not [m for m in sys.modules if m.partition('.')[0] == {blocked!r}], sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def test_what_a_look_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_IP", "10.9.8.7")  # after the start
    machine = look.look(str(tmp_path), JobFacts())
    assert machine.env["POD_IP"] == "10.9.8.7" and machine.exec_env is not None
    assert machine.exec_env.get("POD_IP") != "10.9.8.7" and machine.exec_env["PATH"]
    assert machine.versions["torch"] and machine.places["torch"].is_dir()
    before = os.umask(0o077)
    try:
        assert look.look("", JobFacts()).umask == 0o077
    finally:
        os.umask(before)


def test_a_probe_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x" * 10)
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "a").write_bytes(b"x" * 20_000)
    second = 10**9
    for number, took in enumerate((3, 7)):
        phases = Phases(fault=second, agreed=10 * second, committed=(10 + took) * second)
        record = Incident(id=str(number), job="j", attempt=0, world_size=2, ending="saved", faults=[], phases=phases)
        (tmp_path / "incidents").mkdir(exist_ok=True)
        (tmp_path / "incidents" / f"{number}.json").write_bytes(encode_incident(record))
    (tmp_path / "incidents" / "broken.json").write_text("{")
    found = look.probe(tmp_path)
    assert (found.error, found.fsync_error, found.largest, found.save_s) == ("", "", 20_000, 7.0)
    assert found.kind and found.free > 0 and found.clock_offset_s == 0.0


def test_a_probe_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("lastgasp.doctor.look.os.open", refuse)
    assert look.probe(tmp_path).error == "Permission denied"


def test_a_probe_where_fsync_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("lastgasp.doctor.look.os.fsync", refuse)
    assert look.probe(tmp_path).fsync_error == "Invalid argument" and list(tmp_path.iterdir()) == []


def test_a_port_that_somebody_listens_on_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert look.look("", JobFacts()).is_listening(port)
    assert not look.look("", JobFacts()).is_listening(port)


# -- a directory that is none, or not there, or does not answer -------------------------------------


def test_what_the_directory_would_be_made_in_is_not_taken_for_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "datasets").write_bytes(b"x" * 100_000)
    storage = look.look(str(tmp_path / "ckpts"), JobFacts()).storage
    assert storage is not None and (storage.error, storage.largest) == ("", 0)


def test_a_file_or_a_dangling_link_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("absent")
    for name in ("file", "file/below"):
        storage = look.look(str(tmp_path / name), JobFacts()).storage
        assert storage is not None and "file is not a directory" in storage.error
    code, output = run(tmp_path / "link", "--json")
    assert code == 1 and [one["check"] for one in json.loads(output)["diagnoses"]].count("dir-unwritable") == 1


def test_a_directory_that_nobody_may_look_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ckpts").mkdir()
    lstat = os.stat

    def refuse(path: Path, **more: bool) -> os.stat_result:
        if Path(path).name == "ckpts":
            raise OSError(116, "Stale file handle")
        return lstat(path, **more)

    monkeypatch.setattr("pathlib.Path.stat", refuse)
    storage = look._storage(tmp_path / "ckpts")
    assert storage.error == "Stale file handle"


def test_a_directory_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    found = look.probe(tmp_path)
    assert (found.error, found.largest) == ("", 0)


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_is_reported_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"lastgasp.doctor.look.os.{call}", full)
    found = look.probe(tmp_path)
    assert (found.error, found.fsync_error) == ("No space left on device", "")


def test_a_file_server_that_is_away_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    back = threading.Event()
    monkeypatch.setattr("lastgasp.doctor.look.os.fsync", lambda fd: back.wait(60))
    try:
        assert look._storage(tmp_path, limit=0.05).silent_s == 0.05
    finally:
        back.set()
    for thread in threading.enumerate():
        if thread.name == "lastgasp-doctor-probe":
            thread.join(20)


def test_odd_bytes_in_the_directorys_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, output = run(tmp_path / os.fsdecode(b"file/\xff"), "--json")
    assert code == 1 and "\\udcff" in json.loads(output)["diagnoses"][0]["what"]
