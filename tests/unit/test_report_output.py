"""What the report shows: numbers, `--json`, the table, the page, the trace; and the same while the job continues."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from rich.console import Console

from lastgasp.errors import ConfigError
from lastgasp.steps.report import svg
from lastgasp.steps.report.job import Information, Job, JobReader
from lastgasp.steps.report.live import Watch, follow
from lastgasp.steps.report.page import render_page
from lastgasp.steps.report.phrasing import conclusion, headline, ms, numbers, percent
from lastgasp.steps.report.sample import samples
from lastgasp.steps.report.sources import locate
from lastgasp.steps.report.spans import Range
from lastgasp.steps.report.summary import PHASES, VERSION, Report, Times, summarise
from lastgasp.steps.report.table import Step, StepTable
from lastgasp.steps.report.tables import render
from lastgasp.steps.report.trace import THREADS, write_trace
from support.step_jobs import COLLECTIVE, EPOCH, Shape, job_of, lines_of, simulate, write

EVIL = """<script>alert("1")</script>&'\""""
SLOW = Shape(steps=120, slow={1: {"data": 0.015}}, communication=True)


def report_on(job: Job, last: int | None = None) -> Report:
    return summarise(job, Path("/runs/a"), samples(job, last), last)


def page_of(job: Job, last: int | None = None) -> str:
    return render_page(report_on(job, last), job, samples(job, last), last)


def evil_job() -> Job:
    """Names that would break a page: of the task, the hosts, a directory."""
    job = job_of(SLOW, 1)
    ranks = {rank: replace(data, information=Information(5, f"{EVIL}{rank}")) for rank, data in job.ranks.items()}
    return replace(job, ranks=ranks, place=replace(job.place, task=EVIL, others=(EVIL,)))


def text_of(report: Report, width: int) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(report))
    return console.export_text()


# -- numbers ---------------------------------------------------------------------------------------


def test_percentiles_and_shares_by_brute_force() -> None:
    shape = Shape(steps=150, save_every=10)
    ranges = simulate(shape, 4)
    report = report_on(job_of(shape, 4))
    for row in report.ranks:
        mine = ranges[row.rank]
        steps = [item for item in mine if item.name.startswith("step ")]
        times = [(item.end - item.begin) / 1e9 for item in steps]
        cuts = statistics.quantiles(times, n=100, method="inclusive")
        assert row.step_s is not None
        assert row.share is not None
        assert (row.step_s.p50, row.step_s.p90, row.step_s.p99) == pytest.approx((cuts[49], cuts[89], cuts[98]))
        assert (row.steps, row.first_step, row.last_step) == (150, 1, 150)
        whole = (steps[-1].end - steps[0].begin) / 1e9
        names = {"data": "dataloader", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}
        for share, name in {**names, "save": "save_checkpoint"}.items():
            spent = sum(item.end - item.begin for item in mine if item.name == name) / 1e9
            assert getattr(row.share, share) == pytest.approx(spent / whole, rel=0.01), name
        assert sum(getattr(row.share, name) for name in (*PHASES, "rest")) == pytest.approx(1, abs=0.01)
        assert row.saves == (15 if row.rank == 0 else 0)


def test_only_the_newest_steps_count_and_are_counted() -> None:
    row = report_on(job_of(Shape(steps=60), 1), last=20).ranks[0]
    assert (row.steps, row.first_step, row.last_step) == (20, 41, 60)


def test_thinned_steps_count_unless_only_the_newest_are_asked_for() -> None:
    table = StepTable(64)
    for number in range(1, 501):
        table.append(Step(number, number * 100, number * 100 + 90, number, 0.09, 0.1))
    job = job_of(Shape(ranks=1, steps=5), 1)
    thin = replace(job, ranks={0: replace(job.ranks[0], table=table)})
    assert table.thinned > 0
    assert report_on(thin).ranks[0].steps == 500
    assert report_on(thin, last=10).ranks[0].steps == 10
    assert any("thinned" in remark for remark in report_on(thin).remarks)


def test_what_is_missing_or_lost_is_reported() -> None:
    job = job_of(Shape(steps=30), 1)
    odd = replace(job.ranks[2], information=Information(world_size=7), dropped=1234, unreadable=3)
    odd.counts.unbegun = 5
    text = " / ".join(report_on(replace(job, ranks={**job.ranks, 2: odd})).remarks)
    for said in ("no files of ranks 4-6; the job has 7 ranks", "1,234 marks were dropped", "3 lines", "5 rows have no"):
        assert said in text
    assert "device times are host times on ranks 0-3" in text


# -- --json ----------------------------------------------------------------------------------------


def keys(value: Any) -> Any:
    """The shape of a document."""
    if isinstance(value, dict):
        return {key: keys(item) for key, item in value.items()}
    return [keys(value[0])] if isinstance(value, list) and value else type(value).__name__


