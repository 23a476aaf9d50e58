"""`mindio_ttp` itself: imported late, once the environment is set; checked for what is used of it."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

from lastgasp.errors import ConfigError

NAMES = (
    "tft_destroy_processor", "tft_end_updating_os", "tft_init_processor", "tft_is_reboot_node", "tft_pause_train",
    "tft_report_error", "tft_set_optimizer_replica", "tft_start_processor", "tft_start_updating_os",
    "tft_wait_next_action", "ReportState", "Action",
)  # fmt: skip
HANDLERS = (
    "save_ckpt", "rename", "exit", "stop", "clean", "repair", "rollback", "rebuild_group", "stream_sync",
    "zit_downgrade_rebuild", "zit_upgrade_rebuild", "zit_upgrade_repair", "zit_upgrade_rollback",
)  # fmt: skip
LOADS = (5, 6)
"""RT_LOAD_CKPT, RT_LOAD_REBUILD (docs/facts/mindio_tft.md §3)."""


def for_mindspore() -> bool:
    """Whether this process uses its MindSpore mode (`MINDIO_FOR_MINDSPORE`)."""
    return os.environ.get("MINDIO_FOR_MINDSPORE", "").lower() in ("true", "1")


def load() -> Any:
    """The processor's half. In torch mode this patches torchelastic (docs/facts/mindio_tft.md §1).

    Raises:
        ConfigError: it cannot be imported, or lacks what is used of it: another version; names each thing.
    """
    module = _import("mindio_ttp.framework_ttp")
    names = (*NAMES, *(f"tft_register_{name}_handler" for name in HANDLERS))
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise ConfigError(
            "mindio_ttp", getattr(module, "__file__", "?"), f"a version with {', '.join(missing)}",
            "Install the wheel of MindCluster 7.3, or set LASTGASP_BACKEND=embedded.",
        )  # fmt: skip
    return module


def hidden(module: Any, name: str) -> Any:
    """A function that the package has and does not export (docs/facts/mindio_tft.md §2.2); None where it has not."""
    if hasattr(module, name):
        return getattr(module, name)
    try:
        inner = importlib.import_module(f"{module.__name__}.ttp_decorator")
    except ImportError:
        return None
    return getattr(inner, name, None)


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, SystemExit) as error:  # OSError: its library cannot be loaded
        raise ConfigError(
            "mindio_ttp", f"{type(error).__name__}: {error}", f"that {name} can be imported",
            "It needs torch_npu, or mindspore and MINDIO_FOR_MINDSPORE=1; or set LASTGASP_BACKEND=embedded.",
        ) from error  # fmt: skip
