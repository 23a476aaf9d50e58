"""Check AscendJob files: every rule, with the line and the fix."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lastgasp.errors import ConfigError

from . import env, labels, recover, structure, volumes
from .model import Job, jobs_in
from .rules import RULES, Match, Severity
from .tree import Document, Node, YamlProblem, parse

SIZE_LIMIT = 16 << 20
"""Bytes; etcd rejects objects beyond 1.5 MB."""
_RUN_TRAINING = ("batch.volcano.sh", "batch", "apps", "kubeflow.org")
FAMILIES = (structure, labels, env, volumes, recover)
"""Modules whose import fills the table."""


class Diagnosis(msgspec.Struct, frozen=True):
    """One thing that is wrong in a file."""

    rule: str
    severity: Severity
    line: int
    job: str
    """Its name; empty if the file could not be read that far."""
    what: str
    fix: str


@dataclass(frozen=True)
class Source:
    """A file's text and its documents; a `problem` instead if it is not YAML."""

    path: Path
    text: str
    bom: bool
    documents: list[Document]
    problem: Diagnosis | None = None

    @property
    def jobs(self) -> list[Job]:
        """Its AscendJobs."""
        return jobs_in(self.documents)


def read(path: Path) -> Source:
    """Read one file; `-` is standard input.

    Raises:
        ConfigError: it cannot be read, is empty, or larger than 16 MiB.
        MissingExtra: ruamel.yaml is not installed.
    """
    try:
        with sys.stdin.buffer if str(path) == "-" else path.open("rb") as file:
            data = file.read(SIZE_LIMIT + 1)
    except OSError as error:
        raise ConfigError("FILE", str(path), "a readable file", f"{error.strerror}.") from error
    if len(data) > SIZE_LIMIT:
        raise ConfigError("FILE", str(path), f"at most {SIZE_LIMIT} bytes", "It cannot be a job.")
    return source_of(path, data)


def source_of(path: Path, data: bytes) -> Source:
    """What a file of these bytes says.

    Raises:
        ConfigError: it is empty.
        MissingExtra: ruamel.yaml is not installed.
    """
    bom = data.startswith(b"\xef\xbb\xbf")
    try:
        text = data.decode("utf-8-sig")
        documents = parse(text)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = f"byte 0x{data[error.start]:02x} is not UTF-8"
        return Source(path, "", bom, [], _reading("yaml-syntax", line, what, "Save the file as UTF-8."))
    except YamlProblem as problem:
        what = f"column {problem.column}: {problem.reason}"
        return Source(path, text, bom, [], _reading("yaml-syntax", problem.line, what, problem.fix))
    if all(document.root is None for document in documents):
        raise ConfigError("FILE", str(path), "a YAML file with an AscendJob", "This one is empty.")
    return Source(path, text, bom, documents)


def check(sources: Sequence[Source]) -> dict[Path, list[Diagnosis]]:
    """What is wrong in each file, by line. Other documents are consulted for what concerns a job, across
    all files.

    Raises:
        ConfigError: none of the files contains an AscendJob.
    """
    roots = {id(source): _others(source) for source in sources}
    found = {}
    for source in sources:
        elsewhere = [root for other in sources if other is not source for root in roots[id(other)]]
        found[source.path] = check_source(source, elsewhere)
    if not any(source.jobs or source.problem for source in sources):
        names = ", ".join(str(source.path) for source in sources)
        raise ConfigError("FILE", names, "a document of kind AscendJob", "There is none in it.")
    return found


def check_source(source: Source, elsewhere: Sequence[Node] = ()) -> list[Diagnosis]:
    """What is wrong in one file, by line."""
    if source.problem is not None:
        return [source.problem]
    found = [_reading("yaml-not-mapping", document.root.line, f"a document is a {document.root.kind}, not a map",
                      "Remove it, or check for a missing '---' or indentation.")
             for document in source.documents if document.root is not None and document.root.kind != "map"]  # fmt: skip
    found += [_reading("other-kind", root.line, f"a {root.string('kind')} of {group} is not looked at",
                       "lastgasp knows AscendJobs only: this document may still have errors.", "warning")
              for root in _others(source) if (group := _training_group(root))]  # fmt: skip
    for job in jobs_in(source.documents, list(elsewhere)):
        found += check_job(job)
    return sorted(found, key=lambda one: (one.line, one.rule))


def check_job(job: Job) -> list[Diagnosis]:
    """What every rule finds in one job."""
    found = []
    for rule in RULES.values():
        hits = list(rule.look(job)) if rule.look is not None else []
        found += [_diagnosis(rule.id, rule.severity, job, match) for match in hits]
    return list(dict.fromkeys(found))


def errors(diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Those that are not warnings."""
    return [one for one in diagnoses if one.severity == "error"]


def _others(source: Source) -> list[Node]:
    jobs = [job.root for job in source.jobs]
    return [one.root for one in source.documents if one.root is not None and one.root not in jobs]


def _training_group(root: Node) -> str:
    """The API group of a document that runs training but is unknown to the rules; empty for others."""
    group = (root.string("apiVersion") or "").partition("/")[0]
    runs = root.string("kind") in ("Job", "PyTorchJob", "MPIJob", "TFJob", "StatefulSet", "Deployment")
    return group if runs and group in _RUN_TRAINING else ""


def _diagnosis(rule: str, severity: Severity, job: Job, match: Match) -> Diagnosis:
    return Diagnosis(rule, severity, match.node.line, job.name, match.what, match.fix)


def _reading(rule: str, line: int, what: str, fix: str, severity: Severity = "error") -> Diagnosis:
    return Diagnosis(rule, severity, line, "", what, fix)