def test_the_document_is_version_1_and_comes_back_as_it_was() -> None:
    report = report_on(job_of(SLOW, 1))
    document = json.loads(msgspec.json.encode(report))
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
    assert document["version"] == VERSION == 1
    number = "float"
    assert keys({**document, "verdict": {**document["verdict"], "notes": [], "unjudged": []}}) == {
        "directory": "str", "task": "str", "other_tasks": "list", "nbytes": "int", "world_size": "int",
        "ranks": [{
            "rank": "int", "host": "str", "steps": "int", "first_step": "int", "last_step": "int",
            "step_s": {"p50": number, "p90": number, "p99": number},
            "share": dict.fromkeys(Times.__struct_fields__, number),
            "saves": "int", "save_s": number, "undone": "int", "earlier": "int", "dropped": "int", "unreadable": "int",
            "unbegun": "int", "unended": "int", "device_rows": "str",
        }],
        "verdict": {
            "slow": [{
                "rank": "int", "cause": "str", "confidence": number, "lost_s": number, "lost_share": number,
                "since_step": "NoneType", "evidence": ["str"],
            }],
            "notes": "list", "unjudged": "list", "judged": "int", "steps": "int", "first": "int", "last": "int",
        },
        "remarks": ["str"], "version": "int",
    }  # fmt: skip


# -- the table -------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [False, True])
def test_the_table_fits_into_80_columns_and_nothing_is_cut(hosts: bool) -> None:
    job = job_of(SLOW, 1)
    name = "worker-with-a-very-long-name-12" if hosts else ""
    ranks = {rank: replace(data, information=Information(4, name)) for rank, data in job.ranks.items()}
    report = report_on(replace(job, ranks=ranks))
    lines = text_of(report, 80).splitlines()
    assert max(map(len, lines)) <= 80
    head = next(line for line in lines if line.startswith("rank"))
    assert head.split() == [
        "rank", *(["host"] if hosts else []), "steps", "p50", "p90", "p99", "data", "fwd", "bwd", "opt", "save", "rest",
        "coll",
    ]  # fmt: skip
    cells = lines[lines.index(head) + 2].split()
    assert cells[0] == "1"
    assert "…" not in cells[-1]
    step_s = report.ranks[1].step_s
    assert step_s is not None
    assert float(cells[3 if hosts else 2]) == pytest.approx(step_s.p50 * 1e3, rel=0.01)
    assert (cells[1] == "…ong-name-12") is hosts


def test_the_table_says_who_why_and_how_sure() -> None:
    text = text_of(report_on(job_of(SLOW, 1)), 200)
    assert "Slow: rank 1 of 4." in text
    assert "rank 1 waits for its data" in text
    assert "(cause data, confidence 0." in text
    assert "the others wait" in text or "waits" in text
    healthy = text_of(report_on(job_of(Shape(steps=60), 1)), 200)
    assert "Nobody is slow: 4 ranks over" in healthy
    assert "note: " in healthy


def test_markup_in_names_is_text() -> None:
    job = job_of(Shape(steps=30), 1)
    ranks = {rank: replace(data, information=Information(4, "[red]h[/x]")) for rank, data in job.ranks.items()}
    text = text_of(report_on(replace(job, ranks=ranks, place=replace(job.place, task="[/bold]task"))), 200)
    assert "[/bold]task" in text
    assert "[red]h[/x]" in text


def test_a_rank_without_steps_has_an_empty_row() -> None:
    job = job_of(Shape(steps=30), 1)
    none = replace(job, ranks={**job.ranks, 2: replace(job.ranks[2], table=StepTable())})
    text = text_of(report_on(none), 80)
    assert re.search(r"^ *2 +0 *$", text, re.M)
    assert "no steps on rank 2" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123, "12.3 ms"), (4.56, "4.56 s"), (0.0008, "0.80 ms"), (0.25, "250 ms"), (123.4, "123 s")],
)
def test_durations(value: float, text: str) -> None:
    assert ms(value) == text


def test_words() -> None:
    assert (percent(0), percent(0.004), percent(0.12)) == ("0 %", "0.4 %", "12 %")
    assert numbers([3]) == "rank 3"
    assert numbers([7, 0, 1, 2, 3, 9]) == "ranks 0-3, 7, 9"


# -- the page --------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags with their attributes, all text, and whether every tag is closed in order."""

    VOID = ("meta", "line", "rect", "br")

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_no_network_and_no_script() -> None:
    html = page_of(job_of(SLOW, 1))
    page = Page(html)
    assert page.open == [], "a tag is left open"
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    for _, attributes in page.tags:
        assert not {"src", "href", "xlink:href", "action"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"https?://|//[a-z]|@import|url\(", html)


