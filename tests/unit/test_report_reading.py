"""What TaskD writes is read: its sample rows, entire directories, cut-off lines, growing files, several processes."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgasp.errors import ConfigError
from lastgasp.steps.report import records as records_module
from lastgasp.steps.report.job import Job, JobReader
from lastgasp.steps.report.records import RankReader, Row
from lastgasp.steps.report.sources import locate
from lastgasp.steps.report.spans import OPEN_MAX, PROCESSES_MAX, Range, RangeFold
from support.step_jobs import COLLECTIVE, EPOCH, Shape, line_of, lines_of, rows_of, simulate, write

GOLDEN = Path(__file__).parents[1] / "golden/taskd-rows.jsonl"
FIRST = "1795247866"


def golden() -> bytes:
    """The rows of the real worker (tests/golden/taskd-rows.jsonl), as a file has them."""
    return b"".join(line for line in GOLDEN.read_bytes().splitlines(keepends=True) if not line.startswith(b"#"))


def fold(rows: list[Row]) -> tuple[list[Range], RangeFold]:
    """Finished ranges, before the end."""
    found: list[Range] = []
    folding = RangeFold(found.append)
    folding.feed(rows)
    return found, folding


def rank_of(tmp_path: Path, content: bytes, name: str = FIRST) -> Path:
    directory = tmp_path / "task/0"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(content)
    return directory


def read(reader: RankReader) -> list[Row]:
    return [row for rows in reader.read() for row in rows]


def job_at(directory: Path) -> Job:
    reader = JobReader(locate(directory))
    reader.read()
    reader.end()
    return reader.job()


# -- TaskD's own rows ------------------------------------------------------------------------------


def test_the_sample_rows_of_the_real_worker(tmp_path: Path) -> None:
    reader = RankReader(rank_of(tmp_path, golden()))
    found, folding = fold(read(reader))
    assert reader.unreadable == 0
    times = {(item.name, item.domain): [] for item in found}  # type: dict[tuple[str, str], list[int]]
    for item in found:
        times[item.name, item.domain].append(item.end - item.begin)
        assert (item.pid, item.tid) == (3393, 3393)
    collective = next(name for name, domain in times if domain == "communication")
    assert json.loads(collective)["opName"] == "HcclAllreduce"
    assert times == {  # of the device where it has rows, in ns: as written down in the facts
        ("step 1", "default"): [49_800_000],
        ("forward", "default"): [11_800_000],
        ("dataloader", "default"): [800_000, 800_000],
        ("save_checkpoint", "default"): [20_000_000, 20_000_000],
        (collective, "communication"): [2_800_000],
    }
    counts = folding.counts
    assert (counts.rows, counts.device_times, counts.host_times) == (20, 3, 0)
    assert (counts.unbegun, counts.unended, counts.no_device) == (0, 0, 0)


def test_kinds_that_taskd_can_write_and_never_enables(tmp_path: Path) -> None:
    others = (
        b'{"Kind":3,"Start":1795247866309602878,"End":1795247866309702878,"Pt":{"ProcessId":3393,"ThreadId":3393},'
        b'"CorrelationId":7,"Name":"aclnnMatmul"}\n'
        b'{"Kind":2,"Start":1795247866309602878,"End":1795247866309702878,"Ds":{"DeviceId":0,"StreamId":2},'
        b'"CorrelationId":7,"Type":"KERNEL_AICORE","Name":"MatMulV2"}\n'
    )
    reader = RankReader(rank_of(tmp_path, others + golden()))
    found, folding = fold(read(reader))
    assert (len(found), folding.counts.other_kinds, reader.unreadable) == (7, 2, 0)


def test_a_directory_as_taskd_writes_it(tmp_path: Path) -> None:
    """No lastgasp.json, only TaskD's four names and collectives, device times that are its own, tool files beside."""
    task = tmp_path / "profiling/3f2a-task"
    for rank in range(2):
        at, lines, number = EPOCH, [], 0
        for step in range(1, 31):
            for name, domain, length in (
                ("dataloader", "default", 1), ("forward", "default", 4), (COLLECTIVE, "communication", 2),
            ):  # fmt: skip
                number += 1
                lines += _four(name, domain, number, at, at + length * 1_000_000)
                at += length * 1_000_000
            number += 1
            lines += _four(f"step {step}", "default", number, at - 7_000_000, at)
        (task / str(rank)).mkdir(parents=True)
        (task / str(rank) / FIRST).write_text("".join(lines))
        (task / str(rank) / "parallel_group.json").write_text(
            json.dumps({"default_group": {"group_name": "dp", "group_rank": rank, "global_ranks": [0, 1]}}, indent=4)
        )
        for foreign in ("database.db", "comm.csv", "steptime.csv", "17952478660", "notes.txt"):
            (task / str(rank) / foreign).write_text("not a row\n")
    job = job_at(tmp_path)
    for data in job.ranks.values():
        assert list(data.table.numbers) == list(range(1, 31))
        assert list(data.table.times("time")) == pytest.approx([0.007] * 30)
        assert list(data.table.times("data")) == pytest.approx([0.001] * 30)
        assert list(data.table.times("forward")) == pytest.approx([0.004] * 30)
        assert list(data.table.times("communication")) == pytest.approx([0.002] * 30)
        assert (data.unreadable, data.counts.unended, data.counts.unbegun) == (0, 0, 0)
        assert data.device_rows == "device"
        assert data.groups["default_group"].global_ranks == (0, 1)
    assert job.kinds == (("HcclAllReduce", "default_group"),)


