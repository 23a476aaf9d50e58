"""Adds what a recovery strategy needs to an AscendJob's text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lastgasp.errors import ConfigError

from .check import Diagnosis, Source, check_source
from .edit import Edits, Quoted
from .env import TASKD_PORT, port_number
from .labels import FAULT_SCHEDULING, JOB_LABELS
from .model import DATATRACE, PROFILING, RESET, STRATEGIES, Job, Replica
from .structure import is_quoted_number, numbers_of, strings_of
from .tree import Node
from .volumes import datatrace_host_path, reset_host_path

GOALS = (*STRATEGIES[:-1], "pod-rescheduling", "grace-exit")
"""What `--strategy` accepts: ClusterD's strategies except exit, which it adds itself; rescheduling of pods; and
saving before leaving a sub-healthy node."""
_PROCESS = STRATEGIES[:-1]
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
"""Lines of a file: str.splitlines splits at more characters, which may occur within a value."""
PROFILING_ON_HOST = "/home/profilingdatapath"
"""Where MindCluster's guide has the files of marks on the host; a mount that is there already stays as it is."""
RETRIES, WAIT_RESCHEDULE, WAIT_MINDX, TTP_PORT = "3", "270", "60", "8000"
_LABELS, _ANNOTATIONS = ("metadata", "labels"), ("metadata", "annotations")
_OF_PROCESSES = ("recover-strategy", "wait-reschedule-timeout")
"""Annotations that a job without process-level recovery must not have."""


@dataclass(frozen=True)
class Patched:
    """The result of a patch.

    Attributes:
        before, after: the entire text.
        findings: what is wrong with `after`; with an error among them it must not be written.
        notes: what the reader should know.
    """

    before: str
    after: str
    diagnoses: list[Diagnosis]
    notes: tuple[str, ...] = ()

    def diff(self, name: str) -> str:
        """As a unified diff; empty where nothing changes."""
        before, after = (_LINE.findall(text) for text in (self.before, self.after))
        lines = difflib.unified_diff(before, after, name, name)
        return "".join(one if one.endswith("\n") else f"{one}\n\\ No newline at end of file\n" for one in lines)


def goals_of(text: str) -> tuple[str, ...]:
    """`dump,recover` as goals, in ClusterD's order.

    Raises:
        ConfigError: an unknown one, or none.
    """
    given = [one.strip() for one in text.split(",") if one.strip()]
    allowed = f"a comma-separated list of {', '.join(GOALS)}"
    for one in given:
        if one not in GOALS:
            remedy = "ClusterD always adds exit itself." if one == "exit" else "Check the spelling."
            raise ConfigError("strategy", one, allowed, remedy)
    if not given:
        raise ConfigError("strategy", text, allowed, "Name at least one.")
    if "grace-exit" in given:
        given.append("dump")
    return tuple(one for one in GOALS if one in given)


def patch(source: Source, goals: Sequence[str], name: str | None = None, marks: bool = False) -> Patched:
    """Add what the goals need to every AscendJob of the file, or to the one named. Changes nothing on disk.

    Args:
        goals: none leaves recoveries as they are.
        marks: mount the files of step marks and of their switch, and offer TaskD's port.

    Raises:
        ConfigError: there is no such job, or its framework does not support a goal.
        CannotEdit: the text is written in a form in which the change cannot be made.
    """
    if source.problem is not None:
        return Patched(source.text, source.text, [source.problem])
    jobs = [job for job in source.jobs if name in (None, job.name)]
    if not jobs:
        names = ", ".join(job.name for job in source.jobs)
        if not names:
            raise ConfigError("FILE", str(source.path), "a document of kind AscendJob", "There is none in it.")
        raise ConfigError("job", name, f"an AscendJob of {source.path} ({names})", "Check the name.")
    edits = Edits(source.text, source.documents)
    for job in jobs:
        _refuse(job, goals)
        if goals:
            _Patch(job, goals, edits).gather()
        if marks:
            _Patch(job, goals, edits).gather_for_marks(also=bool(goals))
    notes = (*_notes(jobs), *_notes_of_goals(jobs, goals))
    text, documents = edits.apply() if edits else (source.text, source.documents)
    after = Source(source.path, text, source.bom, documents)
    return Patched(source.text, text, check_source(after), notes)


def _refuse(job: Job, goals: Sequence[str]) -> None:
    framework = job.framework
    if framework is None:
        raise ConfigError("framework", job.label("framework"), "pytorch, mindspore or tensorflow",
                          "Add the label framework to metadata.labels first.")  # fmt: skip
    wrong = [one for one in goals if one in _PROCESS and framework == "tensorflow"]
    wrong += ["elastic-training"] if framework == "mindspore" and "elastic-training" in goals else []
    if wrong:
        never = ("elastic-training",) if framework == "mindspore" else (*_PROCESS, "grace-exit")
        allowed = ", ".join(one for one in GOALS if one not in never)
        remedy = "The operator sets nothing for that framework there."
        raise ConfigError("strategy", wrong[0], f"for {framework} one of {allowed}", remedy)


