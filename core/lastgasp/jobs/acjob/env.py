"""Rules on variables, ports and start scripts (docs/facts/job_yaml.md §4, §5, §9; docs/facts/taskd.md §5, §8)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .model import LEADERS, Job, Replica
from .rules import Match, rule
from .tree import Node

TASKD_PORT = 9601
_ALWAYS = ("MINDX_TASK_ID", "MINDX_SERVER_IP", "MINDX_SERVER_DOMAIN")
OPERATOR_ENV = (
    *_ALWAYS,
    "HIGH_AVAILABILITY",
    "PROCESS_RECOVER",
    "ELASTIC_PROCESS_RECOVER_ENABLE",
    "ENABLE_RESTART_FAULT_PROCESS",
    "HCCL_ASYNC_ERROR_HANDLING",
    "MS_ENABLE_TFT",
    "MS_ENABLE_THM",
    "MINDIO_FOR_MINDSPORE",
)
"""Appended by the operator: one that the user sets as well is duplicated."""
RESET_PROCESS = "reset_process.py"
_RETIRED = (
    "Graceful tolerance is retired (PyTorch after 7.2.RC1, MindSpore after 7.1.RC1). Remove the script; "
    "recover-strategy dump saves at a fault, recover and recover-in-place restart processes (lastgasp job patch)."
)


def _ascend(job: Job) -> Iterator[tuple[Replica, Node]]:
    """Replicas with their container ascend; a replica without one is reported by another rule."""
    return ((one, one.container) for one in job.replicas if one.container is not None)


@rule("pod-ip-missing", "error", "§4, §9", "A strategy without POD_IP")
def pod_ip_missing(job: Job) -> Iterator[Match]:
    """MindIO's controller and TaskD's manager listen there."""
    for replica, node in _ascend(job):
        if job.manages_processes and replica.variable("POD_IP") is None:
            fix = "Add it to env with valueFrom.fieldRef.fieldPath: status.podIP."
            yield Match(node, f"{replica.type}: POD_IP is missing in container ascend", fix)


@rule("pod-ip-source", "error", "§4", "POD_IP is not the pod's address")
def pod_ip_source(job: Job) -> Iterator[Match]:
    """Read from the pod's status."""
    for replica, _ in _ascend(job):
        env = replica.variable("POD_IP")
        if env is not None and env.source != "status.podIP":
            what = f"{replica.type}: POD_IP is {env.source or env.value!r}"
            yield Match(env.node, what, "Use valueFrom.fieldRef.fieldPath: status.podIP.")


@rule("xdl-ip-source", "warning", "§4", "XDL_IP is not the node's address")
def xdl_ip_source(job: Job) -> Iterator[Match]:
    """It names logs."""
    for replica, _ in _ascend(job):
        env = replica.variable("XDL_IP")
        if env is not None and env.source != "status.hostIP":
            what = f"{replica.type}: XDL_IP is {env.source or env.value!r}"
            yield Match(env.node, what, "Use valueFrom.fieldRef.fieldPath: status.hostIP.")


@rule("visible-devices", "error", "§4", "ASCEND_VISIBLE_DEVICES names another resource")
def visible_devices(job: Job) -> Iterator[Match]:
    """It must be the one that is asked for."""
    for replica, node in _ascend(job):
        env = replica.variable("ASCEND_VISIBLE_DEVICES")
        named = re.fullmatch(r"metadata\.annotations\['(.+)'\]", (env.source or "") if env else "")
        requests = node.get("resources", "requests") or node.get("resources", "limits")
        asked = [pair.key.text for pair in requests.pairs if "/" in pair.key.text] if requests is not None else []
        if env is not None and named and asked and named[1] not in asked:
            what = f"{replica.type}: ASCEND_VISIBLE_DEVICES reads {named[1]}, the container asks for {', '.join(asked)}"
            yield Match(env.node, what, f"Write metadata.annotations['{asked[0]}'].")


@rule("ttp-port-missing", "error", "§4, §9", "A strategy without TTP_PORT")
def ttp_port_missing(job: Job) -> Iterator[Match]:
    """TaskD starts MindIO's controller with every strategy, which fails without a port."""
    for replica, node in _ascend(job):
        if job.manages_processes and replica.variable("TTP_PORT") is None:
            what = f"{replica.type}: TTP_PORT is missing in container ascend"
            yield Match(node, what, 'Add name: TTP_PORT, value: "8000" to env.')


