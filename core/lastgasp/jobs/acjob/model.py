"""An AscendJob as the rules see it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .tree import Document, Node, Pair

API_VERSION, KIND = "mindxdl.gitee.com/v1", "AscendJob"
LEADERS = {"pytorch": "Master", "mindspore": "Scheduler", "tensorflow": "Chief"}
"""Leader replica type of each framework; the other type is Worker."""
WORKER = "Worker"
STRATEGIES = ("retry", "recover-in-place", "recover", "elastic-training", "dump", "exit")
"""Items of recover-strategy, in ClusterD's order of trying them (docs/facts/job_yaml.md §3)."""
CONTAINER = "ascend"
"""The only container that the operator looks at."""
PROFILING = "/user/cluster-info/profiling"
DATATRACE = "/user/cluster-info/datatrace-config"
RESET = "/user/restore/reset/config"


@dataclass(frozen=True)
class Env:
    """One environment variable; `value` is None if it comes from elsewhere, and `source` then says from which
    field of the pod."""

    node: Node
    name: str
    value: str | None
    source: str | None

    @property
    def unknown(self) -> bool:
        """Whether the value comes from a ConfigMap or secret, which the file does not contain."""
        return self.value is None and self.source is None and self.node.get("valueFrom") is not None


@dataclass(frozen=True)
class Mount:
    """A volumeMount with its volume, if there is one."""

    node: Node
    path: str
    volume: Node | None

    @property
    def host_path(self) -> str | None:
        """The host's directory, where the volume is one; with the mount's `subPath`."""
        path = self.volume.string("hostPath", "path") if self.volume is not None else None
        below = self.node.string("subPath")
        return path if path is None or not below else f"{path.rstrip('/')}/{below}"


class Replica:
    """One entry of spec.replicaSpecs."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.type, self.node = pair, pair.key.text, pair.node

    @property
    def count(self) -> int | None:
        """The number of replicas; 1 if not given, None if it is not a number."""
        node = self.node.get("replicas")
        return 1 if node is None else _natural(node.text)

    def label(self, key: str) -> Pair | None:
        """A label of the pods."""
        node = self.node.get("template", "metadata", "labels")
        return node.pair(key) if node is not None else None

    @cached_property
    def pod(self) -> Node | None:
        """spec.template.spec."""
        return self.node.get("template", "spec")

    @cached_property
    def containers(self) -> list[Node]:
        """Those that run for the pod's lifetime."""
        return self.pod.maps("containers") if self.pod is not None else []

    @cached_property
    def all_containers(self) -> list[Node]:
        """Including those that run before."""
        return [*self.containers, *(self.pod.maps("initContainers") if self.pod is not None else [])]

    @cached_property
    def container(self) -> Node | None:
        """The one named ascend."""
        return next((one for one in self.containers if one.string("name") == CONTAINER), None)

    @cached_property
    def env(self) -> list[Env]:
        """Of that container, in order."""
        found = self.container.maps("env") if self.container is not None else []
        return [Env(one, one.string("name") or "", one.string("value"),
                    one.string("valueFrom", "fieldRef", "fieldPath")) for one in found]  # fmt: skip

    def variable(self, name: str) -> Env | None:
        """The last one of that name, which is the one that counts."""
        return next((one for one in reversed(self.env) if one.name == name), None)

    @cached_property
    def ports(self) -> list[Node]:
        """Of that container."""
        return self.container.maps("ports") if self.container is not None else []

    def port(self, name: str) -> Node | None:
        """The containerPort of that name."""
        return next((one for one in self.ports if one.string("name") == name), None)

    def offers(self, number: str | int) -> Node | None:
        """The TCP containerPort of that number, whatever its name."""
        tcp = (one for one in self.ports if one.string("protocol") in (None, "TCP"))
        return next((one for one in tcp if one.string("containerPort") == str(number)), None)

    @cached_property
    def mounts(self) -> list[Mount]:
        """Of that container."""
        if self.container is None or self.pod is None:
            return []
        volumes = {one.string("name"): one for one in self.pod.maps("volumes")}
        return [Mount(one, one.string("mountPath") or "", volumes.get(one.string("name")))
                for one in self.container.maps("volumeMounts")]  # fmt: skip

    def uses(self, volume: str) -> int:
        """How many mounts of all its containers are of that volume."""
        pod = self.pod
        each = [*self.containers, *(pod.maps("initContainers") if pod is not None else ())]
        return sum(mount.string("name") == volume for one in each for mount in one.maps("volumeMounts"))

    @property
    def host_network(self) -> bool:
        """Whether its pods share the node's network."""
        return self.pod is not None and (self.pod.string("hostNetwork") or "").lower() == "true"

    @cached_property
    def script(self) -> list[Node]:
        """The words of every container's command and args."""
        lists = [one.get(key) for one in self.containers for key in ("command", "args")]
        return [use.node for one in lists if one is not None for use in one.items if use.node.kind == "scalar"]


