"""Rules on volumes, restarts, scheduling and resources (docs/facts/job_yaml.md §6, §7, §9)."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from lastgasp.steps import bits

from .model import DATATRACE, PROFILING, RESET, Job, Mount, Replica
from .rules import Match, rule
from .structure import nodes_of
from .tree import Node

GRACE_OVER_TIME = 900
"""Volcano's default: seconds until a graceful deletion becomes a forced one."""


def _mounts(job: Job, path: str) -> Iterator[tuple[Replica, Mount]]:
    return ((one, mount) for one in job.replicas for mount in one.mounts if mount.path.rstrip("/") == path)


def datatrace_host_path(job: Job) -> str:
    """Where the device plugin mirrors the job's switch file."""
    return f"{DATATRACE}/{job.namespace}.data-trace-{job.name}"


def reset_host_path(job: Job) -> str:
    """Where reset.json is on the host."""
    return f"/user/restore/reset/{job.namespace}.reset-config-{job.name}"


@rule("datatrace-volume", "error", "§6", "The switch file's volume is not a host directory")
def datatrace_volume(job: Job) -> Iterator[Match]:
    """Files of a configMap volume are symlinks, and TaskD refuses those."""
    for replica, mount in _mounts(job, DATATRACE):
        if mount.host_path is None:
            what = f"{replica.type}: {DATATRACE} is not a hostPath; TaskD refuses the symlinks of a configMap volume"
            yield Match(mount.node, what, f"Use a hostPath volume of {datatrace_host_path(job)}.")


@rule("datatrace-path", "error", "§6", "The switch file's host directory is another job's")
def datatrace_path(job: Job) -> Iterator[Match]:
    """The device plugin writes to one place only."""
    for replica, mount in _mounts(job, DATATRACE):
        if mount.host_path is not None and mount.host_path.rstrip("/") != datatrace_host_path(job):
            what = f"{replica.type}: {DATATRACE} mounts {mount.host_path}"
            yield Match(mount.volume or mount.node, what, f"Write path: {datatrace_host_path(job)}.")


@rule("datatrace-mount-path", "error", "§6", "The switch file's mountPath is not literal")
def datatrace_mount_path(job: Job) -> Iterator[Match]:
    """ClusterD compares the string."""
    for replica, mount in _mounts(job, DATATRACE):
        if mount.path != DATATRACE:
            what = f"{replica.type}: mountPath is {mount.path!r}, which ClusterD does not recognise"
            yield Match(mount.node, what, f"Write exactly {DATATRACE}.")


@rule("datatrace-partial", "warning", "§9", "The switch file is mounted in some replicas only")
def datatrace_partial(job: Job) -> Iterator[Match]:
    """ClusterD then switches by gRPC, which needs a manager."""
    having = {replica.type for replica, _ in _mounts(job, DATATRACE)}
    for replica in job.replicas:
        if having and replica.type not in having:
            what = f"{replica.type}: {DATATRACE} is not mounted, so ClusterD switches by gRPC, which needs a manager"
            yield Match(replica.pair.key, what, "Mount it in every replica type.")


@rule("switch-configmap", "error", "§6, taskd §6", "The switch's ConfigMap does not switch")
def switch_configmap(job: Job) -> Iterator[Match]:
    """Checked if it is among the files; reported at the job's name."""
    for root in job.elsewhere:
        if root.string("kind") != "ConfigMap" or root.string("metadata", "name") != f"data-trace-{job.name}":
            continue
        for what in _wrong_in_switch(job, root):
            fix = f"Print a right one: lastgasp job switch-configmap --job {job.name} --namespace {job.namespace}."
            yield Match(job.at("metadata", "name"), f"ConfigMap data-trace-{job.name} (line {root.line}): {what}", fix)