@rule("ttp-port", "error", "§4", "TTP_PORT is not a port")
def ttp_port(job: Job) -> Iterator[Match]:
    """MindIO takes 1024 to 65535 (docs/facts/mindio_tft.md §2.1)."""
    for replica, _ in _ascend(job):
        env = replica.variable("TTP_PORT")
        if env is not None and not env.unknown and port_number(env.value) is None:
            what = f"{replica.type}: TTP_PORT is {env.source or env.value!r}"
            yield Match(env.node, what, 'Write a port from 1024 to 65535 in quotes, as in "8000".')


@rule("ttp-port-differs", "error", "§4, §9", "TTP_PORT differs between replica types")
def ttp_port_differs(job: Job) -> Iterator[Match]:
    """All ranks must find the one controller."""
    given = {one.type: one.variable("TTP_PORT") for one, _ in _ascend(job)}
    found = {name: env for name, env in given.items() if env is not None and not env.unknown}
    if len({env.value for env in found.values()}) > 1:
        what = "TTP_PORT differs: " + ", ".join(f"{name} {env.value}" for name, env in found.items())
        yield Match(list(found.values())[-1].node, what, "Write the same port for all replica types.")


@rule("ttp-port-container", "error", "§4, §5, §9", "TTP_PORT is not the containerPort ttp-port")
def ttp_port_container(job: Job) -> Iterator[Match]:
    """Only dump needs it."""
    for replica, node in _ascend(job):
        env, port = replica.variable("TTP_PORT"), replica.port("ttp-port")
        if port is None and job.has("dump") and replica.offers((env and env.value) or 0) is None:
            what = f"{replica.type}: dump without the containerPort ttp-port"
            yield Match(node, what, f"Add containerPort: {(env and env.value) or 8000}, name: ttp-port to ports.")
        elif port is None or env is None or env.unknown:
            continue
        elif port.string("containerPort") != env.value:
            what = f"{replica.type}: ttp-port is {port.string('containerPort')}, TTP_PORT is {env.value}"
            yield Match(port, what, "Write the same port for both.")


@rule("taskd-port", "error", "§5, §9", "A strategy without the containerPort taskd-port 9601")
def taskd_port(job: Job) -> Iterator[Match]:
    """Fixed in TaskD's code."""
    for replica, node in _ascend(job):
        port = replica.port("taskd-port")
        if port is not None and port.string("containerPort") != str(TASKD_PORT):
            what = f"{replica.type}: taskd-port is {port.string('containerPort')}; TaskD always takes {TASKD_PORT}"
            yield Match(port, what, f"Write containerPort: {TASKD_PORT}.")
        elif port is None and job.manages_processes and replica.offers(TASKD_PORT) is None:
            fix = f"Add containerPort: {TASKD_PORT}, name: taskd-port to ports."
            yield Match(node, f"{replica.type}: the containerPort taskd-port {TASKD_PORT} is missing", fix)


@rule("taskd-port-pods", "warning", "§5, §8", "pod-rescheduling without taskd-port 9601")
def taskd_port_pods(job: Job) -> Iterator[Match]:
    """TaskD's manager takes part there as well."""
    for replica, node in _ascend(job):
        found = replica.port("taskd-port") or replica.offers(TASKD_PORT)
        if job.reschedules_pods and not job.manages_processes and found is None:
            fix = f"Add containerPort: {TASKD_PORT}, name: taskd-port to ports."
            yield Match(node, f"{replica.type}: the containerPort taskd-port {TASKD_PORT} is missing", fix)


