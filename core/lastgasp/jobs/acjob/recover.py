"""Rules on what lastgasp needs for MindIO's `recover` and `elastic-training`, and on what it does not do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from lastgasp.gasp.secret import FILE, INSECURE, LONGEST, SHORTEST, TOKEN
from lastgasp.gasp.tls import CERT

from .model import Job, Mount, Replica
from .rules import Match, rule
from .tree import Node

_RECOVERY = "LASTGASP_RECOVERY"
_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_MEGATRON = re.compile(r"--framework[\s=\\'\"]+megatron(?![-\w])")
NOT_FEWER = re.compile(
    r"--(?:(?:(?:tensor|pipeline|expert)-model|context)-parallel-size[\s=\\'\"]+(?:[2-9]|[1-9][0-9])[0-9]*"
    r"|dataloader-type[\s=\\'\"]+(?!single(?![-\w]))\w+"
    r"|(?:use-distributed-optimizer|step-batch-size-schedule|rampup-batch-size|decrease-batch-size-if-needed"
    r"|data-parallel-random-init|full-validation|num-experts)(?![-\w]))"
)
"""Options of Megatron's with which lastgasp's adapter does not go on with fewer ranks (docs/megatron.md)."""


def _recovers(job: Job) -> bool:
    """Whether single processes are started anew, and lastgasp would take part. A hotSwitch is a `recover` to MindIO."""
    return job.framework == "pytorch" and (job.has("recover", "recover-in-place") or job.sub_healthy == "hotSwitch")


def _shrinks(job: Job) -> bool:
    """Whether the others go on without a lost rank, and lastgasp would take part."""
    return job.framework == "pytorch" and job.has("elastic-training")


def _pods(job: Job) -> int:
    return sum(one.count or 0 for one in job.replicas)


def _ascend(job: Job) -> Iterator[tuple[Replica, Node]]:
    return ((one, one.container) for one in job.replicas if one.container is not None and one.count != 0)


@rule("recover-secret", "warning", "lastgasp", "recover or elastic-training without a secret that the pods share")
def recover_secret(job: Job) -> Iterator[Match]:
    """Without it a new process cannot join lastgasp's controller. A start script, or an image, may set it as well."""
    if not (_recovers(job) or _shrinks(job)) or _pods(job) < 2:
        return
    if any(TOKEN in _words(one) for one in job.replicas):
        return
    for replica, node in _ascend(job):
        named = any(replica.variable(name) is not None for name in (TOKEN, FILE, CERT, INSECURE))
        if not named and node.get("envFrom") is None:
            lost = "replaced while the others stay" if _recovers(job) else "left out while the others train on"
            what = f"{replica.type}: neither {TOKEN} nor {FILE} is in env: with lastgasp a rank that is lost is then"
            fix = (
                "kubectl create secret generic lastgasp --from-literal=token=$(openssl rand -hex 32), and add name: "
                f"{TOKEN}, valueFrom.secretKeyRef: {{name: lastgasp, key: token}} to env of every replica type."
            )
            yield Match(node, f"{what} not {lost}; the step is saved and the job restarts", fix)


@rule("secret-value", "error", "lastgasp", "LASTGASP_TOKEN is no secret, or not the same in all pods")
def secret_value(job: Job) -> Iterator[Match]:
    """lastgasp refuses to start with such a one."""
    seen: tuple[str, str] | None = None
    for replica, _ in _ascend(job):
        env = replica.variable(TOKEN)
        if env is None or env.value is None or replica.variable(FILE) is not None or "$(" in env.value:
            continue
        if not (SHORTEST <= len(env.value) <= LONGEST and env.value.isprintable()):
            what = f"{replica.type}: {TOKEN} has {len(env.value)} characters, not {SHORTEST} to {LONGEST} printable"
            yield Match(env.node, f"{what} ones", "Make one with openssl rand -hex 32.")
        elif seen is not None and seen[1] != env.value:
            what = f"{TOKEN} differs between {seen[0]} and {replica.type}"
            yield Match(env.node, f"{what}: their ranks do not take each other in", "Write the same in both.")
        seen = seen or (replica.type, env.value)


@rule("secret-mode", "error", "lastgasp", "LASTGASP_TOKEN_FILE is readable by others")
def secret_mode(job: Job) -> Iterator[Match]:
    """lastgasp refuses such a file; Kubernetes mounts secrets with mode 0644 unless told otherwise."""
    for replica, _ in _ascend(job):
        env = replica.variable(FILE)
        if env is None or env.value is None:
            continue
        for mount in replica.mounts:
            mode = _mode_of(mount)
            if mode is not None and mode & 0o037 and PurePosixPath(env.value).is_relative_to(mount.path):
                what = f"{replica.type}: {FILE}={env.value} gets mode {mode:04o}, with which lastgasp does not take it"
                fix = "Add defaultMode: 0400 to the volume's secret (256 in JSON; 0440 where the user is not root)."
                yield Match(mount.node, what, fix)