class Job:
    """One AscendJob.

    Args:
        root: its document.
        elsewhere: the other documents, of this file and of those checked with it.
    """

    def __init__(self, root: Node, elsewhere: list[Node] | None = None) -> None:
        self.root, self.elsewhere = root, elsewhere or []

    @property
    def name(self) -> str:
        """metadata.name, or a question mark."""
        return self.root.string("metadata", "name") or "?"

    @property
    def namespace(self) -> str:
        """metadata.namespace; `default` where kubectl decides."""
        return self.root.string("metadata", "namespace") or "default"

    @property
    def framework(self) -> str | None:
        """The label, where it is one of the three."""
        found = self.label("framework")
        return found if found in LEADERS else None

    def label(self, key: str) -> str | None:
        """A label's value."""
        return self.root.string("metadata", "labels", key)

    def annotation(self, key: str) -> str | None:
        """An annotation's value."""
        return self.root.string("metadata", "annotations", key)

    def at(self, *path: str) -> Node:
        """The node at the longest existing part of a path, for findings about what is missing.

        For an entry that exists it is the key, whose line people look for.
        """
        node, place = self.root, self.root
        for key in path:
            pair = node.pair(key)
            if pair is None:
                break
            node, place = pair.node, pair.key
        return place

    @cached_property
    def replicas(self) -> list[Replica]:
        """In the order of the file; entries that are not maps are left out."""
        return [Replica(pair) for pair in self.replica_pairs if pair.node.kind == "map"]

    @cached_property
    def replica_pairs(self) -> list[Pair]:
        """Entries of spec.replicaSpecs, those of merged maps last."""
        specs = self.root.get("spec", "replicaSpecs")
        pairs = specs.pairs if specs is not None else []
        merged = [one for pair in pairs if pair.is_merge for one in pair.node.pairs]
        own = [pair for pair in pairs if not pair.is_merge]
        names = {pair.key.text for pair in own}
        return [*own, *(pair for pair in merged if pair.key.text not in names)]

    @property
    def raw_strategies(self) -> list[str]:
        """Items of recover-strategy as the operator splits them: on the comma, without trimming."""
        text = self.annotation("recover-strategy")
        return text.split(",") if text else []

    @property
    def strategies(self) -> list[str]:
        """Those that are valid, in ClusterD's order."""
        return [one for one in STRATEGIES if one in self.raw_strategies]

    def has(self, *names: str) -> bool:
        """Whether one of these strategies is configured."""
        return any(one in self.strategies for one in names)

    @property
    def sub_healthy(self) -> str:
        """The label subHealthyStrategy."""
        return self.label("subHealthyStrategy") or "ignore"

    @property
    def reschedules_pods(self) -> bool:
        """Whether pod-rescheduling is on."""
        return self.label("pod-rescheduling") == "on"

    @property
    def manages_processes(self) -> bool:
        """Whether ClusterD, TaskD and MindIO have processes to recover: any strategy, or hotSwitch."""
        return bool(self.strategies) or self.sub_healthy == "hotSwitch"

    @property
    def needs_manager(self) -> bool:
        """Whether TaskD's manager takes part."""
        return self.manages_processes or self.reschedules_pods

    @property
    def retries(self) -> int:
        """The effective fault-retry-times: 0 if it is absent or not a number."""
        return _natural(self.label("fault-retry-times") or "") or 0


def _natural(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def jobs_in(documents: list[Document], elsewhere: list[Node] | None = None) -> list[Job]:
    """The AscendJobs of a file, including those in a `kind: List`; the rest of the file is `elsewhere` to each."""
    roots = []
    for document in documents:
        root = document.root
        if root is not None and root.string("kind") == "List":
            roots += root.maps("items")
        elif root is not None:
            roots.append(root)
    found = [root for root in roots if root.string("kind") == KIND]
    others = [root for root in roots if root not in found]
    return [Job(root, [*others, *(elsewhere or [])]) for root in found]
