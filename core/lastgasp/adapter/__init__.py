"""The public seam: what an adapter of a framework is built on (docs/writing-an-adapter.md).

Imports no framework. By subject: `adapter.arenas`, `adapter.checkpoint`, `adapter.files`, `adapter.marks`,
`adapter.torch`, `adapter.mindspore`, `adapter.testing`.
"""

from __future__ import annotations

from lastgasp import _clock as clock
from lastgasp.adapter.hooks import Around, Hook, HookNotPlaced, Hooks, Undo, argument, arguments_of, replace_attribute
from lastgasp.adapter.manifests import NativeManifests, NativeSave
from lastgasp.adapter.policy import SelectionPolicy
from lastgasp.adapter.preload import Preload
from lastgasp.adapter.recovery import recovery_here
from lastgasp.adapter.run import AdapterRun, Framework, Training
from lastgasp.adapter.selection import CheckpointSelector
from lastgasp.backends import BackendChoice, choose_backend
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.config import (
    GaspConfig,
    HangTimeout,
    asked_recovery,
    check_writable,
    flag,
    integer,
    pick,
    recovery_of,
    refuse_unknown,
)
from lastgasp.connect import FromRank0, contact_of, place_in_job
from lastgasp.crash_safe_buffer import CrashSafeBuffer
from lastgasp.errors import (
    CheckpointError,
    CheckpointMismatch,
    ConfigError,
    ControlError,
    DamagedCheckpoint,
    DeadlineExceeded,
    LastgaspError,
    MissingExtra,
    Moved,
    NoGoodCheckpoint,
    NothingLoads,
    NotSaveable,
    UsageError,
    grouped,
)
from lastgasp.events import FaultKind
from lastgasp.exception_origin import cause_of, is_success, kind_by
from lastgasp.fits import FITS
from lastgasp.gasp.messages import Release
from lastgasp.gasp.rank_status import RankStatus, Released
from lastgasp.launch.framework_verdict import Verdict
from lastgasp.launch.script import run_script
from lastgasp.options import NAMES as OPTION_NAMES
from lastgasp.options import Options, switched
from lastgasp.ports import Contributor, Gather, GoesOnWithFewer, InPlace, Layout, SaveResult, SavesTogether, StateSource
from lastgasp.rankzero import RankZero
from lastgasp.replicas import Digests, require_alike
from lastgasp.session import Contact, Session, launched, leave
from lastgasp.sharing import number_on_host
from lastgasp.startup_refusal import tell_launcher
from lastgasp.steps.settings import MarksConfig
from lastgasp.topology import Place, ReplicaGroups, data_parallel

__all__ = [
    "FITS",
    "OPTION_NAMES",
    "AdapterRun",
    "Around",
    "BackendChoice",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointSelector",
    "ConfigError",
    "Contact",
    "Contributor",
    "ControlError",
    "CrashSafeBuffer",
    "DamagedCheckpoint",
    "DeadlineExceeded",
    "Digests",
    "FaultKind",
    "Framework",
    "FromRank0",
    "GaspConfig",
    "Gather",
    "GoesOnWithFewer",
    "HangTimeout",
    "Hook",
    "HookNotPlaced",
    "Hooks",
    "InPlace",
    "LastgaspError",
    "Layout",
    "ManifestWriter",
    "MarksConfig",
    "MissingExtra",
    "Moved",
    "NativeManifests",
    "NativeSave",
    "NoGoodCheckpoint",
    "NotSaveable",
    "NothingLoads",
    "Options",
    "Place",
    "Preload",
    "RankStatus",
    "RankZero",
    "Release",
    "Released",
    "ReplicaGroups",
    "SaveResult",
    "SavesTogether",
    "SelectionPolicy",
    "Session",
    "StateSource",
    "Training",
    "Undo",
    "UsageError",
    "Verdict",
    "argument",
    "arguments_of",
    "asked_recovery",
    "cause_of",
    "check_writable",
    "choose_backend",
    "clock",
    "contact_of",
    "data_parallel",
    "flag",
    "grouped",
    "integer",
    "is_success",
    "kind_by",
    "launched",
    "leave",
    "number_on_host",
    "pick",
    "place_in_job",
    "recovery_here",
    "recovery_of",
    "refuse_unknown",
    "replace_attribute",
    "require_alike",
    "run_script",
    "switched",
    "tell_launcher",
]