@rule("port-repeated", "error", "CRD", "A containerPort, or the name of one, is given twice in one container")
def port_repeated(job: Job) -> Iterator[Match]:
    """The schema has ports as a map by number and protocol, so the API server refuses the job. Of a name: its pods."""
    for replica in job.replicas:
        for container in replica.all_containers:
            ports, names = dict[tuple[str, str], int](), dict[str, int]()
            for port in container.maps("ports"):
                number, name = port.string("containerPort") or "", port.string("name") or ""
                key = number, port.string("protocol") or "TCP"
                if key in ports:
                    what = f"{replica.type}: containerPort {number} is given twice, first in line {ports[key]}"
                    yield Match(port, what, "Keep one of them; its name does not matter.")
                elif name in names:
                    what = f"{replica.type}: two containerPorts are called {name}, the first in line {names[name]}"
                    yield Match(port, what, "Give each a name of its own.")
                ports.setdefault(key, port.line)
                if name:
                    names.setdefault(name, port.line)


@rule("port-name", "error", "operator", "A port of the leader has no name")
def port_name(job: Job) -> Iterator[Match]:
    """The operator turns them into a Service; several ports need names, and ascendjob-port always exists."""
    for replica, _ in _ascend(job):
        for port in replica.ports if replica.type in LEADERS.values() else ():
            if not port.string("name"):
                what = f"{replica.type}: containerPort {port.string('containerPort')} has no name"
                yield Match(port, f"{what}, so the operator cannot make the leader's Service", "Give it a name.")


@rule("host-network-ports", "warning", "§5", "hostNetwork shares TaskD's ports")
def host_network_ports(job: Job) -> Iterator[Match]:
    """9601 and 9602 are the same for all jobs."""
    for replica in job.replicas:
        if replica.host_network and job.needs_manager:
            what = f"{replica.type}: with hostNetwork two such jobs on a node collide on 9601 and 9602"
            fix = "Never put two on one node, and reserve both in net.ipv4.ip_local_reserved_ports."
            yield Match((replica.pod or replica.node).get("hostNetwork") or replica.pair.key, what, fix)


@rule("host-network-hccl", "warning", "§4", "hostNetwork without HCCL_IF_IP")
def host_network_hccl(job: Job) -> Iterator[Match]:
    """On a node with several networks HCCL may take the address of another one than its peers do."""
    for replica, node in _ascend(job):
        if replica.host_network and replica.variable("HCCL_IF_IP") is None:
            what = f"{replica.type}: with hostNetwork HCCL chooses one of the node's addresses on its own"
            yield Match(node, what, "Set HCCL_IF_IP from the field status.hostIP.")


@rule("mindx-wait-range", "error", "§4, §9", "MINDIO_WAIT_MINDX_TIME is not a number from 1 to 3600")
def mindx_wait_range(job: Job) -> Iterator[Match]:
    """MindIO silently falls back to 30."""
    for replica, _ in _ascend(job):
        env = replica.variable("MINDIO_WAIT_MINDX_TIME")
        if env is not None and not env.unknown and _wait(env.value) is None:
            what = f"{replica.type}: MINDIO_WAIT_MINDX_TIME is {env.value!r}"
            yield Match(env.node, what, 'Write "1" to "3600" (seconds); "60" or more for elastic-training.')


@rule("mindx-wait-clusterd", "warning", "§4, §9", "MINDIO_WAIT_MINDX_TIME is below 10")
def mindx_wait_clusterd(job: Job) -> Iterator[Match]:
    """ClusterD then uses 20 s, and answers too late."""
    for replica, _ in _ascend(job):
        env = replica.variable("MINDIO_WAIT_MINDX_TIME")
        seconds = _wait(env.value) if env is not None else None
        if env is not None and seconds is not None and seconds < 10:
            what = f"{replica.type}: MINDIO_WAIT_MINDX_TIME is {seconds}: ClusterD waits 20 s all the same"
            yield Match(env.node, what, 'Write "60".')


@rule("mindx-wait-short", "warning", "§4, §9", "elastic-training with less than 60 s for an answer")
def mindx_wait_short(job: Job) -> Iterator[Match]:
    """30 s is MindIO's own default. recover is tried first; if recover-in-place does not apply, this matters."""
    if not job.has("elastic-training") or job.has("recover"):
        return
    for replica, node in _ascend(job):
        env = replica.variable("MINDIO_WAIT_MINDX_TIME")
        seconds = 30 if env is None else _wait(env.value)
        if seconds is not None and seconds < 60:
            what = f"{replica.type}: elastic-training with {seconds} s for MindX's answer"
            yield Match(node if env is None else env.node, what, 'Set MINDIO_WAIT_MINDX_TIME to "60" or more.')


