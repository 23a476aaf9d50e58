"""Puts measured numbers into the README: the table between two comments is made from JSON documents."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- speed: written by python -m benchmarks --publish -->", "<!-- /speed -->"
_NAMES = ("detect", "callback", "checkpoint", "restart")


def publish(readme: Path = ROOT / "README.md", results: Path = RESULTS) -> None:
    """Rewrite the table of `readme` from the documents in `results`.

    Raises:
        ValueError: the comments are not in the README, once each and in order.
    """
    documents = [json.loads(path.read_text()) for name in _NAMES if (path := results / f"{name}.json").exists()]
    head, begin, rest = readme.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme} has no {BEGIN} ... {END}")
    readme.write_text(f"{head}{BEGIN}\n{table(documents)}\n{END}{tail}")


def table(documents: Iterable[dict[str, Any]]) -> str:
    """Markdown: every measure, with the machine and the load that it was taken under."""
    lines = ["| measure | median | middle half | n | target | met |", "|---|---|---|---|---|---|"]
    notes = []
    for document in documents:
        lines += [_row(measure) for measure in document["measures"]]
        notes.append(_note(document))
    return "\n".join([*lines, "", *notes])


def _row(m: dict[str, Any]) -> str:
    unit = "" if m["unit"] == "ratio" else f" {m['unit']}"
    target = "" if m["target"] is None else f"{_number(m['target'])}{unit}"
    met = {None: "", True: "yes", False: "**no**"}[m["met"]]
    name = f"{m['name']} ({m['neighbour']})" if m["neighbour"] else m["name"]
    spread = " to ".join(map(_number, _middle_half(m["samples"])))
    return f"| {name} | {_number(m['median'])}{unit} | {spread} | {m['n']} | {target} | {met} |"


def _middle_half(samples: list[float]) -> tuple[float, float]:
    """First and third quartile: the ends of a difference between two noisy numbers say little."""
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
