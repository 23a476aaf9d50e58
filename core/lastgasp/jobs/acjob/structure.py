"""Rules on what the operator or Kubernetes itself rejects (docs/facts/job_yaml.md §1)."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from .model import API_VERSION, CONTAINER, LEADERS, WORKER, Job, Replica
from .rules import Match, rule
from .tree import Node, Pair

MOST_REPLICAS = 20_000
VOLCANO = "volcano"
_LABELS = ("fault-scheduling", "pod-rescheduling", "fault-retry-times", "process-recover-enable", "subHealthyStrategy",
           "framework", "ring-controller.atlas", "tor-affinity", "podgroup-sched-enable")  # fmt: skip
_ANNOTATIONS = ("recover-strategy", "wait-reschedule-timeout", "huawei.com/recover_policy_path",
                "huawei.com/schedule_policy", "sp-block", "ra-block", "huawei.com/schedule_minAvailable")  # fmt: skip
_ROOT = ("apiVersion", "kind", "metadata", "spec", "status")
_METADATA = ("name", "namespace", "labels", "annotations", "generateName", "finalizers", "ownerReferences", "uid",
             "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink")  # fmt: skip
_SPEC = ("runPolicy", "successPolicy", "schedulerName", "replicaSpecs")
_RUN_POLICY = ("schedulingPolicy", "backoffLimit", "cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds")


@rule("yaml-duplicate-key", "error", "YAML", "A key is given twice in one map")
def duplicate_key(job: Job) -> Iterator[Match]:
    """Kubernetes refuses it."""
    for node in nodes_of(job.root):
        seen: dict[str, Node] = {}
        for pair in node.pairs:
            if pair.key.text in seen and pair.key.kind == "scalar" and not pair.is_merge:
                first = seen[pair.key.text].line
                yield Match(pair.key, f"{pair.key.text} is given twice, first in line {first}", "Remove one of them.")
            seen.setdefault(pair.key.text, pair.key)


@rule("value-string", "error", "§2, §9", "A label, annotation or variable is not a string")
def value_string(job: Job) -> Iterator[Match]:
    """YAML 1.1 reads a plain on as true; Kubernetes expects strings here."""
    for kind, name, pair in strings_of(job):
        node = pair.node
        what = f"{kind} {name} is a {node.type if node.kind == 'scalar' else node.kind} to Kubernetes, not a string"
        if node.kind != "scalar":
            yield Match(pair.key, what, "Write one value, in quotes.")
        elif node.type in ("bool", "number"):
            yield Match(pair.key if pair.alias else node, what, f'Quote it: "{node.text}".')


def strings_of(job: Job) -> Iterator[tuple[str, str, Pair]]:
    """Every entry that must hold a string, once: what it is, its name, the entry."""
    places = [("label", job.root.get("metadata", "labels")), ("annotation", job.root.get("metadata", "annotations"))]
    for replica in job.replicas:
        places += [("label", replica.node.get("template", "metadata", "labels"))]
        places += [("annotation", replica.node.get("template", "metadata", "annotations"))]
    found = [(kind, pair.key.text, pair) for kind, node in places if node is not None for pair in node.pairs]
    variables = [env for replica in job.replicas for one in replica.all_containers for env in one.maps("env")]
    found += [("variable", env.string("name") or "?", pair) for env in variables if (pair := env.pair("value"))]
    yield from {id(one[2]): one for one in found if not one[2].is_merge}.values()


@rule("value-number", "error", "CRD", "A number is in quotes")
def value_number(job: Job) -> Iterator[Match]:
    """The API server accepts no string here."""
    for name, pair in numbers_of(job):
        if is_quoted_number(pair.node):
            what = f"{name} is a string to Kubernetes, not a number"
            yield Match(pair.key, what, f"Write it without quotes: {pair.node.text}.")


def numbers_of(job: Job) -> Iterator[tuple[str, Pair]]:
    """Every entry that must hold a number, once: its name, the entry."""
    policy = job.root.get("spec", "runPolicy")
    places = [(policy, "backoffLimit"), (policy.get("schedulingPolicy") if policy else None, "minAvailable")]
    for replica in job.replicas:
        places += [(replica.node, "replicas"), (replica.pod, "terminationGracePeriodSeconds")]
        ports = [port for one in replica.all_containers for port in one.maps("ports")]
        places += [(port, name) for port in ports for name in ("containerPort", "hostPort")]
    found = [(name, pair) for node, name in places if node is not None and (pair := node.pair(name)) is not None]
    yield from {id(one[1]): one for one in found}.values()


def is_quoted_number(node: Node) -> bool:
    """Whether it consists of digits that Kubernetes reads as a string."""
    return node.kind == "scalar" and node.type == "string" and node.text.isascii() and node.text.isdecimal()


@rule("value-bool", "error", "CRD", "A yes or no is in quotes")
def value_bool(job: Job) -> Iterator[Match]:
    """The API server accepts no string here."""
    for pair in {id(pair): pair for replica in job.replicas for pair in _switches(replica)}.values():
        if pair.node.kind == "scalar" and pair.node.type == "string":
            what = f"{pair.key.text} is a string to Kubernetes, not true or false"
            yield Match(pair.key, what, f"Write it without quotes: {pair.node.text}.")


def _switches(replica: Replica) -> Iterator[Pair]:
    places = [(replica.pod, name) for name in ("hostNetwork", "hostPID", "hostIPC")]
    places += [(one.get("securityContext"), "privileged") for one in replica.all_containers]
    places += [(mount, "readOnly") for one in replica.all_containers for mount in one.maps("volumeMounts")]
    yield from (pair for node, name in places if node is not None and (pair := node.pair(name)) is not None)


@rule("scheduler-name", "error", "head", "The job is not scheduled by Volcano")
def scheduler_name(job: Job) -> Iterator[Match]:
    """Rescheduling is Volcano's work."""
    pods = [replica.pod.string("schedulerName") if replica.pod is not None else None for replica in job.replicas]
    found = job.root.string("spec", "schedulerName")
    if found != VOLCANO and not (pods and all(one == VOLCANO for one in pods)):
        what = "schedulerName is missing" if found is None else f"schedulerName is {found!r}"
        yield Match(job.at("spec", "schedulerName"), f"{what}: NPUs are scheduled, and faults handled, by Volcano only",
                  f"Write schedulerName: {VOLCANO} below spec.")  # fmt: skip