def test_the_page_has_plots_with_numbers_and_the_verdict() -> None:
    job = job_of(SLOW, 1)
    html, report = page_of(job), report_on(job)
    page = Page(html)
    assert headline(report.verdict.slow[0]) in page.text
    assert all(evidence in page.text for evidence in report.verdict.slow[0].evidence)
    plots = [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", html, re.S)]
    assert len(plots) == 5, "lines, bars, and stripes for data, computing and lateness"
    for plot in plots:
        width, height = map(float, plot.attrib["viewBox"].split()[2:])
        for shape in plot.iter("rect"):
            x, y, wide, tall = (float(shape.attrib[name]) for name in ("x", "y", "width", "height"))
            assert 0 <= x <= x + wide <= width + 0.5
            assert 0 <= y <= y + tall <= height + 0.5
        for line in plot.iter("polyline"):
            for point in line.attrib["points"].split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= width
                assert 0 <= y <= height
    lines = plots[0]
    assert len(list(lines.iter("polyline"))) == 4
    marked = [line.findtext("title") for line in lines.iter("polyline") if "marked" in line.attrib["class"]]
    assert marked == ["rank 1"]


def test_every_name_is_escaped() -> None:
    html = page_of(evil_job())
    assert "<script" not in html
    page = Page(html)
    assert page.open == []
    assert page.text.count(EVIL) >= 6, "the title, the heading, four hosts, a remark: as text"


def test_a_page_of_a_job_without_steps_and_of_one_rank() -> None:
    job = job_of(Shape(steps=30), 1)
    empty = replace(job, ranks={rank: replace(data, table=StepTable()) for rank, data in job.ranks.items()})
    assert "No steps." in Page(page_of(empty)).text
    one = Page(page_of(job_of(Shape(ranks=1, steps=30), 1)))
    assert one.open == []
    assert "Compared with the other ranks" not in one.text


def test_a_page_of_many_ranks_stays_small() -> None:
    html = page_of(job_of(Shape(ranks=100, steps=40, slow={99: {"data": 0.02}}), 1))
    assert len(html) < 1_000_000
    assert "more ranks are not drawn" in html
    assert "rank 99" in html, "the slow one is among those that are"


def test_ticks_are_round_and_hold_the_plot() -> None:
    for top in (0.0113, 0.5, 3.0, 70.0):
        text = svg.lines([svg.Line("a", [(1, 0.0), (2, top)])], top)
        labels = re.findall(r'class="tick end"[^>]*>([\d.]+)(?: (m?s))?<', text)
        values = [float(number) / (1e3 if unit == "ms" else 1) for number, unit in labels]
        assert values[0] == 0
        assert values[-1] >= top
        assert len({round(b - a, 9) for a, b in itertools.pairwise(values)}) == 1
        assert 4 <= len(values) <= 7


# -- the trace -------------------------------------------------------------------------------------


def trace_of(tmp_path: Path, task: Path, last: int | None = None) -> tuple[dict[str, Any], int, Job]:
    reader = JobReader(locate(task))
    reader.read()
    reader.end()
    job = reader.job()
    count = write_trace(tmp_path / "trace.json", job.place, job.ranks, last)
    return json.loads((tmp_path / "trace.json").read_bytes()), count, job


def test_the_trace_has_every_range_with_its_times(tmp_path: Path) -> None:
    shape = Shape(ranks=2, steps=20, communication=True, save_every=5)
    write(shape, 1, tmp_path / "task")
    document, count, _ = trace_of(tmp_path, tmp_path / "task")
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    ranges = dict(enumerate(simulate(shape, 1)))
    assert count == len(events) == sum(map(len, ranges.values()))
    origin = int(document["otherData"]["origin_unix_ns"])
    for rank, found in ranges.items():
        mine = Counter((event["name"], event["ts"], event["dur"]) for event in events if event["pid"] == rank)
        named = [(item, "HcclAllReduce" if item.name == COLLECTIVE else item.name) for item in found]
        assert mine == Counter(
            (name, round((item.begin - origin) / 1e3, 3), round((item.end - item.begin) / 1e3, 3))
            for item, name in named
        )
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events)
    collective = next(event for event in events if event["cat"] == "communication")
    assert collective["args"]["groupName"] == "default_group"


def test_processes_and_threads_have_names(tmp_path: Path) -> None:
    write(Shape(ranks=3, steps=5, communication=True), 1, tmp_path / "task")
    (tmp_path / "task/1/lastgasp.json").write_text(json.dumps({"host": EVIL}))
    document, _, _ = trace_of(tmp_path, tmp_path / "task")
    meta = [event for event in document["traceEvents"] if event["ph"] == "M"]
    names = {event["pid"]: event["args"]["name"] for event in meta if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: f"rank 1 ({EVIL})", 2: "rank 2"}
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in meta if event["name"] == "thread_name"}
    used = {(event["pid"], event["tid"]) for event in document["traceEvents"] if event["ph"] == "X"}
    assert used == set(threads)
    assert {name.split()[0] for name in threads.values()} == set(THREADS)
    assert {event["ph"] for event in document["traceEvents"]} == {"X", "M"}