def _wrong_in_switch(job: Job, root: Node) -> Iterator[str]:
    if (root.string("metadata", "namespace") or "default") != job.namespace:
        yield f"its namespace is not the job's, {job.namespace}"
    if root.string("metadata", "labels", "reset") != "true":
        yield 'the label reset: "true" is missing, so the device plugin does not see it'
    try:
        found = msgspec.json.decode(root.string("data", "profilingSwitch") or "", type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeEncodeError):
        yield "data.profilingSwitch is not a JSON object of strings"
        return
    wrong = [f"{key}={value}" for key, value in found.items() if key not in bits.TASKD or value not in ("on", "off")]
    if wrong:
        yield f"{', '.join(wrong)} is not understood; the keys are {', '.join(bits.TASKD)}, each on or off"


@rule("profiling-read-only", "error", "§6", "The profiling directory cannot be written")
def profiling_read_only(job: Job) -> Iterator[Match]:
    """Marks are written there."""
    for path in (PROFILING, PROFILING.rpartition("/")[0]):
        for replica, mount in _mounts(job, path):
            if (mount.node.string("readOnly") or "").lower() == "true":
                yield Match(mount.node, f"{replica.type}: {mount.path} is mounted read-only", "Remove readOnly.")


@rule("reset-mount-missing", "warning", "§6", "reset.json is not mounted")
def reset_mount_missing(job: Job) -> Iterator[Match]:
    """TaskD's manager logs an error every 100 ms."""
    for replica in job.replicas:
        mounted = any(mount.path.rstrip("/") == RESET for mount in replica.mounts)
        if job.needs_manager and replica.container is not None and not mounted:
            what = f"{replica.type}: {RESET} is not mounted: TaskD's manager logs an error every 100 ms"
            yield Match(replica.container, what, f"Mount the hostPath {reset_host_path(job)} there.")


@rule("reset-path", "error", "§6", "reset.json's host directory is another job's")
def reset_path(job: Job) -> Iterator[Match]:
    """It is named after namespace and job."""
    for replica, mount in _mounts(job, RESET):
        if mount.host_path is not None and mount.host_path.rstrip("/") != reset_host_path(job):
            what = f"{replica.type}: {RESET} mounts {mount.host_path}"
            yield Match(mount.volume or mount.node, what, f"Write path: {reset_host_path(job)}.")


@rule("rank-table-configmap", "warning", "§6", "A RankTable by ConfigMap")
def rank_table_configmap(job: Job) -> Iterator[Match]:
    """Not with pod or process recovery; the operator's ConfigMap is rings-config-<job>."""
    for replica in job.replicas:
        for volume in replica.pod.maps("volumes") if replica.pod is not None else ():
            name = volume.string("configMap", "name") or ""
            if name.startswith("rings-config-") and job.needs_manager:
                what = f"{replica.type}: the RankTable comes from ConfigMap {name}, which recovery does not go with"
                yield Match(volume, what, "Mount the RankTable file from shared storage instead.")


@rule("restart-policy", "error", "§2, §7", "fault-retry-times without restartPolicy Never")
def restart_policy(job: Job) -> Iterator[Match]:
    """Otherwise the kubelet restarts containers behind the scheduler's back. The operator's default is Never."""
    for replica in job.replicas:
        node = replica.node.get("restartPolicy")
        if job.retries > 0 and node is not None and node.text != "Never":
            what = f"{replica.type}: fault-retry-times with restartPolicy {node.text}"
            yield Match(node, what, "Write restartPolicy: Never.")


@rule("backoff-limit", "warning", "§7", "backoffLimit stops before fault-retry-times")
def backoff_limit(job: Job) -> Iterator[Match]:
    """The smaller limit applies first."""
    node = job.root.get("spec", "runPolicy", "backoffLimit")
    limit = int(node.text) if node is not None and node.text.isdecimal() else 0
    if node is not None and 0 < limit < job.retries:
        what = f"backoffLimit {limit} stops before the {job.retries} of fault-retry-times"
        yield Match(node, what, "Write the same number, or leave backoffLimit out.")


@rule("min-available-high", "error", "§7", "minAvailable is more than there are")
def min_available_high(job: Job) -> Iterator[Match]:
    """Such a job is never scheduled."""
    node, total = _min_available(job)
    if node is not None and int(node.text) > total:
        what = f"minAvailable is {node.text}, the replicas are {total}: it is never scheduled"
        yield Match(node, what, f"Write {total}.")


