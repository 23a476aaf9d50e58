"""Not served; importing it says why."""

raise ImportError(
    "TaskD's own client of ClusterD (taskd.python.toolkit) is not served by lastgasp-taskd: off Ascend there is no "
    "ClusterD (docs/taskd-drop-in.md)"
)
