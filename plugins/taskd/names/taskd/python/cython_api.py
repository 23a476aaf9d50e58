"""Not served; importing it says why."""

raise ImportError(
    "libtaskd.so (taskd.python.cython_api) is MindCluster's; lastgasp-taskd serves taskd.api without it "
    "(docs/taskd-drop-in.md)"
)
