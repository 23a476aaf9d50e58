"""The pictures of docs/benchmarks.md: what each shows is taken from the results, then drawn as SVG in one style.

Each file carries the numbers that it shows (see `shown`), so that a test can compare it with the results. It has no
date and no random identifiers: the same results and the same matplotlib give the same bytes.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import interval

Medians = Mapping[tuple[str, str], Mapping[str, Any]]
"""(benchmark, measure) -> the measure, as the JSON document has it."""
RANKS, CONNECTIONS, MEGABYTES = (1_000, 10_000, 100_000), (250, 500, 1_000, 2_000), (1, 10, 100, 1_000)
ORDERS = "fault -> orders to prepare, and last answer -> orders to save"
STEP = (
    ("Lightning, small model", "callback", "bare (linear, SGD): LastGasp adds, wall"),
    ("Lightning, typical", "callback", "typical (batch norm, AdamW, schedule, self.log): LastGasp adds, wall"),
    ("Megatron, tiny model", "megatron", "tiny model: lastgasp adds"),
    ("MindSpore: callbacks", "mindspore", "tiny model: callbacks add, wall"),
    ("MindSpore: counters in the graph", "mindspore", "tiny model: counters in the graph add, wall"),
    ("step marks", "marks_step", "bare model: marks add"),
)
"""Label, benchmark and measure of each line of the picture of a step's cost."""
_COLOURS = ("#1d5fa8", "#c2410c", "#14713d")
_INK, _GRID, _TARGET = "#2e4057", "#d9dde2", "#b3261e"
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "lastgasp",
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.grid": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a picture: y over x, with the target at the last x where there is one."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    target: float | None = None


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Curves over a common logarithmic x axis.

    Attributes:
        name: of the file, without its ending.
        title, x, y: of the picture and of its axes, units included.
        log: whether the y axis is logarithmic; else it begins at 0.
    """

    name: str
    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    log: bool = False


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What is added to a step: a dot with its 95 % interval for each label."""

    name: str
    title: str
    x: str
    rows: Sequence[tuple[str, float, float, float]]


def pictures(documents: Sequence[Mapping[str, Any]]) -> list[Picture | Costs]:
    """What the results have all numbers for, in the order of the page."""
    known = {(d["benchmark"], m["name"]): m for d in documents for m in d["measures"]}
    made: list[Picture | Costs] = []
    for draft in (_controller, _connections, _sizes, _step):
        try:
            made += draft(known)
        except KeyError:  # that benchmark has not been published
            continue
    return made


def _controller(known: Medians) -> list[Picture]:
    """The state machine alone."""

    def over(label: str, measure: str, scale: Sequence[float] = (1, 1, 1)) -> Curve:
        found = [known["scale", f"{ranks} ranks: {measure}"] for ranks in RANKS]
        y = [m["median"] * factor for m, factor in zip(found, scale, strict=True)]
        return Curve(label=label, x=RANKS, y=y, target=found[-1]["target"])

    per_rank = over("orders", ORDERS, [1e3 / ranks for ranks in RANKS])
    orders = Curve(label="orders", x=per_rank.x, y=per_rank.y)
    return [
        Picture(name="bench-orders", title="Fault until all orders are out", x="ranks", y="ms of CPU",
                curves=[over("measured", ORDERS)], log=True),
        Picture(name="bench-per-rank", title="The controller's work for one rank", x="ranks", y="us of CPU",
                curves=[orders, over("a heartbeat", "a heartbeat"), over("an answer", "an answer")]),
    ]  # fmt: skip


def _connections(known: Medians) -> list[Picture]:
    """A real controller on loopback."""

    def over(measure: str) -> list[Curve]:
        found = [known["scale", f"{ranks} connections{measure}"] for ranks in CONNECTIONS]
        y = [m["median"] for m in found]
        return [Curve(label="measured", x=CONNECTIONS, y=y, target=found[-1]["target"])]

    return [
        Picture(name="bench-join", title="Until all ranks have joined", x="connections", y="s",
                curves=over(": until all have joined"), log=True),
        Picture(name="bench-idle-cpu", title="Controller of an idle job: CPU", x="connections",
                y="us per second and rank", curves=over(", idle: CPU of one rank")),
        Picture(name="bench-idle-memory", title="Controller of an idle job: memory", x="connections",
                y="kB per rank", curves=over(", idle: memory of one rank")),
    ]  # fmt: skip