@rule("no-npu", "error", "head", "A job without an NPU")
def no_npu(job: Job) -> Iterator[Match]:
    """A leader may have none, if the other replicas do the work."""
    for replica in job.replicas:
        for text, node in _npu_requests(replica):
            if text == "0":
                yield Match(node, f"{replica.type}: asks for 0 NPUs", "Write how many, or remove the entry.")
    if job.replicas and not any(True for replica in job.replicas for _ in _npu_requests(replica)):
        yield Match(job.at("spec", "replicaSpecs"), "no replica asks for an NPU",
                  "Write huawei.com/Ascend910 in resources, in limits and in requests.")  # fmt: skip


def _npu_requests(replica: Replica) -> Iterator[tuple[str, Node]]:
    for kind in ("requests", "limits"):
        node = replica.container.get("resources", kind) if replica.container is not None else None
        yield from ((p.node.text, p.key) for p in (node.pairs if node else ()) if p.key.text.startswith("huawei.com/"))


@rule("key-spelling", "warning", "§2, §3", "A key looks like a misspelt one")
def key_spelling(job: Job) -> Iterator[Match]:
    """Unknown keys are allowed, but a misspelt one has no effect."""
    places = (((), _ROOT), (("metadata",), _METADATA), (("metadata", "labels"), _LABELS),
              (("metadata", "annotations"), _ANNOTATIONS), (("spec",), _SPEC), (("spec", "runPolicy"), _RUN_POLICY),
              *((("spec", "replicaSpecs", each.type, "template", "metadata"), _METADATA)
                for each in job.replicas))  # fmt: skip
    for path, known in places:
        node = job.root.get(*path)
        for pair in node.pairs if node is not None else ():
            near = get_close_matches(pair.key.text, known, n=1, cutoff=0.85)
            if pair.key.text not in known and near:
                where = ".".join(path) or "the job"
                yield Match(pair.key, f"{where}: {pair.key.text} is unknown", f"Did you mean {near[0]}?")


@rule("api-version", "error", "head", "apiVersion is not the AscendJob's")
def api_version(job: Job) -> Iterator[Match]:
    """Only one exists."""
    found = job.root.string("apiVersion")
    if found != API_VERSION:
        yield Match(job.at("apiVersion"), f"apiVersion is {found!r}", f"Write apiVersion: {API_VERSION}.")


@rule("job-name", "error", "head", "The job has no name")
def job_name(job: Job) -> Iterator[Match]:
    """Mount paths and ConfigMaps are named after it."""
    if not job.root.string("metadata", "name"):
        yield Match(job.at("metadata", "name"), "metadata.name is missing", "Give the job a name.")


@rule("framework", "error", "§1", "The label framework is missing or unknown")
def framework(job: Job) -> Iterator[Match]:
    """It determines the leader type and the environment."""
    if job.framework is None:
        found = job.label("framework")
        what = "metadata.labels.framework is missing" if found is None else f"framework is {found!r}"
        yield Match(job.at("metadata", "labels", "framework"), what, f"Expected one of {', '.join(LEADERS)}.")