def _four(name: str, domain: str, number: int, begin: int, end: int) -> list[str]:
    """A range whose device rows come 0.2 ms late and are as long; two rows for those without a stream."""
    stream, late = name not in ("dataloader", "save_checkpoint"), 200_000
    found = Range(name, domain, 3393, 3393, stream, begin, end, begin + late, end + late)
    return [line_of(row) for row in rows_of(found, number, 3)]


# -- lines -----------------------------------------------------------------------------------------


def test_lines_that_are_no_rows_are_counted_and_the_others_kept(tmp_path: Path) -> None:
    good = golden().splitlines(keepends=True)
    bad = [b"\x00\x00\x00\n", b"{\n", b'{"Kind":"one"}\n', b"[1,2]\n", b"\xff\xfe{}\n", good[0][:50] + b"\n"]
    mixed = b"\n".join([b"".join(good[:7]), b"".join(bad), b"".join(good[7:])])
    reader = RankReader(rank_of(tmp_path, mixed))
    found, _ = fold(read(reader))
    assert (len(found), reader.unreadable) == (7, len(bad))


@settings(deadline=None)
@given(cut=st.integers(min_value=1, max_value=4000), piece=st.sampled_from([7, 64, 1000, 1 << 20]))
def test_a_file_that_grows_anywhere_reads_like_a_complete_one(
    tmp_path_factory: pytest.TempPathFactory, cut: int, piece: int
) -> None:
    content = golden()
    directory = rank_of(tmp_path_factory.mktemp("grows"), content[:cut])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records_module, "PIECE", piece)
        reader = RankReader(directory)
        first = read(reader)
        assert len(first) == content[:cut].count(b"\n")
        with (directory / FIRST).open("ab") as file:
            file.write(content[cut:])
        assert first + read(reader) == read(RankReader(directory))
        assert read(reader) == []
        reader.end()
        assert (reader.unreadable, reader.nbytes) == (0, len(content))


def test_a_last_line_that_was_cut_off_counts_once(tmp_path: Path) -> None:
    reader = RankReader(rank_of(tmp_path, golden()[:-20]))
    assert len(read(reader)) == 19
    assert reader.unreadable == 0, "it may still be written"
    reader.end()
    assert reader.unreadable == 1
    reader = RankReader(rank_of(tmp_path, golden()[:-20]))
    read(reader)
    rank_of(tmp_path, golden(), "1795247999")
    assert len(read(reader)) == 20
    reader.end()
    assert reader.unreadable == 1


