"""Puts measured numbers into the documents: tables between two comments, and pictures, are made from JSON documents.

The README gets a few lines, docs/benchmarks.md everything.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import figures

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- speed: written by python -m benchmarks --publish -->", "<!-- /speed -->"
NAMES = (
    "detect", "callback", "checkpoint", "restart", "warm", "in_place", "in_place_lightning", "in_place_megatron",
    "marks", "flush", "marks_step", "slow", "report", "megatron", "mindspore", "mindio_drop_in", "scale", "sizes",
    "arenas", "elastic",
)  # fmt: skip
"""In the order of the tables."""
HEADLINES = (
    ("detect", "SIGKILL of a rank -> first save call in a survivor", "from the kill of a rank until a survivor saves"),
    ("in_place", "SIGKILL of rank 0 -> next completed step: in place",
     "from that kill until the next step is done, in place"),
    ("restart", "lastgasp run: steps to do again", "steps that are done again after the restart"),
    ("checkpoint", "save 1 GB: verified / torch.save", "save 1 GB with digests, as a multiple of `torch.save` + fsync"),
    ("megatron", "wall: lastgasp adds to it", "what lastgasp adds to a Megatron iteration"),
    ("marks", "mark on: with mark:", "one step mark (`with mark:`)"),
)
"""Benchmark and measure of each line of the README, and what it says there."""
README, ALL, PICTURES = ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "assets"


def publish() -> None:
    """Rewrite both tables and all pictures.

    Raises:
        ValueError: the comments are not in one of the two, once each and in order.
    """
    for path, text in tables().items():
        head, begin, rest = path.read_text().partition(BEGIN)
        _, end, tail = rest.partition(END)
        if not begin or not end:
            raise ValueError(f"{path} has no {BEGIN} ... {END}")
        path.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")
    figures.write(documents(), PICTURES)


def tables() -> dict[Path, str]:
    """Document -> its table."""
    return {README: headlines(documents()), ALL: table(documents())}


def documents() -> list[dict[str, Any]]:
    """The results that are there."""
    return [json.loads(path.read_text()) for name in NAMES if (path := RESULTS / f"{name}.json").exists()]


def headlines(results: Iterable[dict[str, Any]]) -> str:
    """Markdown: the measures of `HEADLINES`, without spread and machine."""
    found = {(d["benchmark"], m["name"]): m for d in results for m in d["measures"]}
    lines = ["| what | median | samples | target | benchmark |", "|---|---|---|---|---|"]
    for benchmark, measure, text in HEADLINES:
        if m := found.get((benchmark, measure)):
            quantities = f"{_quantity(m, 'median', ' x')} | {m['n']} | {_quantity(m, 'target', ' x')}"
            lines.append(f"| {_with_neighbour(text, m)} | {quantities} | `{benchmark}` |")
    return "\n".join(lines)


def table(results: Iterable[dict[str, Any]]) -> str:
    """Markdown: every measure, with the machine and the load that it was taken under."""
    lines = ["| benchmark | measure | median | middle half | n | target | met |", "|---|---|---|---|---|---|---|"]
    notes = []
    for document in results:
        lines += [f"| {document['benchmark']} {_row(measure)}" for measure in document["measures"]]
        notes.append(_note(document))
    return "\n".join([*lines, "", *notes])


def _row(m: dict[str, Any]) -> str:
    met = {None: "", True: "yes", False: "**no**"}[m["met"]]
    spread = " to ".join(map(_number, _middle_half(m["samples"])))
    return f"| {_name(m)} | {_quantity(m, 'median')} | {spread} | {m['n']} | {_quantity(m, 'target')} | {met} |"


def _name(m: dict[str, Any]) -> str:
    return _with_neighbour(m["name"], m)


def _with_neighbour(text: str, m: dict[str, Any]) -> str:
    return f"{text} ({m['neighbour']})" if m["neighbour"] else text


def _quantity(m: dict[str, Any], which: str, ratio: str = "") -> str:
    unit = ratio if m["unit"] == "ratio" else f" {m['unit']}"
    return "" if m[which] is None else f"{_number(m[which])}{unit}"


def _middle_half(samples: list[float]) -> tuple[float, float]:
    """First and third quartile: the ends of a difference between two noisy numbers say little."""
    if len(samples) < 2:
        return samples[0], samples[0]
    quarters = statistics.quantiles(samples, n=4, method="inclusive")
    return quarters[0], quarters[2]


def _note(document: dict[str, Any]) -> str:
    where, versions = document["machine"], document["machine"]["versions"]
    load = f"{where['load'][0]:g} before, {document['load_after'][0]:g} after"
    return (
        f"- `{document['benchmark']}`: {where['date'][:16]} UTC, {where['cpus']} x {where['cpu']}, load {load}, "
        f"Python {where['python']}, torch {versions['torch']}, lightning {versions['lightning']}."
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
