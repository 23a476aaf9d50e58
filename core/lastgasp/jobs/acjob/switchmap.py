"""The ConfigMap that switches step marks of a job on and off (docs/facts/job_yaml.md §6, docs/facts/taskd.md §6)."""

from __future__ import annotations

import re

import msgspec

from lastgasp.errors import ConfigError
from lastgasp.steps import bits

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LONGEST = 253 - len("data-trace-")


def switch_configmap(job: str, namespace: str, mask: int) -> str:
    """The ConfigMap data-trace-<job> as YAML; the device plugin mirrors it to a file on each node.

    Args:
        job: the job's name.
        namespace: the job's; the ConfigMap must be there, too.
        mask: what is on (`lastgasp.steps.bits`).

    Raises:
        ConfigError: a name that Kubernetes does not allow.
    """
    _checked("job", job, _LONGEST)
    _checked("namespace", namespace, 63)
    switch = {key: "on" if mask & bit else "off" for key, bit in bits.TASKD.items()}
    taskd = "everything" if mask & bits.COMM else "all but collectives" if mask else "nothing"
    return f"""\
# On: {bits.describe(mask)}. TaskD itself has two switches only, and marks {taskd} with this.
apiVersion: v1
kind: ConfigMap
metadata:
  name: data-trace-{job}
  namespace: {namespace}
  labels:
    reset: "true"
data:
  profilingSwitch: '{msgspec.json.encode(switch).decode()}'
"""


def _checked(field: str, name: str, longest: int) -> None:
    if len(name) > longest or not _NAME.fullmatch(name):
        allowed = f"a Kubernetes name: at most {longest} small letters, digits, '-' and '.'"
        raise ConfigError(field, name, allowed, "Take metadata.name and metadata.namespace of the job.")