def test_ranges_of_one_lane_are_nested_or_apart(tmp_path: Path) -> None:
    """Buckets overlap without one holding the other; a viewer would draw that wrongly."""
    write(Shape(ranks=2, steps=30, communication=True, buckets=4), 1, tmp_path / "task")
    document, _, _ = trace_of(tmp_path, tmp_path / "task")
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            span = event["ts"], event["ts"] + event["dur"]
            lanes.setdefault((event["pid"], event["tid"]), []).append(span)
    for spans in lanes.values():
        open_until: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin + 0.0011:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.0011
            open_until.append(end)


def test_the_trace_of_the_newest_steps(tmp_path: Path) -> None:
    write(Shape(ranks=2, steps=50), 1, tmp_path / "task")
    document, _, _ = trace_of(tmp_path, tmp_path / "task", last=10)
    steps = {event["name"] for event in document["traceEvents"] if event["name"].startswith("step ")}
    assert steps == {f"step {number}" for number in range(41, 51)}


# -- live ------------------------------------------------------------------------------------------


class Scene:
    """A job that continues while it is watched: `acts` are done one after the other, at each wait."""

    def __init__(self, *acts: Any) -> None:
        self.acts = list(acts)
        self.time = 0.0
        self.waits: list[float] = []
        self.seen: list[dict[int, int]] = []

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.time += seconds
        act = self.acts.pop(0)
        if isinstance(act, type):
            raise act
        act()

    def show(self, job: Job) -> None:
        self.seen.append({rank: len(data.table) for rank, data in job.ranks.items()})

    def watch(self, directory: Path, seconds: float | None = None) -> JobReader:
        place = locate(directory)
        reader = JobReader(place)
        follow(reader, place, directory, Watch(lambda: self.time, self.wait, seconds), self.show)
        return reader


def append(task: Path, rank: int, first: int, last: int, name: str = "1795247866") -> None:
    ranges = [
        Range(f"step {n}", "default", 7, 7, True, *(EPOCH + n * 10**7 + at for at in (0, 9_000_000) * 2))
        for n in range(first, last + 1)
    ]
    (task / str(rank)).mkdir(parents=True, exist_ok=True)
    with (task / str(rank) / name).open("a") as file:
        file.write(lines_of(ranges, rank, first_id=first))


def test_new_steps_files_and_ranks_are_seen_until_ctrl_c(tmp_path: Path) -> None:
    task = tmp_path / "task"
    append(task, 0, 1, 5)
    scene = Scene(
        lambda: append(task, 0, 6, 9),
        lambda: append(task, 0, 10, 20, "1795247999"),
        lambda: append(task, 1, 1, 20),
        lambda: append(tmp_path / "newer", 5, 500, 600),
        KeyboardInterrupt,
    )
    scene.watch(tmp_path)
    assert scene.seen == [{0: 4}, {0: 8}, {0: 19}, {0: 19, 1: 19}, {0: 19, 1: 19}]


def test_it_ends_when_the_time_is_over(tmp_path: Path) -> None:
    append(tmp_path / "task", 0, 1, 5)
    scene = Scene(*[lambda: None] * 10)
    scene.watch(tmp_path, seconds=5.0)
    assert scene.waits == [2.0, 2.0, 1.0]
    assert len(scene.seen) == 4


def test_files_that_are_gone_end_it_with_a_message(tmp_path: Path) -> None:
    append(tmp_path / "task", 0, 1, 5)
    scene = Scene((tmp_path / "task/0/1795247866").unlink)
    with pytest.raises(ConfigError, match="DIR"):
        scene.watch(tmp_path)


def test_what_was_watched_is_what_a_reading_at_the_end_finds(tmp_path: Path) -> None:
    task = tmp_path / "task"
    append(task, 0, 1, 3)
    acts = [lambda n=n: append(task, 0, n, n + 2) for n in range(4, 60, 3)]
    reader = Scene(*acts, KeyboardInterrupt).watch(tmp_path)
    reader.end()
    once = JobReader(locate(tmp_path))
    once.read()
    once.end()
    assert list(reader.job().ranks[0].table.numbers) == list(once.job().ranks[0].table.numbers) == list(range(1, 61))


def test_conclusions() -> None:
    verdict = report_on(job_of(SLOW, 1)).verdict
    assert conclusion(verdict, 4) == "Slow: rank 1 of 4."
    assert conclusion(msgspec.structs.replace(verdict, slow=()), 1).startswith("Nothing is wrong to see in")