@rule("operator-env", "warning", "§4, §9", "A variable that the operator writes")
def operator_env(job: Job) -> Iterator[Match]:
    """It appends, so the name would be there twice."""
    for replica, _ in _ascend(job):
        for env in replica.env:
            if env.name in _ALWAYS or (env.name in OPERATOR_ENV and job.manages_processes):
                what = f"{replica.type}: {env.name} is set by the operator, and would be there twice"
                yield Match(env.node, what, "Remove it.")


@rule("hccl-watchdog", "error", "§4, §9", "The HCCL watchdog is on")
def hccl_watchdog(job: Job) -> Iterator[Match]:
    """It kills the processes that recovery wants to keep."""
    for replica, _ in _ascend(job):
        for name, pattern in (("HCCL_ASYNC_ERROR_HANDLING", r"1"), ("MS_ENABLE_THM", r".*HCCL_WATCHDOG:\s*1.*")):
            env = replica.variable(name)
            if job.manages_processes and env is not None and re.fullmatch(pattern, env.value or ""):
                yield Match(
                    env.node, f"{replica.type}: {name}={env.value} ends ranks that recovery needs", "Remove it."
                )
    yield from _in_scripts(job, r"HCCL_ASYNC_ERROR_HANDLING=[\"']?1", "HCCL_ASYNC_ERROR_HANDLING=1 in a start command",
                           "Remove it.", job.manages_processes)  # fmt: skip


@rule("env-repeated", "warning", "§4", "A variable is given twice")
def env_repeated(job: Job) -> Iterator[Match]:
    """The last one counts."""
    for replica, _ in _ascend(job):
        seen: dict[str, int] = {}
        for env in replica.env:
            if env.name in seen:
                what = f"{replica.type}: {env.name} is given twice, first in line {seen[env.name]}"
                yield Match(env.node, what, "Remove one of them.")
            seen.setdefault(env.name, env.node.line)


@rule("taskd-process-off", "error", "§4, §9", "TASKD_PROCESS_ENABLE=off with a strategy")
def taskd_process_off(job: Job) -> Iterator[Match]:
    """TaskD for profiling only: without MindIO's controller nothing is recovered."""
    for replica, _ in _ascend(job):
        env = replica.variable("TASKD_PROCESS_ENABLE")
        if job.manages_processes and env is not None and env.value == "off":
            what = f"{replica.type}: TASKD_PROCESS_ENABLE=off starts no MindIO controller, so nothing is recovered"
            yield Match(env.node, what, 'Write "on", or leave it out.')
    yield from _in_scripts(job, r"TASKD_PROCESS_ENABLE=[\"']?off", "TASKD_PROCESS_ENABLE=off in a start command",
                           'Write "on", or leave it out.', job.manages_processes)  # fmt: skip


@rule("reset-process", "warning", "taskd §8", "reset_process.py: graceful tolerance is retired")
def reset_process(job: Job) -> Iterator[Match]:
    """The fix names its replacement."""
    yield from _in_scripts(job, RESET_PROCESS, f"{RESET_PROCESS} is started", _RETIRED, not job.manages_processes)


@rule("reset-process-conflict", "error", "taskd §8", "reset_process.py with a strategy")
def reset_process_conflict(job: Job) -> Iterator[Match]:
    """They exclude each other."""
    what = f"{RESET_PROCESS} is started, which excludes process-level recovery"
    yield from _in_scripts(job, RESET_PROCESS, what, _RETIRED, job.manages_processes)


def _in_scripts(job: Job, pattern: str, what: str, fix: str, asked: bool) -> Iterator[Match]:
    words = {id(word): (replica, word) for replica in job.replicas for word in replica.script}
    for replica, word in words.values():
        if asked and re.search(pattern, word.text):
            yield Match(word, f"{replica.type}: {what}", fix)


def port_number(text: str | None) -> int | None:
    """A port that MindIO accepts."""
    number = int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 6 else 0
    return number if 1024 <= number <= 65535 else None


def _wait(text: str | None) -> int | None:
    number = int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 6 else 0
    return number if 1 <= number <= 3600 else None
