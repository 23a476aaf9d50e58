"""`lastgasp incident`: which record, what is printed, and the picture's scale."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from lastgasp.checkpoint.addenda import add
from lastgasp.cli import main
from lastgasp.cli._picture import shown_ranks
from lastgasp.cli._timeline import Scale, Span, duration, headline, moments, rung, spans
from lastgasp.events import Fault, Incident, Phases, Unused, encode_incident
from lastgasp.mindspore.layout import LegacyName
from support.checkpoint_kit import FILES, put_file

MS = 1_000_000
EPOCH = 1_700_000_000_000 * MS


def record(name: str = "0001", at_ms: int = 0, world_size: int = 2) -> Incident:
    zero = EPOCH + at_ms * MS
    return Incident(
        id=name,
        job="digits",
        attempt=0,
        world_size=world_size,
        ending="saved",
        faults=[
            Fault(kind="peer", rank=1, cause="Connection closed by peer", step=33, seen_ns=zero + 25 * MS),
            Fault(kind="killed", rank=0, cause="ended by [SIGKILL]", step=33, seen_ns=zero + 2 * MS),
        ],
        phases=Phases(fault=zero, detected=zero + 2 * MS, first_byte=zero + 6 * MS, saved=zero + 38 * MS,
                      first_step=zero + 6800 * MS),
        step_saved=33,
        steps_lost=0,
        nbytes=939681,
        savers=[1],
        unused=[Unused(rank=0, why="dead")],
        led_by="controller",
    )  # fmt: skip


def write(directory: Path, *records: Incident) -> Path:
    (directory / "incidents").mkdir(exist_ok=True)
    for one in records:
        (directory / "incidents" / f"{one.id}.json").write_bytes(encode_incident(one))
    return directory


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["incident", *map(str, arguments)])


def test_the_last_one_is_shown_with_its_picture_beside_it(tmp_path: Path) -> None:
    write(tmp_path, record("zzz", 0), record("aaa", 5000), record("mmm", 2000))
    done = run(tmp_path)
    assert done.exit_code == 0, done.output
    assert "incident aaa" in done.output
    assert "rank 0 was killed: step 33 saved by rank 1, 0 steps lost" in done.output
    assert "ended by [SIGKILL]" in done.output
    assert "6,800.0" in done.output
    assert (tmp_path / "incidents/aaa.png").read_bytes().startswith(b"\x89PNG")


def test_a_size_that_only_a_save_handler_knows_is_unknown(tmp_path: Path) -> None:
    """Of lastgasp-mindio's dumps."""
    output = run(write(tmp_path, msgspec.structs.replace(record(), nbytes=0))).output
    assert re.search(r"bytes\W+unknown", output), output


def in_place() -> Incident:
    found = record()
    phases = Phases(fault=EPOCH, agreed=EPOCH + 6 * MS, released=EPOCH + 7 * MS, restarted=EPOCH + 90 * MS,
                    first_step=EPOCH + 300 * MS)  # fmt: skip
    more = {"ending": "in_place", "rung": "replace", "incarnation": 2, "phases": phases}
    return msgspec.structs.replace(found, **more)


def test_a_recovery_in_place_is_shown_with_its_rung(tmp_path: Path) -> None:
    done = run(write(tmp_path, in_place()))
    assert done.exit_code == 0, done.output
    assert "rank 0 was killed: step 33 held in memory, 0 steps lost, answered in place (replace)" in done.output
    rows = [" ".join(re.sub(r"[^\w,.;:]", " ", line).split()) for line in done.output.splitlines()]
    assert "in place replace; held in memory by rank 1" in rows
    assert "incarnation 2" in rows
    assert any(row.startswith("joined again 90.0 state, first step") for row in rows), rows
    assert (tmp_path / "incidents/0001.png").read_bytes().startswith(b"\x89PNG")