def _notes(jobs: Sequence[Job]) -> list[str]:
    return [
        f"{job.name}: metadata.namespace is not in the file; host paths are written for the namespace default"
        for job in jobs
        if job.root.string("metadata", "namespace") is None and job.replicas
    ]


def _notes_of_goals(jobs: Sequence[Job], goals: Sequence[str]) -> list[str]:
    """What a strategy does not do with lastgasp, or in MindCluster's guides."""
    notes = []
    if "elastic-training" in goals and "dump" not in goals:
        notes.append(
            "elastic-training: with lastgasp only loops and Lightning fits over an ElasticLoader, and Megatron in "
            "plain data parallel without MindSpeed, go on with fewer ranks (MindSpeed-LLM can by its own adapter, "
            "with --enable-elastic-training). Name dump as well, so that the step is saved where that fails"
        )
    if "pod-rescheduling" in goals:
        names = [job.name for job in jobs if job.framework == "tensorflow"]
        notes += [f"{name}: MindCluster's guides have job-level rescheduling alone for TensorFlow" for name in names]
    return notes


class _Patch:
    """The changes of one job."""

    def __init__(self, job: Job, goals: Sequence[str], edits: Edits) -> None:
        self.job, self.goals, self.edits = job, goals, edits
        self.strategies = [one for one in _PROCESS if one in goals]
        self.recovers = "recover" in goals or "recover-in-place" in goals
        self.port = _ttp_port(job)
        self.labels = dict[str, str]()

    def gather(self) -> None:
        """All of them."""
        for _, _, pair in strings_of(self.job):
            if pair.node.kind == "scalar" and pair.node.type in ("bool", "number"):
                self.edits.quote(pair)
        for _, pair in numbers_of(self.job):
            if is_quoted_number(pair.node):
                self.edits.unquote(pair)
        self._labels()
        self._annotations()
        for replica in self.job.replicas:
            self._labels_of_pods(replica)
            if self.recovers or self.job.retries:
                self.edits.put(replica.node, ("restartPolicy",), "Never")
            if replica.container is not None:
                self._env(replica, replica.container)
                self._ports(replica, replica.container)
                self._mount(replica, replica.container, RESET, reset_host_path(self.job), "reset-config")

    def gather_for_marks(self, also: bool) -> None:
        """What the marks need alone; `also`: beside what `gather` has added."""
        for replica in self.job.replicas:
            if (container := replica.container) is None:
                continue
            if not also:
                self._pod_ip(replica, container)
                self._port(replica, container, "taskd-port", TASKD_PORT, ("taskd-port",))
            mounted = {mount.path.rstrip("/") for mount in replica.mounts}
            if not mounted & {PROFILING, PROFILING.rpartition("/")[0]}:
                self._mount(replica, container, PROFILING, PROFILING_ON_HOST, "profiling")
            self._mount(replica, container, DATATRACE, datatrace_host_path(self.job), "datatrace")

    def _label(self, name: str, value: str) -> None:
        self.edits.put(self.job.root, (*_LABELS, name), Quoted(value))
        self.labels[name] = value

    def _labels_of_pods(self, replica: Replica) -> None:
        for name in JOB_LABELS:
            value = self.labels.get(name, self.job.label(name))
            if value is not None and replica.label(name) is not None:
                self.edits.put(replica.node, ("template", *_LABELS, name), Quoted(value))

    def _labels(self) -> None:
        found = self.job.label("fault-scheduling")
        host_network = any(replica.host_network for replica in self.job.replicas)
        in_a_hurry = found == "force" and (host_network or {"dump", "retry", "elastic-training"} & set(self.goals))
        if found not in FAULT_SCHEDULING or found == "off" or in_a_hurry:
            self._label("fault-scheduling", "grace")
        if self.recovers and not self.job.retries:
            self._label("fault-retry-times", RETRIES)
        if "pod-rescheduling" in self.goals:
            self._label("pod-rescheduling", "on")
        if "grace-exit" in self.goals:
            self._label("subHealthyStrategy", "graceExit")

    def _annotations(self) -> None:
        if self.strategies and sorted(self.job.raw_strategies) != sorted(self.strategies):
            value = Quoted(",".join(self.strategies))
            self.edits.put(self.job.root, (*_ANNOTATIONS, "recover-strategy"), value)
        metadata, annotations = self.job.root.get("metadata"), self.job.root.get(*_ANNOTATIONS)
        if not self.strategies and metadata is not None and annotations is not None:
            self.edits.remove(annotations, _OF_PROCESSES, (metadata, "annotations"))
            return
        wait = self.job.annotation("wait-reschedule-timeout")
        good = wait is not None and wait.isdecimal() and len(wait) < 5 and 30 <= int(wait) <= 270
        if not good and (wait is not None or self.recovers):
            self.edits.put(self.job.root, (*_ANNOTATIONS, "wait-reschedule-timeout"), Quoted(WAIT_RESCHEDULE))

    def _env(self, replica: Replica, container: Node) -> None:
        self._pod_ip(replica, container)
        if not self.strategies:
            return
        self._variable(replica, container, "TTP_PORT", self.port, True)
        wait = replica.variable("MINDIO_WAIT_MINDX_TIME")
        elastic = "elastic-training" in self.goals and "recover" not in self.goals
        if elastic or (wait is not None and not _wait_is(wait.value, 1)):
            enough = wait is not None and _wait_is(wait.value, 60 if elastic else 1)
            self._variable(replica, container, "MINDIO_WAIT_MINDX_TIME", WAIT_MINDX, not enough)
        for name, bad, good in (("HCCL_ASYNC_ERROR_HANDLING", "1", "0"), ("TASKD_PROCESS_ENABLE", "off", "on")):
            env = replica.variable(name)
            if env is not None and env.value == bad:
                self.edits.put(env.node, ("value",), Quoted(good))

    def _pod_ip(self, replica: Replica, container: Node) -> None:
        if replica.variable("POD_IP") is None:
            source = {"fieldRef": {"fieldPath": "status.podIP"}}
            self.edits.append(container, ("env",), {"name": "POD_IP", "valueFrom": source})

    def _variable(self, replica: Replica, container: Node, name: str, value: str, force: bool) -> None:
        env = replica.variable(name)
        if env is None:
            self.edits.append(container, ("env",), {"name": name, "value": Quoted(value)})
        elif force and env.node.get("valueFrom") is None and env.value != value:
            self.edits.put(env.node, ("value",), Quoted(value))

    def _ports(self, replica: Replica, container: Node) -> None:
        wanted = {"taskd-port": TASKD_PORT}
        if self.strategies:
            wanted["ttp-port"] = int(self.port)
        for name, number in wanted.items():
            self._port(replica, container, name, number, tuple(wanted))

    def _port(self, replica: Replica, container: Node, name: str, number: int, wanted: tuple[str, ...]) -> None:
        port, other = replica.port(name), replica.offers(number)
        if port is not None:
            self.edits.put(port, ("containerPort",), number)
        elif other is None or other.string("name") in wanted:  # the other one gets its own number
            self.edits.append(container, ("ports",), {"containerPort": number, "name": name})
        elif not other.string("name"):
            self.edits.put(other, ("name",), name)

    def _mount(self, replica: Replica, container: Node, place: str, path: str, volume: str) -> None:
        """Mount the host's `path` at `place`, by a volume of that name or one that is there; or correct the path."""
        mount = next((one for one in replica.mounts if one.path.rstrip("/") == place), None)
        if mount is not None:
            wrong = mount.host_path is not None and mount.host_path.rstrip("/") != path
            if mount.volume is None or not wrong or mount.node.string("subPath"):
                return  # of a subPath, the check says what is wrong
            if replica.uses(mount.volume.string("name") or "") > 1:  # the other mounts keep what they have
                self.edits.put(mount.node, ("name",), self._volume(replica, place, path, volume))
            else:
                self.edits.put(mount.volume, ("hostPath", "path"), path)
            return
        name = self._volume(replica, place, path, volume)
        self.edits.append(container, ("volumeMounts",), {"name": name, "mountPath": place})

    def _volume(self, replica: Replica, place: str, path: str, volume: str) -> str:
        """The name of a volume of the host's `path`: one that is there, or a new one."""
        pod = replica.pod
        assert pod is not None
        taken = {one.string("name"): one for one in pod.maps("volumes")}
        name = next((key for key, one in taken.items() if key and one.string("hostPath", "path") == path), None)
        if name is None:
            names = (volume, f"lastgasp-{volume}", *(f"lastgasp-{volume}-{n}" for n in range(len(taken))))
            name = next(one for one in names if one not in taken)
            created = {} if place == RESET else {"type": "DirectoryOrCreate"}  # the device plugin makes that one itself
            self.edits.append(pod, ("volumes",), {"name": name, "hostPath": {"path": path, **created}})
        return name


def _ttp_port(job: Job) -> str:
    """The port that the job has already, or the samples' 8000."""
    variables = [env.value for one in job.replicas if (env := one.variable("TTP_PORT")) is not None]
    ports = [port.string("containerPort") for one in job.replicas if (port := one.port("ttp-port")) is not None]
    return next((text for text in [*variables, *ports] if text and port_number(text)), TTP_PORT)


def _wait_is(text: str | None, least: int) -> bool:
    return text is not None and text.isascii() and text.isdecimal() and len(text) < 6 and least <= int(text) <= 3600