@rule("min-available-low", "warning", "§7", "minAvailable is less than there are")
def min_available_low(job: Job) -> Iterator[Match]:
    """A part of the job may hold its NPUs and wait."""
    node, total = _min_available(job)
    if node is not None and int(node.text) < total:
        what = f"minAvailable is {node.text}, the replicas are {total}: a part may start and wait"
        yield Match(node, what, f"Write {total}.")


def _min_available(job: Job) -> tuple[Node | None, int]:
    node = job.root.get("spec", "runPolicy", "schedulingPolicy", "minAvailable")
    known = node is not None and node.text.isdecimal() and all(one.count is not None for one in job.replicas)
    return (node if known else None), sum(one.count or 0 for one in job.replicas)


@rule("grace-period", "warning", "§7", "terminationGracePeriodSeconds is not below grace-over-time")
def grace_period(job: Job) -> Iterator[Match]:
    """Volcano would delete the pod by force first; MindCluster's own samples have 900."""
    for replica, node in _grace_periods(job):
        if job.label("fault-scheduling") in ("grace", "external-grace") and not 0 < _number(node) < GRACE_OVER_TIME:
            what = f"{replica.type}: terminationGracePeriodSeconds is {node.text}"
            fix = f"Write 1 to {GRACE_OVER_TIME - 1} (Volcano's grace-over-time is {GRACE_OVER_TIME}), enough to save."
            yield Match(node, what, fix)


@rule("grace-period-unused", "warning", "§7", "terminationGracePeriodSeconds without grace")
def grace_period_unused(job: Job) -> Iterator[Match]:
    """Only grace deletes gently."""
    for replica, node in _grace_periods(job):
        if job.label("fault-scheduling") not in ("grace", "external-grace"):
            what = f"{replica.type}: terminationGracePeriodSeconds has a meaning with fault-scheduling grace only"
            yield Match(node, what, 'Write fault-scheduling: "grace", or remove it.')


def _grace_periods(job: Job) -> Iterator[tuple[Replica, Node]]:
    for replica in job.replicas:
        node = replica.pod.get("terminationGracePeriodSeconds") if replica.pod is not None else None
        if node is not None:
            yield replica, node


def _number(node: Node) -> int:
    return int(node.text) if re.fullmatch(r"-?[0-9]{1,9}", node.text) else -1


@rule("resources", "error", "§7", "limits and requests of NPUs differ")
def resources(job: Job) -> Iterator[Match]:
    """Kubernetes requires them to be equal for devices."""
    for replica in job.replicas:
        asked = replica.container.get("resources") if replica.container is not None else None
        limits, requests = (_npus(asked.get(key)) if asked is not None else {} for key in ("limits", "requests"))
        node = asked
        if node is not None and requests != limits:
            what = f"{replica.type}: NPU limits are {limits or 'unset'}, requests are {requests or 'unset'}"
            yield Match(node, what, "Write the same for both.")


def _npus(node: Node | None) -> dict[str, str]:
    pairs = node.pairs if node is not None else []
    return {pair.key.text: pair.node.text for pair in pairs if pair.key.text.startswith("huawei.com/")}


@rule("device-plugin-hot-reset", "error", "§9", "The device plugin's hotReset=1 with process-level recovery")
def device_plugin_hot_reset(job: Job) -> Iterator[Match]:
    """Checked if the device plugin's DaemonSet is among the files."""
    if not job.has("recover", "recover-in-place", "retry", "elastic-training"):
        return
    for root in job.elsewhere:
        for node in nodes_of(root) if root.string("kind") == "DaemonSet" else ():
            if node.kind == "scalar" and re.search(r"hotReset[= ]+1\b", node.text):
                name = root.string("metadata", "name") or "?"
                what = f"the device plugin of {name} has hotReset=1: recovery of processes falls to the job level"
                fix = f"Write hotReset=2 in the DaemonSet (line {node.line} of its file)."
                yield Match(job.at("metadata", "annotations", "recover-strategy"), what, fix)