def _sizes(known: Medians) -> list[Picture]:
    """Rates of saving and loading."""

    def over(what: str, way: str) -> Curve:
        seconds = [known["sizes", f"{what.format(size)}: {way}"]["median"] / 1e3 for size in MEGABYTES]
        return Curve(label=way, x=MEGABYTES, y=[mb / s for mb, s in zip(MEGABYTES, seconds, strict=True)])

    saves, loads = ("verified save", "torch.save + fsync"), ("verify alone", "verify + load", "torch.load")
    return [
        Picture(name="bench-save", title="Durable save", x="MB", y="MB/s",
                curves=[over("save {} MB", way) for way in saves], log=True),
        Picture(name="bench-load", title="Load, from the page cache", x="MB", y="MB/s",
                curves=[over("load {} MB, warm", way) for way in loads], log=True),
    ]  # fmt: skip


def _step(known: Medians) -> list[Costs]:
    """With the interval of each median."""
    found = [(label, known[benchmark, measure]) for label, benchmark, measure in STEP]
    rows = [(label, m["median"], *interval(m["samples"])) for label, m in found]
    return [Costs(name="bench-step", title="What lastgasp adds to a step", x="us, median and its 95 % interval",
                  rows=rows)]  # fmt: skip


def write(documents: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Draw all of them, and remove those of before that are no longer drawn."""
    made = {folder / f"{picture.name}.svg": picture for picture in pictures(documents)}
    for old in set(folder.glob("bench-*.svg")) - set(made):
        old.unlink()
    for path, picture in made.items():
        draw(picture, path)


def numbers(picture: Picture | Costs) -> Any:
    """What `draw` writes into the file and `shown` reads from it."""
    return json.loads(json.dumps(asdict(picture)))


def shown(path: Path) -> Any:
    """The numbers that a picture was drawn from."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text(), re.DOTALL)
    return json.loads(html.unescape(found[1])) if found else None


def draw(picture: Picture | Costs, path: Path) -> None:
    """Write the SVG."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(3.4, 2.4) if isinstance(picture, Picture) else (6.8, 2.2), layout="constrained")
        FigureCanvasSVG(figure)
        axes: Any = figure.add_subplot()
        axes.set_title(picture.title, fontsize=9, loc="left")
        axes.set_xlabel(picture.x)
        if isinstance(picture, Picture):
            _curves(axes, picture)
        else:
            _rows(axes, picture)
        about = {"Date": None, "Creator": None, "Description": json.dumps(numbers(picture))}
        figure.savefig(path, format="svg", metadata=about)


def _curves(axes: Any, picture: Picture) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log" if picture.log else "linear")
    axes.set_ylabel(picture.y)
    ticks = list(picture.curves[0].x)
    axes.set_xticks(ticks, labels=[_plain(tick) for tick in ticks])
    for colour, curve in zip(_COLOURS, picture.curves, strict=False):
        axes.plot(curve.x, curve.y, marker="o", markersize=3.5, color=colour, label=curve.label, linewidth=1.4)
        if curve.target is not None:
            axes.plot(curve.x[-1:], [curve.target], marker="_", markersize=14, color=_TARGET, linestyle="",
                      label="target")  # fmt: skip
    lowest, highest = axes.dataLim.y0, axes.dataLim.y1
    if picture.log:
        powers = range(math.floor(math.log10(lowest)), math.ceil(math.log10(highest)) + 1)
        decades = [10.0**power for power in powers]
        axes.set_yticks(decades, labels=[_plain(decade) for decade in decades])
        axes.set_ylim(decades[0], decades[-1])
    else:
        axes.set_ylim(0, 1.15 * highest)
    axes.minorticks_off()
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(fontsize=7)


def _plain(number: float) -> str:
    """0.1, 10, 10 000."""
    return f"{number:,g}".replace(",", " ")


def _rows(axes: Any, picture: Costs) -> None:
    places = range(len(picture.rows), 0, -1)
    for place, (_, median, low, high) in zip(places, picture.rows, strict=True):
        axes.plot([low, high], [place, place], color=_COLOURS[0], linewidth=2, alpha=0.5, solid_capstyle="butt")
        axes.plot([median], [place], marker="o", markersize=4, color=_COLOURS[0])
    axes.set_yticks(list(places), labels=[label for label, *_ in picture.rows])
    axes.set_ylim(0.4, len(picture.rows) + 0.6)
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
