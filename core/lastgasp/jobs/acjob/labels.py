"""Rules on labels and annotations, and on strategies that do not go together (docs/facts/job_yaml.md §2, §3, §9)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .model import STRATEGIES, Job
from .rules import Match, rule

FAULT_SCHEDULING = ("grace", "force", "off", "external-grace", "external-force")
SUB_HEALTHY = ("ignore", "graceExit", "forceExit", "hotSwitch")
_PLATFORM = ("ProcessRecoverStrategy", "ProcessConfirmFault", "ProcessResultFault", "RankTableReady",
             "ProcessRecoverStatus")  # fmt: skip
JOB_LABELS = ("fault-scheduling", "pod-rescheduling", "fault-retry-times", "subHealthyStrategy")
_IN_JOB = {"labels": JOB_LABELS, "annotations": ("recover-strategy", "wait-reschedule-timeout")}
_LABELS, _ANNOTATIONS = ("metadata", "labels"), ("metadata", "annotations")
_BACKOFF = ("spec", "runPolicy", "backoffLimit")


@rule("fault-scheduling", "error", "§2", "fault-scheduling has an unknown value")
def fault_scheduling(job: Job) -> Iterator[Match]:
    """An unknown value means no rescheduling."""
    found = job.label("fault-scheduling")
    if found is not None and found not in FAULT_SCHEDULING:
        yield Match(job.at(*_LABELS, "fault-scheduling"), f"fault-scheduling is {found!r}", 'Write "grace" or "force".')


@rule("pod-rescheduling", "warning", "§2", "pod-rescheduling is not on")
def pod_rescheduling(job: Job) -> Iterator[Match]:
    """Any value but on means off."""
    found = job.label("pod-rescheduling")
    if found not in (None, "on", "off"):
        what = f"pod-rescheduling is {found!r}, which works as off"
        yield Match(job.at(*_LABELS, "pod-rescheduling"), what, 'Write "on", or leave it out.')


@rule("retry-times-number", "error", "operator", "fault-retry-times is not a number, and there is no backoffLimit")
def retry_times_number(job: Job) -> Iterator[Match]:
    """The operator then reads it as backoffLimit, fails, and drops the new job."""
    if _retries_are_lost(job):
        found = job.label("fault-retry-times")
        what = f"fault-retry-times is {found!r}: without backoffLimit the operator drops the job"
        yield Match(job.at(*_LABELS, "fault-retry-times"), what, 'Write a number above 0 in quotes, as in "3".')


def _retries_are_lost(job: Job) -> bool:
    number = re.fullmatch(r"[-+]?[0-9]{1,18}", job.label("fault-retry-times") or "0")
    return number is None and job.root.get(*_BACKOFF) is None


@rule("retry-times-limit", "warning", "operator", "fault-retry-times limits every rescheduling")
def retry_times_limit(job: Job) -> Iterator[Match]:
    """The operator uses it as backoffLimit if that is absent: a run of months ends at the next fault."""
    if job.retries and job.root.get(*_BACKOFF) is None:
        what = f"without backoffLimit the job fails for good after {job.retries} reschedulings, whatever the reason"
        fix = "Write spec.runPolicy.backoffLimit: 0 (no limit), and fault-retry-times as high as you need."
        yield Match(job.at(*_LABELS, "fault-retry-times"), what, fix)


@rule("retry-times", "warning", "§2", "fault-retry-times is off")
def retry_times(job: Job) -> Iterator[Match]:
    """Zero, or not a number."""
    found = job.label("fault-retry-times")
    if found is not None and job.retries == 0 and not _retries_are_lost(job):
        what = f"fault-retry-times is {found!r}, which works as off"
        yield Match(job.at(*_LABELS, "fault-retry-times"), what, 'Write a number above 0 in quotes, as in "3".')


@rule("retry-times-missing", "warning", "§2, §8", "recover without fault-retry-times")
def retry_times_missing(job: Job) -> Iterator[Match]:
    """MindCluster's documentation requires it for process-level recovery."""
    if job.has("recover", "recover-in-place") and job.label("fault-retry-times") is None:
        what = "recover without fault-retry-times: a fault of the software is not retried"
        yield Match(job.at(*_ANNOTATIONS, "recover-strategy"), what, 'Add the label fault-retry-times: "3".')