def test_a_line_without_an_end_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "PIECE", 1000)
    monkeypatch.setattr(records_module, "LONGEST_LINE", 5000)
    reader = RankReader(rank_of(tmp_path, b"x" * 100_000 + b"\n" + golden()))
    longest = 0
    for _ in reader.read(lambda nbytes: None):
        longest = max(longest, len(reader._rest))
    assert reader.unreadable == 1
    assert longest <= 6000
    assert len(fold(read(RankReader(reader.directory)))[0]) == 7


def test_files_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    lines = golden().splitlines(keepends=True)
    for at, name in enumerate(("1795247870", "1795247866", "1795247868")):
        order = (2, 0, 1)[at]
        directory = rank_of(tmp_path, b"".join(lines[order * 7 : order * 7 + 7]), name)
    assert [line_of(row).encode() for row in read(RankReader(directory))] == lines


def test_a_file_that_ages_away_meanwhile_is_left_out(tmp_path: Path) -> None:
    directory = rank_of(tmp_path, golden())
    rank_of(tmp_path, golden(), "1795247999")
    reader = RankReader(directory)
    for _ in reader.read():
        (directory / "1795247999").unlink(missing_ok=True)
    assert reader.nbytes == len(golden())


def test_a_file_is_never_held_in_memory(tmp_path: Path) -> None:
    """Twelve times the bytes, and the peak grows by less than a third of what was added."""
    ranges = simulate(Shape(ranks=1, steps=200), 1)[0]
    text = lines_of(ranges, 0).encode()
    small, large = rank_of(tmp_path / "a", text), rank_of(tmp_path / "b", text * 12)

    def peak(directory: Path) -> int:
        tracemalloc.start()
        try:
            for _ in RankReader(directory).read():
                pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records_module, "PIECE", 1 << 16)
        peak(small)  # imports
        assert peak(large) - peak(small) < 11 * len(text) / 30


def test_progress_goes_from_nothing_to_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "PIECE", 5000)
    write(Shape(ranks=3, steps=20), 1, tmp_path / "task")
    told: list[tuple[int, int]] = []
    reader = JobReader(locate(tmp_path))
    reader.read(lambda done, total: told.append((done, total)))
    whole = sum(path.stat().st_size for path in tmp_path.rglob(FIRST))
    assert {total for _, total in told} == {whole} == {reader.nbytes}
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1][0] == whole
    assert len(told) > 30


# -- ranges ----------------------------------------------------------------------------------------


def rows(name: str, number: int, begin: int, end: int, pid: int = 3393, domain: str = "default") -> list[Row]:
    stream = name not in ("dataloader", "save_checkpoint")
    return list(rows_of(Range(name, domain, pid, pid, stream, begin, end, begin, end), number, 0))


def test_device_rows_may_come_late_and_in_any_order() -> None:
    a, b = rows("step 1", 1, 10, 50), rows("forward", 2, 20, 30)
    found, _ = fold([a[0], b[0], b[2], a[2], b[1], b[3], a[1], a[3]])
    assert [(item.name, item.begin, item.end) for item in found] == [("forward", 20, 30), ("step 1", 10, 50)]


def test_a_stream_range_without_device_rows_counts_by_the_host_at_the_end() -> None:
    a = rows("step 1", 1, 10, 50)
    found, folding = fold([a[0], a[2]])
    assert found == []
    folding.end()
    assert [(item.name, item.begin, item.end) for item in found] == [("step 1", 10, 50)]
    assert folding.counts.no_device == 1


def test_rows_without_a_beginning_and_ranges_without_an_end() -> None:
    a, b = rows("step 1", 1, 10, 50), rows("forward", 2, 20, 30)
    found, folding = fold([*a[1:], b[0], b[1]])
    folding.end()
    assert found == []
    assert (folding.counts.unbegun, folding.counts.unended) == (3, 1)


def test_instants_take_no_time_and_no_memory() -> None:
    instant = rows("dataloader", 1, 10, 20)[0]
    instant.Flag = 1
    found, folding = fold([instant])
    folding.end()
    assert (found, folding.counts.unbegun, folding.counts.unended) == ([], 0, 0)