@rule("replica-specs", "error", "§1", "There are no replicaSpecs, or one is empty")
def replica_specs(job: Job) -> Iterator[Match]:
    """Such a job has nothing to run."""
    for pair in job.replica_pairs:
        if pair.node.kind != "map":
            yield Match(pair.key, f"{pair.key.text} describes no replicas", "Describe them, or remove the key.")
    if not job.replica_pairs:
        yield Match(job.at("spec", "replicaSpecs"), "spec.replicaSpecs is missing or empty", "Describe the replicas.")


@rule("replica-type", "error", "§1", "A replica type that the framework does not have")
def replica_type(job: Job) -> Iterator[Match]:
    """One leader type and Worker."""
    allowed = [LEADERS[job.framework], WORKER] if job.framework else [*LEADERS.values(), WORKER]
    for replica in job.replicas:
        if replica.type not in allowed:
            what = f"replica type {replica.type} does not exist for {job.framework or 'any framework'}"
            yield Match(replica.pair.key, what, f"Expected {' or '.join(allowed)}.")


@rule("replicas", "error", "§1", "replicas is not a number from 0 to 20000")
def replicas(job: Job) -> Iterator[Match]:
    """The operator's limit."""
    for replica in job.replicas:
        if replica.count is None or replica.count > MOST_REPLICAS:
            node = replica.node.get("replicas") or replica.pair.key
            what = f"{replica.type}: replicas is {node.text or node.kind!r}"
            yield Match(node, what, f"Expected 0 to {MOST_REPLICAS}.")


@rule("leader-replicas", "error", "§1", "The leader has not exactly one replica")
def leader_replicas(job: Job) -> Iterator[Match]:
    """1, or not given."""
    for replica in job.replicas:
        if replica.type in LEADERS.values() and replica.count not in (1, None):
            node = replica.node.get("replicas") or replica.pair.key
            yield Match(node, f"{replica.type}: replicas is {replica.count}", "A leader has 1; the rest are Worker.")


@rule("leader-missing", "error", "§1", "There is no leader")
def leader_missing(job: Job) -> Iterator[Match]:
    """MindSpore on one NPU needs none."""
    leaders = [replica for replica in job.replicas if replica.type in LEADERS.values()]
    alone = job.framework == "mindspore" and sum(npus(replica) * (replica.count or 0) for replica in job.replicas) <= 1
    if job.replicas and not leaders and not alone:
        wanted = LEADERS.get(job.framework or "", "Master, Scheduler or Chief")
        yield Match(job.at("spec", "replicaSpecs"), "no leader among the replicas", f"Add {wanted} with 1 replica.")


@rule("container-ascend", "error", "§1", "A replica has no container named ascend")
def container_ascend(job: Job) -> Iterator[Match]:
    """Only that one gets the environment."""
    for replica in job.replicas:
        if replica.container is None:
            names = ", ".join(one.string("name") or "?" for one in replica.containers) or "none"
            what = f"{replica.type}: no container is named {CONTAINER} (found: {names})"
            yield Match(replica.pair.key, what, f"Name the training container {CONTAINER}.")


@rule("container-image", "error", "§1", "A container has no image")
def container_image(job: Job) -> Iterator[Match]:
    """Checked by the operator before the kubelet."""
    for replica in job.replicas:
        for one in replica.containers:
            if not one.string("image"):
                what = f"{replica.type}: container {one.string('name') or '?'} has no image"
                yield Match(one, what, "Name the image.")


@rule("success-policy", "error", "§1", "successPolicy is unknown")
def success_policy(job: Job) -> Iterator[Match]:
    """Empty or AllWorkers."""
    node = job.root.get("spec", "successPolicy")
    if node is not None and node.text not in ("", "AllWorkers"):
        yield Match(node, f"successPolicy is {node.text!r}", "Write AllWorkers, or leave it out.")


@rule("queue", "error", "§1", "schedulingPolicy names no queue")
def queue(job: Job) -> Iterator[Match]:
    """With gang scheduling the operator asks Volcano for it."""
    path = ("spec", "runPolicy", "schedulingPolicy")
    if job.root.get(*path) is not None and not job.root.string(*path, "queue"):
        yield Match(job.at(*path), "schedulingPolicy has no queue", "Write queue: default, or the queue's name.")


def npus(replica: Replica) -> int:
    """NPUs that one pod requests; 0 if that is not a number."""
    node = replica.container.get("resources", "requests") if replica.container is not None else None
    texts = [pair.node.text for pair in node.pairs if pair.key.text.startswith("huawei.com/")] if node else []
    return sum(int(text) for text in texts if text.isdecimal())


def nodes_of(root: Node) -> Iterator[Node]:
    """Every node once, in the order of the text."""
    todo, seen = [root], set[int]()
    while todo:
        node = todo.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            todo += [use.node for use in reversed((*node.items, *node.pairs))]
