"""`lastgasp job`: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lastgasp import _fs, cli
from lastgasp.cli.job import replace
from lastgasp.errors import ConfigError
from lastgasp.jobs.acjob.check import read
from support.acjob import bare, diagnoses, ready


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli.main, ["job", *map(str, words)])


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(bare())
    path.chmod(0o640)
    return path


@pytest.mark.parametrize("command", ["check", "patch", "switch-configmap"])
def test_each_command_has_help_with_examples_and_codes(command: str) -> None:
    done = run(command, "--help")
    assert done.exit_code == 0 and "Examples:" in done.output and "Exit codes:" in done.output


def test_check_of_a_good_file(job: Path) -> None:
    job = job.rename(job.with_name(f"{'a-long-name-' * 10}.yaml"))
    done = run("check", job)
    assert (done.exit_code, done.output) == (0, f"{job}: nothing found\n")


def test_check_names_line_and_fix_and_fails_on_errors_only(job: Path) -> None:
    job.write_text(ready("recover"))
    assert run("check", job).exit_code == 0  # warnings
    job.write_text(ready().replace('"dump"', '"dump, retry"'))
    done = run("check", job)
    assert done.exit_code == 1
    assert "strategy-space" in done.output and 'Write "dump,retry".' in done.output and "│ 12 " in done.output


def test_check_as_json(job: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(ready().replace('"dump"', '"dmp"'))
    done = run("check", job, other, "--json")
    said = json.loads(done.output)
    assert (done.exit_code, said["version"], said["errors"], said["warnings"]) == (1, 1, 1, 0)
    assert [one["file"] for one in said["files"]] == [str(job), str(other)]
    assert said["files"][0]["diagnoses"] == []
    first = said["files"][1]["diagnoses"][0]
    assert (first["rule"], first["severity"], first["line"], first["job"]) == ("strategy-unknown", "error", 12, "llama")


def test_check_of_standard_input() -> None:
    done = CliRunner().invoke(cli.main, ["job", "check", "-"], input=ready().replace('"dump"', '"dmp"'))
    assert done.exit_code == 1 and "strategy-unknown" in done.output and "1 error, 0 warnings" in done.output


def test_check_of_what_is_neither_yaml_nor_a_job(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("a:\n\tb: c\n")
    done = run("check", broken)
    assert done.exit_code == 1 and "Indent with spaces" in done.output
    broken.write_text("kind: Pod\n")
    assert run("check", broken).exit_code == 2
    broken.write_text("")
    done = run("check", broken)
    assert done.exit_code == 2 and "empty" in done.output
    assert run("check", tmp_path / "absent.yaml").exit_code == 2
    assert run("check").exit_code == 2


def test_patch_shows_a_difference_and_writes_only_when_told(job: Path) -> None:
    before = job.read_bytes()
    done = run("patch", job, "--strategy", "dump")
    assert (
        done.exit_code == 0 and '+    recover-strategy: "dump"' in done.output and "nothing was written" in done.output
    )
    assert job.read_bytes() == before
    done = run("patch", job, "--strategy", "dump", "--write")
    assert done.exit_code == 0 and "written" in done.output
    assert diagnoses(job.read_text()) == [] and job.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in job.parent.iterdir()] == ["job.yaml"]
    done = run("patch", job, "--strategy", "dump", "--write")
    assert done.exit_code == 0 and "nothing to change" in done.output


def test_patch_keeps_a_symlink_a_link(job: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.yaml"
    link.symlink_to(job)
    assert run("patch", link, "--strategy", "dump", "--write").exit_code == 0
    assert link.is_symlink() and "recover-strategy" in job.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may write for others")
def test_patch_by_root_leaves_the_file_its_owner(job: Path) -> None:
    os.chown(job, 12345, 23456)
    assert run("patch", job, "--strategy", "dump", "--write").exit_code == 0
    assert (job.stat().st_uid, job.stat().st_gid, job.stat().st_mode & 0o777) == (12345, 23456, 0o640)


@pytest.mark.parametrize(
    ("break_it", "words", "code", "says"),
    [
        (("image: team/train:1", "image:"), ("--strategy", "dump"), 1, "container-image"),
        (("kind: AscendJob", "kind: 'AscendJob"), ("--strategy", "dump"), 1, "yaml-syntax"),
        (("ports:\n", "ports: x\n              portz:\n"), ("--strategy", "dump"), 1, "holds 'x'"),
        (("", ""), ("--strategy", "save"), 2, "save"),
        (("", ""), (), 2, "--strategy"),
        (("framework: pytorch", "framework: tensorflow"), ("--strategy", "dump"), 2, "for tensorflow"),
        (("", ""), ("--strategy", "dump", "--job", "gpt"), 2, "llama"),
    ],
)
def test_nothing_is_written_on_an_error(
    job: Path, break_it: tuple[str, str], words: tuple[str, ...], code: int, says: str
) -> None:
    job.write_text(bare().replace(*break_it, 1))
    before = job.read_bytes()
    done = run("patch", job, *words, "--write")
    assert (done.exit_code, says in done.output) == (code, True), done.output
    assert job.read_bytes() == before


def test_a_file_that_somebody_changed_meanwhile_is_not_overwritten(job: Path) -> None:
    source = read(job)
    job.write_text(bare() + "# new\n")
    with pytest.raises(ConfigError, match="changed"):
        replace(job, source, "x")
    assert job.read_text().endswith("# new\n")


def test_a_disk_that_refuses_leaves_the_file_as_it_was(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: _fs.Disk, fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_fs.Disk, "fsync", full)
    done = run("patch", job, "--strategy", "dump", "--write")
    assert done.exit_code == 2 and "No space left" in done.output
    assert job.read_text() == bare() and os.listdir(job.parent) == ["job.yaml"]


def test_the_configmap_of_the_switch(job: Path) -> None:
    done = run("switch-configmap", "--file", job, "comm=on", "forward=off")
    assert done.exit_code == 0
    assert done.output == (
        "# On: step dataloader save comm. TaskD itself has two switches only, and marks everything with this.\n"
        "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: data-trace-llama\n  namespace: team\n"
        '  labels:\n    reset: "true"\ndata:\n  profilingSwitch: \'{"CommunicationOperator":"on","Step":"on",'
        '"SaveCheckpoint":"on","FP":"off","DataLoader":"on"}\'\n'
    )
    named = run("switch-configmap", "--job", "llama", "--namespace", "team", "comm=on", "forward=off")
    assert named.output == done.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "--job"),
        (("--job", "Llama"), "Llama"),
        (("--job", "x", "--namespace", "a/b"), "a/b"),
        (("--job", "x", "step=maybe"), "maybe"),
        (("--job", "x", "steps=on"), "steps"),
    ],
)
def test_invalid_switch_arguments(words: tuple[str, ...], says: str) -> None:
    done = run("switch-configmap", *words)
    assert done.exit_code == 2 and says in done.output


def test_the_switch_of_a_file_with_two_jobs_wants_a_name(job: Path) -> None:
    job.write_text(bare() + "---\n" + bare().replace("name: llama", "name: gpt"))
    assert run("switch-configmap", "--file", job).exit_code == 2
    assert "data-trace-gpt" in run("switch-configmap", "--file", job, "--job", "gpt").output
    job.write_text("a: [\n")
    assert run("switch-configmap", "--file", job).exit_code == 1


def test_without_ruamel_the_extra_is_named_and_help_works(job: Path) -> None:
    code = "import sys; sys.modules['ruamel'] = None; sys.modules['ruamel.yaml'] = None\n"
    code += f"import lastgasp.cli as c; c.main({['job', 'check', str(job)]!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1 and "checkout: pip install -e '.[cli]'" in done.stderr
    assert "Traceback" not in done.stderr
    code = code.replace(repr(str(job)), "'--help'")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=200, check=False).returncode == 0