@rule("process-recover-enable", "warning", "§2", "process-recover-enable is set by hand")
def process_recover_enable(job: Job) -> Iterator[Match]:
    """The operator sets it on the PodGroup."""
    found = job.label("process-recover-enable")
    if found is not None:
        known = "" if found in ("on", "pause", "off") else ", and that value is unknown"
        what = f"process-recover-enable is {found!r}; the operator sets it from recover-strategy{known}"
        yield Match(job.at(*_LABELS, "process-recover-enable"), what, "Remove it.")


@rule("sub-healthy", "error", "§2", "subHealthyStrategy has an unknown value")
def sub_healthy(job: Job) -> Iterator[Match]:
    """Four values are known."""
    if job.sub_healthy not in SUB_HEALTHY:
        what = f"subHealthyStrategy is {job.sub_healthy!r}"
        yield Match(job.at(*_LABELS, "subHealthyStrategy"), what, f"Expected one of {', '.join(SUB_HEALTHY)}.")


@rule("grace-exit-dump", "error", "§2, §9", "graceExit without dump")
def grace_exit_dump(job: Job) -> Iterator[Match]:
    """Nothing would save before the exit."""
    if job.sub_healthy == "graceExit" and not job.has("dump"):
        what = "subHealthyStrategy graceExit saves by the strategy dump, which is not configured"
        yield Match(job.at(*_LABELS, "subHealthyStrategy"), what, "Add dump to recover-strategy.")


@rule("hot-switch-spare", "warning", "§2, §9", "hotSwitch needs a spare node")
def hot_switch_spare(job: Job) -> Iterator[Match]:
    """Not visible in the file, so always mentioned."""
    if job.sub_healthy == "hotSwitch":
        what = "hotSwitch does nothing without a spare node, and never for the pod of rank 0"
        yield Match(job.at(*_LABELS, "subHealthyStrategy"), what, "Keep one node of the same kind free.")


@rule("strategy-empty", "error", "§3, §9", "recover-strategy is empty")
def strategy_empty(job: Job) -> Iterator[Match]:
    """The operator switches recovery on, but it has nothing to do."""
    found = job.root.get(*_ANNOTATIONS)
    pair = found.pair("recover-strategy") if found is not None else None
    if pair is not None and pair.node.kind == "scalar" and not (job.annotation("recover-strategy") or "").strip():
        what = "recover-strategy is empty: recovery is switched on with nothing to do"
        yield Match(job.at(*_ANNOTATIONS, "recover-strategy"), what, "Name a strategy, or remove the annotation.")


@rule("strategy-space", "error", "§3, §9", "recover-strategy has a blank in it")
def strategy_space(job: Job) -> Iterator[Match]:
    """It is split on the comma and not trimmed."""
    lost = [one for one in job.raw_strategies if one != one.strip() and one.strip() in STRATEGIES]
    if lost:
        what = f"recover-strategy loses {', '.join(map(repr, lost))}: items are not trimmed"
        together = ",".join(one.strip() for one in job.raw_strategies)
        yield Match(job.at(*_ANNOTATIONS, "recover-strategy"), what, f'Write "{together}".')


@rule("strategy-unknown", "error", "§3, §9", "recover-strategy has an unknown item")
def strategy_unknown(job: Job) -> Iterator[Match]:
    """Unknown items are ignored silently."""
    unknown = [one for one in job.raw_strategies if one.strip() not in STRATEGIES]
    if unknown and (job.annotation("recover-strategy") or "").strip():
        what = f"recover-strategy has {', '.join(map(repr, unknown))}, which is ignored"
        yield Match(job.at(*_ANNOTATIONS, "recover-strategy"), what, f"Expected some of {', '.join(STRATEGIES)}.")