def test_ranks_that_are_taken_in_are_no_fault(tmp_path: Path) -> None:
    phases = msgspec.structs.replace(in_place().phases, fault=None, detected=EPOCH)
    done = run(write(tmp_path, msgspec.structs.replace(in_place(), rung="grow", faults=[], phases=phases)))
    assert done.exit_code == 0, done.output
    told = "ranks that were missing were taken in: step 33 held in memory, 0 steps lost, done in place (grow)"
    assert told in done.output
    assert (tmp_path / "incidents/0001.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_says_the_rung_or_why_there_was_none() -> None:
    assert rung(in_place()) == "in place: replace"
    assert rung(msgspec.structs.replace(record(), not_in_place="recovery=restart")) == "not in place: recovery=restart"
    assert rung(record()) == ""


def test_a_start_that_failed_is_neither_a_kill_nor_a_loss(tmp_path: Path) -> None:
    """Nobody has looked at what is on disk, so nothing is said about it."""
    cause = "RuntimeError: could not load iter_0000007: size mismatch"
    faults = [Fault(kind="exception", rank=1, cause=cause, step=-1, seen_ns=1)]
    changed = {"faults": faults, "ending": "nothing_to_save", "reason": "training had not begun", "step_saved": None}
    write(tmp_path, msgspec.structs.replace(record(), **changed))
    output = run(tmp_path).output.replace("\n", "")
    output = output.replace(str(tmp_path), "")  # pytest numbers its folders
    assert "rank 1 raised an exception while it was starting: nothing to save, training had not begun" in output
    assert "size mismatch" in output and "-1" not in output


def test_json_is_the_record_itself_and_draws_only_when_told(tmp_path: Path) -> None:
    write(tmp_path, record())
    done = run(tmp_path, "--json")
    assert json.loads(done.stdout)["id"] == "0001"
    assert list(tmp_path.rglob("*.png")) == []
    done = run(tmp_path, "--json", "--png", tmp_path / "t.png")
    assert json.loads(done.stdout)["id"] == "0001"
    assert (tmp_path / "t.png").stat().st_size > 10_000


def test_scattered_files_are_named(tmp_path: Path) -> None:
    name = LegacyName("tiny", 2, 3, "safetensors")
    for rank in range(10):
        (tmp_path / name.file(rank)).parent.mkdir()
        (tmp_path / name.file(rank)).touch()
    files = [str(tmp_path / name.name), str(tmp_path / "gone.ckpt")]
    write(tmp_path, msgspec.structs.replace(record(), files=files))
    lines = [line.strip("│ ").removeprefix("files").strip(" │") for line in run(tmp_path).output.splitlines()]
    assert name.file(0) in lines
    assert "and 2 more" in lines


def test_one_record_by_its_path(tmp_path: Path) -> None:
    write(tmp_path, record("a"), record("b", 100))
    assert "incident a" in run(tmp_path / "incidents/a.json").output


def test_a_record_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    write(tmp_path, record())
    (tmp_path / "incidents/9999.json").write_text("{")
    assert run(tmp_path).exit_code == 0


def test_no_record_is_two_and_names_what_could_not_be_read(tmp_path: Path) -> None:
    assert run(tmp_path).exit_code == 2
    write(tmp_path)
    (tmp_path / "incidents/bad.json").write_text("{")
    done = run(tmp_path)
    assert done.exit_code == 2
    assert "bad.json" in done.output


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, record())
    assert run(tmp_path / "incidents").exit_code == 0, "the folder itself is taken, too"

    def refuse(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("lastgasp.cli.incident.os.listdir", refuse)  # root may list everything
    done = run(tmp_path)
    assert done.exit_code == 2 and f"Permission denied: {tmp_path / 'incidents'}." in done.output


def test_a_picture_that_cannot_be_written_is_one(tmp_path: Path) -> None:
    write(tmp_path, record())
    done = run(tmp_path, "--png", tmp_path / "nowhere" / "t.png")
    assert done.exit_code == 1
    assert "Give --png" in done.output


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, record())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run(tmp_path)
    assert done.exit_code == 1
    assert "checkout: pip install -e '.[cli]'" in done.output


@pytest.mark.parametrize(
    "bare",
    [
        Incident(id="x", job="j", attempt=0, world_size=1),
        Incident(id="x", job="j", attempt=0, world_size=1, phases=Phases(fault=EPOCH)),
        record(world_size=4096),
    ],
)
def test_records_with_little_or_many_are_drawn_too(bare: Incident, tmp_path: Path) -> None:
    done = run(write(tmp_path, bare))
    assert done.exit_code == 0, done.output


def test_a_large_job_shows_the_ranks_that_matter() -> None:
    incident = record(world_size=4096)
    incident.savers = [2048]
    assert shown_ranks(incident) == [0, 1, 2, 3, 4, 5, 6, 2048]


def test_a_clock_that_runs_behind_does_not_turn_time_around() -> None:
    phases = Phases(fault=EPOCH, detected=EPOCH - 5 * MS, agreed=EPOCH + 3 * MS)
    assert [(m.phase, m.at_ms) for m in moments(phases)] == [("fault", 0), ("detected", 0), ("agreed", 3)]
    assert [(s.activity, s.ms) for s in spans(phases)] == [("notice", 0), ("agree", 3)]


def test_an_incident_without_a_fault_has_a_headline() -> None:
    assert headline(Incident(id="x", job="j", attempt=0, world_size=1)) == "no fault was recorded: not ended"


@pytest.mark.parametrize(
    ("ms", "text"), [(0.04, "0.0 ms"), (1.84, "1.8 ms"), (31.7, "32 ms"), (6640, "6.64 s"), (245_000, "4 min 05 s")]
)
def test_durations_read_well(ms: float, text: str) -> None:
    assert duration(ms) == text


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=9), st.floats(-1e3, 1e8))
def test_the_scale_keeps_order_and_gives_every_span_room(lengths: list[float], at: float) -> None:
    ends = list(itertools.accumulate(lengths))
    parts = [Span("x", "write", end - length, end) for end, length in zip(ends, lengths, strict=True)]
    scale = Scale(parts)
    assert all(right - left > 0.999 for left, right in itertools.pairwise(scale.edges))
    assert 0 <= scale.place(at) <= scale.end
    assert scale.place(at) <= scale.place(at + 1)


def test_what_was_added_to_the_checkpoint_since_is_reported(tmp_path: Path) -> None:
    """The record's note was true when it was written; the resume is exact all the same."""
    path = put_file(tmp_path, 33)
    lost = "the random state of rank 1 at step 33 died with its process or host"
    write(tmp_path, msgspec.structs.replace(record(), files=[str(path)], notes=[lost]))
    assert "has been added" not in run(tmp_path).output
    assert add(path, FILES, {1: b"state"})
    said = " ".join(run(tmp_path).output.split())
    assert "the random state of rank 1 has been added to the checkpoint since: a resume restores it" in said
