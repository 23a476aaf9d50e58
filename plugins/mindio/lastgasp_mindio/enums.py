"""MindIO's enumerations (docs/facts/mindio_tft.md §3)."""

from __future__ import annotations

from enum import Enum


class Action(Enum):
    """What a rank does after a fault."""

    RETRY = 0
    EXIT = 1


class OptimizerType(Enum):
    """The index into what `tft_set_optimizer_replica` is given."""

    ATTENTION = 0
    MOE = 1


class ReportState(Enum):
    """What a rank reports about itself."""

    RS_NORMAL = 0
    RS_RETRY = 1
    RS_UCE = 2
    RS_UCE_CORRUPTED = 3
    RS_HCCL_FAILED = 4
    RS_INIT_FINISH = 5
    RS_PREREPAIR_FINISH = 6
    RS_STEP_FINISH = 7
    RS_UNKNOWN = 8


class RepairType(Enum):
    """What a repair handler is asked to do."""

    RT_SEND = 0
    RT_UCE_HIGHLEVEL = 1
    RT_UCE_LOWLEVEL = 2
    RT_RECV_REPAIR = 3
    RT_ROLLBACK = 4
    RT_LOAD_CKPT = 5
    RT_LOAD_REBUILD = 6