@rule("strategy-exit", "warning", "§3, §4", "exit is named")
def strategy_exit(job: Job) -> Iterator[Match]:
    """ClusterD adds it; naming it has a side effect."""
    if "exit" in job.strategies:
        what = "ClusterD always adds exit; naming it makes the operator set the variables of recover as well"
        yield Match(job.at(*_ANNOTATIONS, "recover-strategy"), what, "Leave exit out.")


@rule("elastic-mindspore", "error", "§4, §9", "elastic-training with MindSpore")
def elastic_mindspore(job: Job) -> Iterator[Match]:
    """The operator sets nothing for it."""
    if job.framework == "mindspore" and job.has("elastic-training"):
        what = "elastic-training does not exist for MindSpore: a warning in the operator's log, and nothing is set"
        yield Match(job.at(*_ANNOTATIONS, "recover-strategy"), what, "Use recover or dump.")


@rule("strategy-tensorflow", "error", "§4", "A strategy with TensorFlow")
def strategy_tensorflow(job: Job) -> Iterator[Match]:
    """The operator's table and MindIO know PyTorch and MindSpore."""
    if job.framework == "tensorflow" and job.strategies:
        what = f"{', '.join(job.strategies)}: process-level strategies exist for PyTorch and MindSpore only"
        fix = "Remove recover-strategy; use fault-scheduling, and pod-rescheduling if you like."
        yield Match(job.at(*_ANNOTATIONS, "recover-strategy"), what, fix)


@rule("dump-not-first", "warning", "§9", "dump with strategies before it")
def dump_not_first(job: Job) -> Iterator[Match]:
    """It fires when it is the first that is possible."""
    before = [one for one in job.strategies if one not in ("dump", "exit")]
    if job.has("dump") and before:
        what = f"dump fires only after {', '.join(before)} could not be done"
        yield Match(job.at(*_ANNOTATIONS, "recover-strategy"), what, "Keep it as the last resort, or name dump alone.")


@rule("rank-0-pod", "warning", "§9", "A fault in the pod of rank 0")
def rank_0_pod(job: Job) -> Iterator[Match]:
    """Always job-level."""
    if job.has("recover", "recover-in-place", "elastic-training") or job.reschedules_pods:
        what = "a fault in the pod of rank 0 restarts the whole job: no pod, process or elastic recovery there"
        yield Match(job.replicas[0].pair.key if job.replicas else job.root, what, "Keep checkpoints for that case.")


@rule("fault-scheduling-off", "warning", "§9", "A strategy without fault-scheduling")
def fault_scheduling_off(job: Job) -> Iterator[Match]:
    """The pod is not created again."""
    if job.manages_processes and job.label("fault-scheduling") in (None, "off"):
        what = "recovery without fault-scheduling: a pod that is lost is not scheduled again"
        yield Match(job.at(*_LABELS, "fault-scheduling"), what, 'Add the label fault-scheduling: "grace".')


@rule("fault-scheduling-force", "warning", "§2", "force with a strategy that needs time")
def fault_scheduling_force(job: Job) -> Iterator[Match]:
    """grace deletes the pod gently first."""
    if job.label("fault-scheduling") == "force" and job.has("dump", "retry", "elastic-training"):
        what = "fault-scheduling force deletes pods at once, before they have saved"
        yield Match(job.at(*_LABELS, "fault-scheduling"), what, 'Write "grace".')


@rule("force-host-network", "error", "§2, §9", "force with hostNetwork")
def force_host_network(job: Job) -> Iterator[Match]:
    """MindCluster rules it out."""
    if job.label("fault-scheduling") == "force" and any(replica.host_network for replica in job.replicas):
        what = "fault-scheduling force does not go with hostNetwork (the documentation; some of its samples have it)"
        yield Match(job.at(*_LABELS, "fault-scheduling"), what, 'Write "grace".')


