"""AscendJob files for tests: complete ones in which no rule finds anything, for each framework."""

from __future__ import annotations

from pathlib import Path

from lastgasp.jobs.acjob.check import Diagnosis, check_source, source_of
from lastgasp.jobs.acjob.model import LEADERS

NAME = Path("job.yaml")
_HEAD = """\
# A job of two pods.
apiVersion: mindxdl.gitee.com/v1
kind: AscendJob
metadata:
  name: llama
  namespace: team
  labels:
    framework: {framework}   # pytorch, mindspore or tensorflow
    ring-controller.atlas: ascend-910b
{labels}{annotations}
spec:
  schedulerName: volcano
  runPolicy:
    schedulingPolicy:
      minAvailable: 2
      queue: default
  successPolicy: AllWorkers
  replicaSpecs:
"""
_REPLICA = """\
    {type}:
      replicas: 1
      restartPolicy: Never
      template:
        spec:
          containers:
            - name: ascend   # do not change
              image: team/train:1
              env:
                - name: XDL_IP
                  valueFrom:
                    fieldRef:
                      fieldPath: status.hostIP
{env}\
              command: [/bin/bash, -c]
              args: ["cd /job/code && bash train_start.sh"]
              ports:
                - containerPort: 2222
                  name: ascendjob-port
{ports}\
              resources:
                limits:
                  huawei.com/Ascend910: 8
                requests:
                  huawei.com/Ascend910: 8
              volumeMounts:
                - name: code
                  mountPath: /job/code
{mounts}\
          volumes:
            - name: code
              nfs:
                server: 127.0.0.1
                path: /data/code
{volumes}\
"""
_ENV = """\
                - name: POD_IP
                  valueFrom:
                    fieldRef:
                      fieldPath: status.podIP
                - name: TTP_PORT
                  value: "8000"
"""
_SECRET = """\
                - name: LASTGASP_TOKEN
                  valueFrom:
                    secretKeyRef: {name: lastgasp, key: token}
"""
_PORTS = """\
                - containerPort: 9601
                  name: taskd-port
                - containerPort: 8000
                  name: ttp-port
"""
_MOUNTS = """\
                - name: reset
                  mountPath: /user/restore/reset/config
                - name: datatrace
                  mountPath: /user/cluster-info/datatrace-config
                - name: profiling
                  mountPath: /user/cluster-info/profiling
"""
_VOLUMES = """\
            - name: reset
              hostPath:
                path: /user/restore/reset/team.reset-config-llama
            - name: datatrace
              hostPath:
                path: /user/cluster-info/datatrace-config/team.data-trace-llama
            - name: profiling
              hostPath:
                path: /data/profiling/llama
"""


def bare(framework: str = "pytorch") -> str:
    """A job without any recovery."""
    head = _HEAD.format(framework=framework, labels="", annotations="")
    fields = {"env": "", "ports": "", "mounts": "", "volumes": ""}
    return head + "".join(_REPLICA.format(type=one, **fields) for one in (LEADERS[framework], "Worker"))


def ready(strategy: str = "dump", framework: str = "pytorch", labels: str = '    fault-scheduling: "grace"\n') -> str:
    """A job with everything that a strategy needs."""
    annotations = f'  annotations:\n    recover-strategy: "{strategy}"'
    head = _HEAD.format(framework=framework, labels=labels, annotations=annotations)
    env = _ENV + (_SECRET if "recover" in strategy or "elastic" in strategy else "")
    fields = {"env": env, "ports": _PORTS, "mounts": _MOUNTS, "volumes": _VOLUMES}
    return head + "".join(_REPLICA.format(type=one, **fields) for one in (LEADERS[framework], "Worker"))


def diagnoses(text: str) -> list[Diagnosis]:
    """What the rules say."""
    return check_source(source_of(NAME, text.encode()))
