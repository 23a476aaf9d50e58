"""Each rule on AscendJob files: found where it is broken, at its line, and not where it is kept."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from lastgasp.jobs.acjob.check import FAMILIES, check, source_of
from lastgasp.jobs.acjob.rules import RULES
from lastgasp.jobs.acjob.switchmap import switch_configmap
from support.acjob import bare, diagnoses, ready

assert FAMILIES


@dataclass(frozen=True)
class Case:
    """A rule, a good job, and what breaks it: texts to replace, the first place of each. `HERE` marks the line that
    the finding must name."""

    rule: str
    base: str
    swaps: tuple[tuple[str, str], ...]


def case(rule: str, base: str, *swaps: tuple[str, str]) -> Case:
    return Case(rule, base, swaps)


GRACE = '    fault-scheduling: "grace"\n'
RETRIES = GRACE + '    fault-retry-times: "3"\n'
DUMP, RECOVER = ready(), ready("recover", labels=RETRIES)
ELASTIC = ready("elastic-training").replace(
    '                  value: "8000"\n',
    '                  value: "8000"\n                - name: MINDIO_WAIT_MINDX_TIME\n                  value: "60"\n',
)
MINDSPORE = ready("dump", "mindspore")
FORCE = '    fault-scheduling: "force"\n'
LIMITED = ("  runPolicy:\n", "  runPolicy:\n    backoffLimit: 5\n")
STRATEGY = '    recover-strategy: "dump"'
TTP = '                - name: TTP_PORT\n                  value: "8000"\n'
TASKD = "                - containerPort: 9601\n                  name: taskd-port\n"
TTP_PORT = "                - containerPort: 8000\n                  name: ttp-port\n"
POD_IP = "                - name: POD_IP\n                  valueFrom:\n                    fieldRef:\n"
POD_IP += "                      fieldPath: status.podIP\n"
CONTAINER = "            - name: ascend   # do not change\n"
MARKED = "            - name: ascend   # HERE\n"
ARGS = 'args: ["cd /job/code && bash train_start.sh"]'
POD = "        spec:\n          containers:"
PODS_FORCE = '      template:\n        metadata: {labels: {fault-scheduling: "force"}} # HERE\n'
INIT = "initContainers: [{env: [{name: A, value: 1}]}]"
DATATRACE = "                - name: datatrace\n                  mountPath: /user/cluster-info/datatrace-config\n"
RESET = "                - name: reset\n                  mountPath: /user/restore/reset/config\n"
ENV = "              env:\n"
SECRET = "                - name: LASTGASP_TOKEN\n                  valueFrom:\n"
SECRET += "                    secretKeyRef: {name: lastgasp, key: token}\n"
SHORT = "                - name: LASTGASP_TOKEN # HERE\n                  value: hunter2\n"
SECRET_FILE = "                - name: LASTGASP_TOKEN_FILE\n                  value: /run/lastgasp/token\n"
SECRET_MOUNT = "                - name: code # HERE\n                  mountPath: /run/lastgasp\n"
CODE_MOUNT = "                - name: code\n                  mountPath: /job/code\n"
NFS = "              nfs:\n                server: 127.0.0.1\n                path: /data/code\n"


SWITCHED = switch_configmap("llama", "team", 1).replace("namespace: team", "namespace: team # map") + "---\n" + DUMP


def env(name: str, value: str) -> tuple[str, str]:
    """Swaps that put a variable first."""
    return ENV, f"{ENV}                - name: {name}   # HERE\n                  value: {value}\n"


CASES = [
    case("yaml-syntax", DUMP, ("metadata:\n", "metadata:\n\tname: x # HERE\n")),
    case("yaml-syntax", DUMP, ("kind: AscendJob", "kind: 'AscendJob")),
    case("yaml-not-mapping", DUMP, ("# A job of two pods.\n", "- a list # HERE\n---\n")),
    case("yaml-duplicate-key", DUMP, ("  name: llama\n", "  name: llama\n  name: llama # HERE\n")),
    case("value-string", DUMP, ('fault-scheduling: "grace"', "fault-scheduling: off # HERE")),
    case("value-string", DUMP, ('value: "8000"', "value: 8000 # HERE")),
    case("value-string", DUMP, ('recover-strategy: "dump"', "recover-strategy: Yes # HERE")),
    case("key-spelling", DUMP, ("fault-scheduling:", "fault-schedulin: # HERE\n     ")),
    case("key-spelling", DUMP, ("    schedulingPolicy:\n", "    schedulingPolicies: # HERE\n")),
    case("api-version", DUMP, ("mindxdl.gitee.com/v1", "batch/v1 # HERE")),
    case("job-name", DUMP, ("metadata:\n  name: llama\n", "metadata: # HERE\n")),
    case("value-string", DUMP, ('recover-strategy: "dump"', "recover-strategy: [dump] # HERE")),
    case("value-string", DUMP, (POD, POD.replace("containers:", f"{INIT} # HERE\n          containers:"))),
    case("value-bool", DUMP, (POD, POD.replace("containers:", 'hostNetwork: "true" # HERE\n          containers:'))),
    case("scheduler-name", DUMP, ("  schedulerName: volcano\n", "  schedulerName: default-scheduler # HERE\n")),
    case("scheduler-name", DUMP, ("spec:\n  schedulerName: volcano\n", "spec: # HERE\n")),
    case("no-npu", DUMP, ("huawei.com/Ascend910: 8", "huawei.com/Ascend910: 0 # HERE")),
    case("key-spelling", DUMP, ("  annotations:\n", "  annotation: # HERE\n")),
    case(
        "other-kind", DUMP, ("# A job of two pods.\n", "apiVersion: batch.volcano.sh/v1alpha1 # HERE\nkind: Job\n---\n")
    ),
    case("value-number", DUMP, ("replicas: 1", 'replicas: "1" # HERE')),
    case("value-number", DUMP, ("minAvailable: 2", "minAvailable: '2' # HERE")),
    case("value-number", DUMP, ("containerPort: 9601", 'containerPort: "9601" # HERE')),
    case("framework", DUMP, ("framework: pytorch  ", "framework: torch # HERE ")),
    case("framework", DUMP, ("    framework: pytorch   #", "    # "), ("  labels:\n", "  labels: # HERE\n")),
    case("replica-specs", DUMP, ("  replicaSpecs:\n", "  replicaSpecs: {} # HERE\n  other:\n")),
    case("replica-specs", DUMP, ("    Worker:\n", "    Worker: # HERE\n    Other:\n")),
    case("replica-type", DUMP, ("    Master:\n", "    Scheduler: # HERE\n")),
    case("replica-type", MINDSPORE, ("    Scheduler:\n", "    Master: # HERE\n")),
    case("replica-type", ready("dump", "tensorflow"), ("    Chief:\n", "    PS: # HERE\n")),
    case("replicas", DUMP, ("    Worker:\n      replicas: 1", "    Worker:\n      replicas: 20001 # HERE")),
    case("replicas", DUMP, ("    Worker:\n      replicas: 1", "    Worker:\n      replicas: many # HERE")),
    case(
        "replicas",
        DUMP,
        ("    Worker:\n      replicas: 1", "    Worker:\n      replicas: {{ .Values.workers }} # HERE"),
    ),
    case("leader-replicas", DUMP, ("    Master:\n      replicas: 1", "    Master:\n      replicas: 2 # HERE")),
    case(
        "leader-missing", DUMP, ("    Master:\n", "    Worker2:\n"), ("  replicaSpecs:\n", "  replicaSpecs: # HERE\n")
    ),
    case("container-ascend", DUMP, ("    Master:\n", "    Master: # HERE\n"), ("- name: ascend ", "- name: main ")),
    case("container-image", DUMP, (CONTAINER, MARKED), ("image: team/train:1", 'image: ""')),
    case("success-policy", DUMP, ("successPolicy: AllWorkers", "successPolicy: Any # HERE")),
    case("queue", DUMP, ("    schedulingPolicy:\n", "    schedulingPolicy: # HERE\n"), ("      queue: default\n", "")),
    case("fault-scheduling", DUMP, (GRACE, '    fault-scheduling: "soft" # HERE\n')),
    case("pod-rescheduling", DUMP, (GRACE, f'{GRACE}    pod-rescheduling: "yes" # HERE\n')),
    case("retry-times", DUMP, (GRACE, f'{GRACE}    fault-retry-times: "0" # HERE\n')),
    case("retry-times", DUMP, (GRACE, f'{GRACE}    fault-retry-times: "some" # HERE\n'), LIMITED),
    case("retry-times", DUMP, (GRACE, f'{GRACE}    fault-retry-times: "３" # HERE\n'), LIMITED),
    case("retry-times-number", DUMP, (GRACE, f'{GRACE}    fault-retry-times: "some" # HERE\n')),
    case("retry-times-limit", DUMP, (GRACE, f'{GRACE}    fault-retry-times: "3" # HERE\n')),
    case("retry-times-missing", RECOVER, (RETRIES, GRACE), ('"recover"', '"recover" # HERE')),
    case("process-recover-enable", DUMP, (GRACE, f'{GRACE}    process-recover-enable: "on" # HERE\n')),
    case("sub-healthy", DUMP, (GRACE, f"{GRACE}    subHealthyStrategy: leave # HERE\n")),
    case("grace-exit-dump", RECOVER, (RETRIES, f"{RETRIES}    subHealthyStrategy: graceExit # HERE\n")),
    case("hot-switch-spare", DUMP, (GRACE, f"{GRACE}    subHealthyStrategy: hotSwitch # HERE\n")),
    case("strategy-empty", DUMP, ('recover-strategy: "dump"', 'recover-strategy: "" # HERE')),
    case("strategy-empty", DUMP, ('recover-strategy: "dump"', "recover-strategy: # HERE")),
    case("strategy-space", DUMP, ('recover-strategy: "dump"', 'recover-strategy: "dump, retry" # HERE')),
    case("strategy-unknown", DUMP, ('recover-strategy: "dump"', 'recover-strategy: "dump,save" # HERE')),
    case("strategy-exit", DUMP, ('recover-strategy: "dump"', 'recover-strategy: "dump,exit" # HERE')),
    case("elastic-mindspore", MINDSPORE, ('y: "dump"', 'y: "elastic-training" # HERE')),
    case("strategy-tensorflow", bare("tensorflow"), ("\nspec:", f"  annotations:\n{STRATEGY} # HERE\nspec:")),
    case("dump-not-first", DUMP, ('y: "dump"', 'y: "retry,dump" # HERE')),
    case("rank-0-pod", DUMP, ('y: "dump"', 'y: "recover"'), ("    Master:\n", "    Master: # HERE\n")),
    case("fault-scheduling-off", DUMP, (GRACE, '    fault-scheduling: "off" # HERE\n')),
    case("fault-scheduling-off", DUMP, (GRACE, ""), ("  labels:\n", "  labels: # HERE\n")),
    case("fault-scheduling-force", DUMP, (GRACE, FORCE.replace("\n", " # HERE\n"))),
    case(
        "force-host-network",
        RECOVER,
        (GRACE, FORCE.replace("\n", " # HERE\n")),
        (POD, "        spec:\n          hostNetwork: true\n          containers:"),
    ),
    case("wait-timeout", RECOVER, ("  annotations:\n", '  annotations:\n    wait-reschedule-timeout: "20" # HERE\n')),
    case("wait-timeout", RECOVER, ("  annotations:\n", '  annotations:\n    wait-reschedule-timeout: "5m" # HERE\n')),
    case(
        "wait-timeout-unused", DUMP, ("  annotations:\n", '  annotations:\n    wait-reschedule-timeout: "270" # HERE\n')
    ),
    case(
        "recover-policy-path",
        DUMP,
        ("  annotations:\n", '  annotations:\n    huawei.com/recover_policy_path: "node" # HERE\n'),
    ),
    case("label-differs", DUMP, ("      template:\n", PODS_FORCE)),
    case(
        "recover-policy-path",
        DUMP,
        (
            "      template:\n",
            "      template:\n        metadata:\n          annotations:\n"
            '            huawei.com/recover_policy_path: "job" # HERE\n',
        ),
    ),
    case(
        "platform-annotation", DUMP, ("  annotations:\n", '  annotations:\n    ProcessRecoverStrategy: "dump" # HERE\n')
    ),
    case(
        "misplaced",
        bare(),
        ("\nspec:", f"\nspec: # {STRATEGY}"),
        ("    ring-controller.atlas: ascend-910b\n", f"{STRATEGY} # HERE\n"),
    ),
    case(
        "misplaced",
        bare(),
        (
            "      template:\n",
            '      template:\n        metadata:\n          labels:\n            fault-scheduling: "grace" # HERE\n',
        ),
    ),
    case("misplaced", bare(), ("\nspec:\n", f"\nspec:\n  annotations:\n{STRATEGY} # HERE\n")),
    case("pod-ip-missing", DUMP, (POD_IP, ""), (CONTAINER, MARKED)),
    case("pod-ip-source", DUMP, ("- name: POD_IP\n", "- name: POD_IP # HERE\n"), ("status.podIP", "status.hostIP")),
    case("xdl-ip-source", DUMP, ("- name: XDL_IP\n", "- name: XDL_IP # HERE\n"), ("status.hostIP", "status.podIP")),
    case(
        "visible-devices",
        DUMP,
        (
            ENV,
            f"{ENV}                - name: ASCEND_VISIBLE_DEVICES # HERE\n"
            "                  valueFrom: {fieldRef: {fieldPath: \"metadata.annotations['huawei.com/npu']\"}}\n",
        ),
    ),
    case("ttp-port-missing", DUMP, (TTP, ""), (CONTAINER, MARKED)),
    case("ttp-port", DUMP, (TTP, TTP.replace("PORT\n", "PORT # HERE\n").replace("8000", "80"))),
    case("ttp-port-differs", DUMP, (TTP, TTP.replace("8000", "8001")), (TTP, TTP.replace("PORT\n", "PORT # HERE\n"))),
    case("ttp-port-container", DUMP, (TTP_PORT, TTP_PORT.replace("8000", "8001 # HERE"))),
    case("ttp-port-container", DUMP, (TTP_PORT, ""), (CONTAINER, MARKED)),
    case("taskd-port", DUMP, (TASKD, ""), (CONTAINER, MARKED)),
    case("taskd-port", DUMP, (TASKD, TASKD.replace("9601", "9602 # HERE"))),
    case(
        "taskd-port-pods",
        DUMP,
        (TASKD, ""),
        (CONTAINER, MARKED),
        ('y: "dump"', 'y2: "x"'),
        (GRACE, f'{GRACE}    pod-rescheduling: "on"\n'),
    ),
    case("port-repeated", DUMP, (TTP_PORT, TTP_PORT + TTP_PORT.replace("8000", "8000 # HERE").replace("ttp", "x"))),
    case("port-repeated", DUMP, (TASKD, TASKD + TASKD.replace("9601", '"9601" # HERE').replace("taskd", "x"))),
    case("port-repeated", DUMP, (TTP_PORT, TTP_PORT + TTP_PORT.replace("8000", "8081 # HERE"))),
    case("port-name", DUMP, (TTP_PORT, TTP_PORT + "                - containerPort: 8081 # HERE\n")),
    case("host-network-ports", DUMP, (POD, "        spec:\n          hostNetwork: true # HERE\n          containers:")),
    case(
        "host-network-hccl",
        DUMP,
        (CONTAINER, MARKED),
        (POD, POD.replace("containers:", "hostNetwork: true\n          containers:")),
    ),
    case("mindx-wait-range", ELASTIC, ("NDX_TIME\n", "NDX_TIME # HERE\n"), ('value: "60"', 'value: "3601"')),
    case("mindx-wait-clusterd", ELASTIC, ("NDX_TIME\n", "NDX_TIME # HERE\n"), ('value: "60"', 'value: "9"')),
    case("mindx-wait-short", ELASTIC, ("NDX_TIME\n", "NDX_TIME # HERE\n"), ('value: "60"', 'value: "59"')),
    case("mindx-wait-short", ELASTIC, ("MINDIO_WAIT_MINDX_TIME", "OTHER"), (CONTAINER, MARKED)),
    case(
        "mindx-wait-short",
        ELASTIC,
        ("MINDIO_WAIT_MINDX_TIME", "OTHER"),
        (CONTAINER, MARKED),
        ('y: "elastic-training"', 'y: "recover-in-place,elastic-training"'),
    ),
    case("operator-env", DUMP, env("HIGH_AVAILABILITY", "dump")),
    case("operator-env", bare(), env("MINDX_TASK_ID", "x")),
    case("hccl-watchdog", DUMP, env("HCCL_ASYNC_ERROR_HANDLING", '"1"')),
    case("hccl-watchdog", MINDSPORE, env("MS_ENABLE_THM", '"{HCCL_WATCHDOG:1}"')),
    case("hccl-watchdog", DUMP, (ARGS, 'args: ["export HCCL_ASYNC_ERROR_HANDLING=1; sh x"] # HERE')),
    case("env-repeated", DUMP, env("XDL_NAME", "x"), (ENV, f"{ENV}                - name: XDL_NAME\n")),
    case("taskd-process-off", DUMP, env("TASKD_PROCESS_ENABLE", '"off"')),
    case("taskd-process-off", ELASTIC, (ARGS, 'args: ["export TASKD_PROCESS_ENABLE=off; sh x"] # HERE')),
    case("reset-process", bare(), (ARGS, 'args: ["sh x & python reset_process.py -p $!"] # HERE')),
    case("reset-process-conflict", DUMP, (ARGS, 'args: ["sh x & python reset_process.py -p $!"] # HERE')),
    case(
        "datatrace-volume",
        DUMP,
        (DATATRACE, DATATRACE.replace("trace\n", "trace # HERE\n", 1)),
        ("- name: datatrace\n              hostPath:", "- name: datatrace\n              configMap:"),
    ),
    case(
        "datatrace-path",
        DUMP,
        (
            "            - name: datatrace\n              hostPath",
            "            - name: datatrace # HERE\n              hostPath",
        ),
        ("/team.data-trace-llama", "/a.data-trace-b"),
    ),
    case(
        "datatrace-mount-path",
        DUMP,
        (
            DATATRACE,
            "                - name: datatrace # HERE\n"
            "                  mountPath: /user/cluster-info/datatrace-config/\n",
        ),
    ),
    case("datatrace-partial", DUMP, (DATATRACE, ""), ("    Master:\n", "    Master: # HERE\n")),
    *(
        case("switch-configmap", SWITCHED, ("  name: llama\n", "  name: llama   # HERE\n"), swap)
        for swap in (
            ('reset: "true"', 'reset: "yes"'),
            ("namespace: team # map", "namespace: other"),
            ('"Step"', '"step"'),
            ('"CommunicationOperator"', '"Communication"'),
            ('"off"', "false"),
            ("profilingSwitch:", "switch:"),
        )
    ),
    case(
        "profiling-read-only",
        DUMP,
        (
            "                - name: profiling\n",
            "                - name: profiling # HERE\n                  readOnly: true\n",
        ),
    ),
    case("reset-mount-missing", DUMP, (RESET, ""), (CONTAINER, MARKED)),
    case(
        "reset-path",
        DUMP,
        (
            "            - name: reset\n              hostPath",
            "            - name: reset # HERE\n              hostPath",
        ),
        ("/team.reset-config-llama", "/a.b"),
    ),
    case(
        "rank-table-configmap",
        DUMP,
        (
            "            - name: datatrace\n              hostPath:",
            "            - name: table # HERE\n              configMap: {name: rings-config-llama}\n"
            "            - name: datatrace\n              hostPath:",
        ),
    ),
    case("restart-policy", RECOVER, ("restartPolicy: Never", "restartPolicy: OnFailure # HERE")),
    case("backoff-limit", RECOVER, ("  runPolicy:\n", "  runPolicy:\n    backoffLimit: 2 # HERE\n")),
    case("min-available-high", DUMP, ("minAvailable: 2", "minAvailable: 3 # HERE")),
    case("min-available-low", DUMP, ("minAvailable: 2", "minAvailable: 1 # HERE")),
    case(
        "grace-period",
        DUMP,
        (POD, POD.replace("containers", "terminationGracePeriodSeconds: 900 # HERE\n          containers")),
    ),
    case(
        "grace-period-unused",
        bare(),
        (POD, POD.replace("containers", "terminationGracePeriodSeconds: 60 # HERE\n          containers")),
    ),
    case(
        "resources",
        DUMP,
        (
            "                limits:\n                  huawei.com/Ascend910: 8",
            "                limits: # HERE\n                  huawei.com/Ascend910: 4",
        ),
    ),
    case("recover-secret", RECOVER, (SECRET, ""), (CONTAINER, MARKED)),
    case("recover-secret", ELASTIC, (SECRET, ""), (CONTAINER, MARKED)),
    case("secret-value", RECOVER, (SECRET, SHORT)),
    case(
        "secret-mode",
        RECOVER,
        (SECRET, SECRET_FILE),
        (CODE_MOUNT, SECRET_MOUNT),
        (NFS, "              secret: {secretName: lastgasp}\n"),
    ),
    case(
        "recover-one-pod",
        RECOVER,
        ('"recover"', '"recover" # HERE'),
        ("    Worker:\n      replicas: 1", "    Worker:\n      replicas: 0"),
    ),
    case(
        "recovery-setting",
        RECOVER,
        (ENV, f"{ENV}                - {{name: LASTGASP_RECOVERY, value: save}} # HERE\n"),
    ),
    case(
        "recovery-unset",
        RECOVER,
        (ARGS, 'args: ["lastgasp run --framework megatron pretrain_gpt.py"]'),
        (CONTAINER, MARKED),
    ),
    case(
        "recovery-unset",
        ELASTIC,
        (ARGS, 'args: ["lastgasp run --framework megatron pretrain_gpt.py"]'),
        (CONTAINER, MARKED),
    ),
    case(
        "elastic-megatron",
        ELASTIC,
        (ARGS, 'args: ["lastgasp run --framework megatron pretrain_gpt.py --use-distributed-optimizer"]'),
        (CONTAINER, MARKED),
    ),
    case(
        "elastic-megatron",
        ELASTIC,
        (ARGS, 'args: ["lastgasp", "run", "--framework=megatron", "p.py", "--tensor-model-parallel-size", "8"]'),
        (CONTAINER, MARKED),
    ),
    case("hot-switch-lastgasp", DUMP, (GRACE, f"{GRACE}    subHealthyStrategy: hotSwitch # HERE\n")),
    case(
        "device-plugin-hot-reset",
        RECOVER,
        ('"recover"', '"recover" # HERE'),
        (
            "# A job of two pods.\n",
            "kind: DaemonSet\nmetadata: {name: plugin}\nspec: {args: ['device-plugin -hotReset=1']}\n---\n",
        ),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_is_found_where_it_is_broken_and_only_there(case: Case) -> None:
    assert case.rule not in {one.rule for one in diagnoses(case.base)}
    broken = case.base
    for old, new in case.swaps:
        assert old in broken, old
        broken = broken.replace(old, new, 1)
    found = [one for one in diagnoses(broken) if one.rule == case.rule]
    assert found, [one.rule for one in diagnoses(broken)]
    assert {one.severity for one in found} == {RULES[case.rule].severity}
    assert all(one.what and re.search(r"[.?]$", one.fix) for one in found)
    if "HERE" in broken:
        assert broken[: broken.index("HERE")].count("\n") + 1 in [one.line for one in found]


def test_every_rule_has_a_case() -> None:
    assert {one.rule for one in CASES} == set(RULES)


@pytest.mark.parametrize("text", [bare(), bare("mindspore"), bare("tensorflow"), DUMP, MINDSPORE, ready("retry")])
def test_good_jobs_have_no_findings(text: str) -> None:
    assert diagnoses(text) == []


@pytest.mark.parametrize("text", [RECOVER.replace(*LIMITED), ELASTIC])
def test_what_no_edit_can_remove_is_a_warning(text: str) -> None:
    assert {one.rule for one in diagnoses(text)} == {"rank-0-pod"}


def test_mindspore_on_one_npu_needs_no_scheduler() -> None:
    text = bare("mindspore")
    begin, end = text.index("    Scheduler:"), text.index("    Worker:")
    alone = (
        (text[:begin] + text[end:])
        .replace("Ascend910: 8", "Ascend910: 1")
        .replace("minAvailable: 2", "minAvailable: 1")
    )
    assert diagnoses(alone) == []
    two = alone.replace("Ascend910: 1", "Ascend910: 2")
    assert [one.rule for one in diagnoses(two)] == ["leader-missing"]


@pytest.mark.parametrize(
    "swap",
    [
        ("name: taskd-port", "name: mine"),  # TaskD takes the number; nobody reads the name
        ("name: ttp-port", "name: http"),
        ("      restartPolicy: Never\n", ""),  # the operator's default
        ("backoffLimit: 5", "backoffLimit: 0"),
        ("      template:\n", PODS_FORCE.replace("force", "grace")),
        ("  annotations:\n", '  annotations:\n    huawei.com/recover_policy_path: "pod"\n'),
        ("framework: pytorch   #", "framework: pytorch\t#"),
    ],
)
def test_what_the_cluster_takes_is_no_finding(swap: tuple[str, str]) -> None:
    base = ready("dump", labels=RETRIES.replace('"3"', '"5"')).replace(*LIMITED)
    text = base.replace(*swap)
    assert diagnoses(text) == []


def test_one_number_may_stand_for_two_protocols() -> None:
    other = "                - {containerPort: 9601, protocol: UDP, name: other}\n"
    assert diagnoses(DUMP.replace(TASKD, TASKD + other)) == []


def test_a_value_from_a_configmap_is_not_judged() -> None:
    taken = "                  valueFrom: {configMapKeyRef: {name: c, key: k}}\n"
    assert diagnoses(DUMP.replace('                  value: "8000"\n', taken)) == []


def test_the_device_plugin_may_be_in_another_file() -> None:
    job = source_of(Path("job.yaml"), RECOVER.encode())
    plugin = "kind: DaemonSet\nmetadata: {name: plugin}\nspec: {args: [-hotReset=1]}\n"
    found = check([job, source_of(Path("plugin.yaml"), plugin.encode())])
    rules = {"device-plugin-hot-reset", "rank-0-pod", "retry-times-limit"}
    assert {one.rule for one in found[Path("job.yaml")]} == rules
    assert found[Path("plugin.yaml")] == []


def test_plain_booleans_of_yaml_1_1_are_seen_in_every_spelling() -> None:
    for word in ("on", "Off", "YES", "no", "true", "False", "y"):
        text = DUMP.replace('fault-scheduling: "grace"', f"fault-scheduling: {word}")
        assert "value-string" in {one.rule for one in diagnoses(text)}, word
    assert "value-string" not in {one.rule for one in diagnoses(DUMP.replace('"grace"', "grace"))}


@pytest.mark.parametrize("mode", ["0400", "0440", "256", "0o400"])
def test_a_secret_that_its_owner_alone_reads_is_taken(mode: str) -> None:
    text = RECOVER.replace(SECRET, SECRET_FILE).replace(CODE_MOUNT, SECRET_MOUNT)
    text = text.replace(NFS, f"              secret: {{secretName: lastgasp, defaultMode: {mode}}}\n")
    assert {one.rule for one in diagnoses(text)} == {"rank-0-pod", "retry-times-limit"}


@pytest.mark.parametrize(
    "swap",
    [
        (SECRET, "                - {name: LASTGASP_INSECURE, value: '1'}\n"),
        (f"{SECRET}", ""),  # whoever starts it in a script has it there
    ],
)
def test_a_secret_may_come_from_elsewhere(swap: tuple[str, str]) -> None:
    text = RECOVER.replace(*swap).replace("cd /job/code", "cd /job/code; export LASTGASP_TOKEN=$(cat /code/token)")
    assert "recover-secret" not in {one.rule for one in diagnoses(text)}


def test_two_secrets_are_none() -> None:
    long = SHORT.replace(" # HERE", "").replace("hunter2", "{}" + 31 * "7")
    text = RECOVER.replace(SECRET, long.format("a"), 1).replace(SECRET, long.format("b"), 1)
    [found] = [one for one in diagnoses(text) if one.rule == "secret-value"]
    assert "differs between Master and Worker" in found.what and "777" not in found.what