@rule("wait-timeout", "error", "§3, §9", "wait-reschedule-timeout is not a number from 30 to 270")
def wait_timeout(job: Job) -> Iterator[Match]:
    """Any other value falls back to 270."""
    found = job.annotation("wait-reschedule-timeout")
    if found is not None and not (found.isdecimal() and len(found) < 5 and 30 <= int(found) <= 270):
        what = f"wait-reschedule-timeout is {found!r}: 270 is taken instead"
        yield Match(job.at(*_ANNOTATIONS, "wait-reschedule-timeout"), what, 'Write "30" to "270" (seconds).')


@rule("wait-timeout-unused", "warning", "§3, §9", "wait-reschedule-timeout without recover")
def wait_timeout_unused(job: Job) -> Iterator[Match]:
    """Nothing reads it."""
    if job.annotation("wait-reschedule-timeout") is not None and not job.has("recover", "recover-in-place"):
        what = "wait-reschedule-timeout is read only with recover or recover-in-place"
        yield Match(job.at(*_ANNOTATIONS, "wait-reschedule-timeout"), what, "Remove it.")


@rule("recover-policy-path", "warning", "§3", "huawei.com/recover_policy_path has another value")
def recover_policy_path(job: Job) -> Iterator[Match]:
    """`pod`; Volcano reads it at the job (by the PodGroup) and at the pods."""
    name = "huawei.com/recover_policy_path"
    found = [("the job", job.root.get(*_ANNOTATIONS, name))]
    found += [(one.type, one.node.get("template", *_ANNOTATIONS, name)) for one in job.replicas]
    for where, node in found:
        if node is not None and node.text != "pod":
            yield Match(node, f"{name} is {node.text!r} in {where}: only pod is known", 'Write "pod", or remove it.')


@rule("platform-annotation", "warning", "§3", "An annotation that only a platform writes")
def platform_annotation(job: Job) -> Iterator[Match]:
    """Its presence changes ClusterD's mode."""
    for name in _PLATFORM:
        if job.annotation(name) is not None:
            what = f"{name} belongs on the PodGroup, and there it hands the decisions to an outside platform"
            yield Match(job.at(*_ANNOTATIONS, name), what, "Remove it.")


@rule("misplaced", "warning", "§2, §3", "A label or annotation of the job is in the wrong place")
def misplaced(job: Job) -> Iterator[Match]:
    """The operator and ClusterD read the job's own metadata only; Volcano knows the pods' labels, too."""
    other = {"labels": "annotations", "annotations": "labels"}
    for kind, names in _IN_JOB.items():
        here = {name for name in names if job.root.get("metadata", kind, name) is not None}
        places = [(f"metadata.{other[kind]}", job.root.get("metadata", other[kind])), (kind, job.root.get(kind))]
        places += [(f"spec.{kind}", job.root.get("spec", kind))]
        places += [(f"the pods of {one.type}", one.node.get("template", "metadata", kind)) for one in job.replicas]
        for where, node in places:
            for name in names:
                pair = node.pair(name) if node is not None else None
                if pair is not None and name not in here:
                    reader = "only Volcano" if kind == "labels" and where.startswith("the pods") else "nothing"
                    yield Match(pair.key, f"{name} is in {where}, where {reader} reads it",
                              f"Move it to metadata.{kind} of the job.")  # fmt: skip


@rule("label-differs", "error", "volcano", "A label of the pods differs from the job's")
def label_differs(job: Job) -> Iterator[Match]:
    """Volcano joins the two values with a bar, and the result is unknown to it."""
    for replica in job.replicas:
        for name in JOB_LABELS:
            here, pair = job.label(name), replica.label(name)
            if here is not None and pair is not None and pair.node.text != here:
                what = f"{replica.type}: {name} is {pair.node.text!r} on the pods, {here!r} on the job"
                fix = "Remove it from the pods' template, or write the same."
                yield Match(pair.key, f"{what}: Volcano takes it for '{here}|{pair.node.text}'", fix)