def _mode_of(mount: Mount) -> int | None:
    """Of the files of a secret's volume; None for another volume, and where each file has its own."""
    secret = mount.volume.get("secret") if mount.volume is not None else None
    if secret is None or secret.kind != "map" or any(one.get("mode") for one in secret.maps("items")):
        return None
    text = secret.string("defaultMode")
    if text is None:
        return 0o644
    octal = re.fullmatch(r"0o?([0-7]{1,4})", text)
    if octal:
        return int(octal[1], 8)
    return int(text) if re.fullmatch(r"[0-9]{1,4}", text) else None


@rule("recover-one-pod", "warning", "mindio_tft §16", "recover in a job of one pod")
def recover_one_pod(job: Job) -> Iterator[Match]:
    """MindIO does not start a process anew on its controller's own node."""
    if _recovers(job) and _pods(job) == 1:
        named = next((one for one in ("recover", "recover-in-place") if job.has(one)), "")
        what = f"{named or 'hotSwitch'} in a job of one pod: MindIO replaces no process on the node of its controller"
        fix = "Use dump: the step is saved, and the job restarts from it."
        at = ("annotations", "recover-strategy") if named else ("labels", "subHealthyStrategy")
        yield Match(job.at("metadata", *at), what, fix)


@rule("recovery-setting", "warning", "lastgasp", "LASTGASP_RECOVERY rules out the strategy of the job")
def recovery_setting(job: Job) -> Iterator[Match]:
    """lastgasp refuses the strategy at start."""
    by_default = dict.fromkeys(("recover", "recover-in-place", "elastic-training"), ("", "auto"))
    allowed = {"retry": ("", "auto", "retry"), **by_default}
    for replica, _ in _ascend(job):
        env = replica.variable(_RECOVERY)
        if env is None or env.value is None or job.framework != "pytorch":
            continue
        refused = [one for one in job.strategies if one in allowed and env.value not in allowed[one]]
        if refused:
            what = f"{replica.type}: with {_RECOVERY}={env.value} lastgasp refuses {', '.join(refused)}"
            yield Match(env.node, what, 'Write "auto", or leave it out.')


@rule("recovery-unset", "warning", "lastgasp", "a strategy in place of Megatron's, which nobody asks lastgasp for")
def recovery_unset(job: Job) -> Iterator[Match]:
    """Its recovery in place is off by default. A start script, or an image, may set it as well."""
    asked_for = [one for one in job.strategies if one in ("retry", "recover", "recover-in-place", "elastic-training")]
    if job.framework != "pytorch" or not asked_for:
        return
    for replica, node in _ascend(job):
        words = _words(replica)
        asked = replica.variable(_RECOVERY) is not None or node.get("envFrom") is not None
        if _MEGATRON.search(words) and not (asked or _RECOVERY in words or "--lastgasp-recovery" in words):
            what = f"{replica.type}: Megatron, and neither {_RECOVERY} nor --lastgasp-recovery: lastgasp refuses"
            fix = f"Set {_RECOVERY}=auto for all, retry for retry alone; or name dump alone in recover-strategy."
            yield Match(node, f"{what} {', '.join(asked_for)}; the step is saved and the job restarts", fix)


@rule("elastic-megatron", "warning", "lastgasp", "elastic-training of Megatron with options that rule it out")
def elastic_megatron(job: Job) -> Iterator[Match]:
    """lastgasp refuses the strategy at start. Options in a start script, in an image or by a variable are not seen
    (`--tensor-model-parallel-size ${TP}`)."""
    if not _shrinks(job):
        return
    for replica, node in _ascend(job):
        words = _COMMENT.sub("", _words(replica))
        found = NOT_FEWER.search(words) if _MEGATRON.search(words) else None
        if found is not None:
            what = f"{replica.type}: Megatron with {' '.join(found[0].split())}: lastgasp refuses elastic-training"
            fix = "Name dump alone in recover-strategy, or train in plain data parallel without that option."
            yield Match(node, f"{what}; the step is saved and the job restarts", fix)


def _words(replica: Replica) -> str:
    return "\n".join(word.text for word in replica.script)


@rule("hot-switch-lastgasp", "warning", "lastgasp", "hotSwitch with lastgasp")
def hot_switch_lastgasp(job: Job) -> Iterator[Match]:
    """MindSpore takes part by itself."""
    if job.sub_healthy == "hotSwitch" and job.framework == "pytorch":
        what = (
            "hotSwitch: lastgasp was run through a switch to another node with loops (lastgasp.pytorch.train) and "
            "Lightning alone, on a stand-in of MindIO; one that fails ends the job, and MindX has nobody dump then"
        )
        fix = 'For all others write "graceExit" with dump: the step is saved, and the job restarts elsewhere.'
        yield Match(job.at("metadata", "labels", "subHealthyStrategy"), what, fix)