def test_two_processes_in_one_rank_count_their_ids_apart() -> None:
    """A restart's first rows may precede those that were recovered of the one that was killed."""
    old, new = rows("step 9", 5, 10, 50, pid=7), rows("step 1", 5, 60, 90, pid=8)
    found, folding = fold([*old[:2], *new, *old[2:]])
    assert [(item.name, item.pid) for item in found] == [("step 1", 8), ("step 9", 7)]
    assert folding.counts.unended == 0


def test_the_same_pid_begins_again() -> None:
    a, b = rows("step 9", 1, 10, 50), rows("step 1", 1, 60, 90)
    found, folding = fold([*a[:2], *b])
    assert [item.name for item in found] == ["step 1"]
    assert folding.counts.unended == 1


def test_a_step_stays_open_while_many_wait_for_device_rows() -> None:
    """The step has begun before all of them, and is not the one to be given up."""
    step = rows("step 1", 1, 10, 10_000)
    waiting = [row for n in range(3 * OPEN_MAX) for row in rows("forward", n + 2, 20 + n, 21 + n)[::2]]
    found, folding = fold([step[0], *waiting, *step[1:]])
    folding.end()
    assert [item.name for item in found].count("forward") == 3 * OPEN_MAX
    assert "step 1" in [item.name for item in found]
    assert folding.counts.unended == 0


def test_open_ranges_and_processes_are_bounded() -> None:
    never = [rows("forward", n, n, n + 1)[0] for n in range(1, 4 * OPEN_MAX)]
    pids = [rows("forward", 1, n, n + 1, pid=n)[0] for n in range(1, 20)]
    found, folding = fold([*never, *pids])
    assert max(map(len, folding._tables.values())) <= OPEN_MAX
    assert len(folding._tables) <= PROCESSES_MAX
    folding.end()
    assert found == []
    assert folding.counts.unended == len(never) + len(pids)


# -- where -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "profiling", "profiling/task", "profiling/task/1"])
def test_any_level_can_be_given(below: str, tmp_path: Path) -> None:
    write(Shape(ranks=2, steps=3), 1, tmp_path / "profiling/task")
    (tmp_path / "checkpoint").mkdir()
    place = locate(tmp_path / below)
    assert place.task == "task"
    assert list(place.ranks) == ([1] if below.endswith("/1") else [0, 1])


def test_the_newest_task_by_its_rows_is_taken(tmp_path: Path) -> None:
    """Not by names, nor by times of files: a copied directory has new ones."""
    for name, later in (("a", 5), ("b", 9), ("c", 1)):
        ranges = simulate(Shape(ranks=1, steps=2), 1)[0]
        text = lines_of(ranges, 0).replace('"Timestamp":17952478', f'"Timestamp":1795{later}478')
        (tmp_path / name / "0").mkdir(parents=True)
        (tmp_path / name / "0" / FIRST).write_text(text + '{"Kind":1,"Fl')
    place = locate(tmp_path)
    assert (place.task, place.others) == ("b", ("a", "c"))
    assert locate(tmp_path, "c").others == ("b", "a")
    with pytest.raises(ConfigError, match=r"--task='d' is not allowed: expected one of a, b, c"):
        locate(tmp_path, "d")


def test_no_rows_is_an_error_that_says_what_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "task/0").mkdir(parents=True)
    (tmp_path / "task/0/notes.txt").write_text("x")
    (tmp_path / "task/left").mkdir()
    with pytest.raises(ConfigError, match=r"DIR=.*BASE/TASK/RANK.*Are marks on\?"):
        locate(tmp_path)


def test_reading_changes_nothing(tmp_path: Path) -> None:
    write(Shape(ranks=2, steps=5), 1, tmp_path / "task")
    (tmp_path / "task/0/notes.txt").write_text("mine")
    before = {path: (os.stat(path).st_mtime_ns, path.is_dir() or path.read_bytes()) for path in tmp_path.rglob("*")}
    job_at(tmp_path)
    assert before == {
        path: (os.stat(path).st_mtime_ns, path.is_dir() or path.read_bytes()) for path in tmp_path.rglob("*")
    }
