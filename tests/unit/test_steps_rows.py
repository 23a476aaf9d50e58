"""Rows: TaskD's bytes, Go's escapes, lengths, and acceptance by the rules of TaskD's reader."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgasp.steps import bits
from lastgasp.steps import format as layout
from lastgasp.steps.ring import Name
from lastgasp.steps.rows import ROW_MAX, Origin, Renderer, dropped, escape, render
from support import taskd_reader

GOLDEN = Path(__file__).parents[1] / "golden/taskd-rows.jsonl"
ORIGIN = Origin(pid=3393, device=3, wall_offset=1_700_000_000_000_000_000)
STEP = Name("step {}", "default", bits.STEP, True)
LOADER = Name("dataloader", "default", bits.DATALOADER, False)


def record(begin: int, end: int, number: int = 1, **more: int) -> bytes:
    """One finished range; `more`: value, device_begin, device_end, name, thread."""
    fields = {"value": 0, "device_begin": 0, "device_end": 0, "name": 0, "thread": 3393} | more
    return layout.RECORD.pack(begin, end, number, *fields.values())


def samples() -> list[list[str]]:
    """The golden rows, one list per range."""
    lines = [line for line in GOLDEN.read_text().splitlines(keepends=True) if line[0] != "#"]
    return [list(group) for _, group in groupby(lines, lambda line: json.loads(line)["Id"])]


def as_record(rows: list[dict[str, Any]], offset: int) -> bytes:
    """The record that a range of the golden rows would have been."""
    times = [row["Timestamp"] - offset for row in rows]
    device = {"device_begin": times[1], "device_end": times[3]} if len(rows) == 4 else {}
    end = times[2] if len(rows) == 4 else times[1]
    thread = rows[0]["MsptiObjectId"]["Pt"]["ThreadId"]
    value = int(rows[0]["Name"].removeprefix("step ")) if rows[0]["Name"].startswith("step ") else 0
    return record(times[0], end, rows[0]["Id"], thread=thread, value=value, **device)


@pytest.mark.parametrize("lines", samples(), ids=lambda lines: json.loads(lines[0])["Name"][:20])
def test_the_rows_of_the_real_worker_are_reproduced_byte_for_byte(lines: list[str]) -> None:
    rows = [json.loads(line) for line in lines]
    text = "step {}" if rows[0]["Name"].startswith("step ") else rows[0]["Name"]
    name = Name(text, rows[0]["Domain"], bits.STEP, stream=len(rows) == 4)
    origin = ORIGIN._replace(stream=2)
    assert render(as_record(rows, origin.wall_offset), [name], origin) == "".join(lines).encode()


def test_there_is_a_sample_of_each_kind() -> None:
    names = {json.loads(lines[0])["Name"] for lines in samples()}
    assert {"step 1", "forward", "dataloader", "save_checkpoint"} < names
    assert any(name.startswith("{") for name in names)


def test_device_rows_have_the_host_s_times_unless_both_were_measured() -> None:
    half = record(10, 20, device_begin=11)
    both = record(10, 20, device_begin=11, device_end=25)
    offset = ORIGIN.wall_offset

    def times(raw: bytes) -> list[int]:
        return [json.loads(line)["Timestamp"] - offset for line in render(raw, [STEP], ORIGIN).splitlines()]

    assert times(record(10, 20)) == times(half) == [10, 10, 20, 20]
    assert times(both) == [10, 11, 20, 25]


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ('<a&b> "q" \\', '\\u003ca\\u0026b\\u003e \\"q\\" \\\\'),
        ("\n\r\t", "\\n\\r\\t"),
        ("\b\f\0\x1f\x7f", "\\u0008\\u000c\\u0000\\u001f\x7f"),
        ("\u2028\u2029", "\\u2028\\u2029"),
        ("步 é 😀 \ufffd", "步 é 😀 \ufffd"),
        (b"a\xff\xe2\x82z".decode(errors="surrogateescape"), "a\\ufffd\\ufffd\\ufffdz"),
        ("100 % %s %d", "100 % %s %d"),
    ],
)
def test_names_are_escaped_as_go_does(text: str, written: str) -> None:
    rows = render(record(1, 2), [Name(text, text, bits.STEP, True)], ORIGIN).decode()
    assert f'"Name":"{written}","Domain":"{written}"}}\n' in rows


@given(st.text(), st.text(max_size=40), st.booleans(), st.integers(-(1 << 63), (1 << 63) - 1))
def test_any_name_makes_complete_rows_within_taskd_s_limit(text: str, domain: str, stream: bool, value: int) -> None:
    raw = record(1 << 62, 1 << 62, (1 << 64) - 1, value=value, thread=(1 << 32) - 1)
    rows = render(raw, [Name(text, domain, bits.STEP, stream)], Origin(1 << 31, (1 << 31) - 1, 1 << 62))
    assert rows.endswith(b"\n")
    lines = rows.splitlines(keepends=True)
    assert len(lines) == (4 if stream else 2)
    assert all(len(line) <= ROW_MAX for line in lines)
    first = json.loads(lines[0])
    expected = text.replace("{}", str(value), 1)
    if len(expected) < 80:
        assert first["Name"] == "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in expected)
    assert all(json.loads(line)["Name"] == json.loads(line)["Domain"] == "" for line in lines[1:])


@pytest.mark.parametrize("text", ["x" * 2000, "é" * 2000, "\x01" * 2000, "{}" + "&" * 900, "&" * 900 + "{}"])
def test_a_name_that_is_too_long_is_cut_at_a_character(text: str) -> None:
    (start, *_) = render(record(1, 2, value=-7), [Name(text, "d" * 500, 1, True)], ORIGIN).splitlines(keepends=True)
    row = json.loads(start)
    assert ROW_MAX - 120 < len(start) <= ROW_MAX
    assert text.replace("{}", "").startswith(row["Name"].replace("-7", ""))
    assert row["Domain"] == "d" * 120


def test_escape_keeps_what_fits() -> None:
    assert escape("a<b", 7) == "a\\u003c"
    assert escape("a<b", 6) == "a"
    assert escape("é", 1) == ""


def test_new_names_are_fetched_once_and_an_unknown_one_is_no_end() -> None:
    asked: list[int] = []
    names = [STEP]

    def fetch(first: int) -> list[Name]:
        asked.append(first)
        return names[first:]

    renderer = Renderer(ORIGIN, fetch)
    renderer.render(record(1, 2) + record(3, 4, 2))
    names.append(LOADER)
    rows = renderer.render(record(1, 2, name=1) + record(1, 2, name=9))
    assert asked == [0, 1, 2]
    assert rows.count(b"\n") == 2 + 4
    assert b'"Name":"unknown name 9","Domain":"lastgasp"' in rows


def test_the_rows_of_two_threads_differ() -> None:
    rows = render(record(1, 2, thread=5) + record(1, 2, 2, thread=6), [LOADER], ORIGIN).decode()
    assert [json.loads(row)["MsptiObjectId"]["Pt"]["ThreadId"] for row in rows.splitlines()] == [5, 5, 6, 6]


def test_dropped_ranges_are_four_rows_that_taskd_s_reader_ignores() -> None:
    rows = [json.loads(row) for row in dropped(12, 7, 1_795_247_866_000_000_000, ORIGIN).splitlines()]
    assert [(row["Flag"], row["SourceKind"]) for row in rows] == [(16, 0), (16, 1), (32, 0), (32, 1)]
    assert {row["Timestamp"] for row in rows} == {1_795_247_866_000_000_000}
    assert {row["Id"] for row in rows} == {7}
    assert (rows[0]["Name"], rows[0]["Domain"]) == ("dropped 12", "lastgasp")
    taken = taskd_reader.take(iter(rows))
    assert (taken.names, taken.steps, taken.open) == (["dropped 12"], {}, {})


def test_taskd_s_reader_takes_every_kind() -> None:
    comm = {"streamId": "0", "count": "25", "dataType": "fp32", "groupName": "g", "opName": "HcclAllReduce"}
    names = [
        STEP, LOADER, Name("forward", "default", bits.FORWARD, True),
        Name("save_checkpoint", "default", bits.SAVE, False), Name(json.dumps(comm), "communication", bits.COMM, True),
    ]  # fmt: skip
    raw = b"".join(record(100, 100 + 10 * (i + 1), i + 1, name=i, value=7) for i in range(len(names)))
    taken = taskd_reader.take(map(json.loads, render(raw, names, ORIGIN).splitlines()))
    assert taken.steps == {7: 10}
    assert taken.host_only == {"dataloader": [20], "save_checkpoint": [40]}
    assert taken.forward == [(30, 30)]
    assert taken.communication == [(comm, 50)]
    assert taken.open == {}
