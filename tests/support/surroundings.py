"""Who runs the tests, and from where, must not matter: variables of other jobs and of a terminal are taken away.

A merge gate's machine may run them inside of a job of Slurm's, of torchrun's or of lastgasp's own, behind a proxy, with
colours asked for.
"""

from __future__ import annotations

from collections.abc import MutableMapping

BEGINNINGS = (
    "LASTGASP", "TORCHELASTIC_", "PET_", "ROLE_", "GROUP_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "JSM_", "LSB_", "PL_",
    "ACCELERATE_", "MS_", "MINDIO_", "MINDX_", "TASKD_", "TTP_", "GIT_",
)  # fmt: skip
NAMES = frozenset({
    "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "POD_IP",
    "PROCESS_RECOVER", "RANK_TABLE_FILE", "RANK_ID", "RANK_SIZE", "DEVICE_ID", "XDG_RUNTIME_DIR",
    "http_proxy", "https_proxy", "all_proxy", "ftp_proxy",
    "FORCE_COLOR", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES",
})  # fmt: skip
KEPT = ("LASTGASP_WARM", "LASTGASP_PURE_PYTHON")
"""What whoever runs the tests may set."""


def scrub(environ: MutableMapping[str, str]) -> None:
    """Delete what belongs to other jobs, proxies and terminals."""
    for name in list(environ):
        known = name in NAMES or name.lower() in NAMES or name.startswith(BEGINNINGS)
        if known and name not in KEPT:
            del environ[name]
