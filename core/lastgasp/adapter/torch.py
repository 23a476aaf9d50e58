"""What adapters of torch frameworks share: auxiliary state, gasps, data position, digests, marks. Imports torch."""

from __future__ import annotations

from lastgasp.pytorch import exception_origin, extrastate, fingerprints, rng
from lastgasp.pytorch.as_set import AsSet
from lastgasp.pytorch.aux_state import (
    AuxRecorder,
    AuxState,
    decode_aux,
    extra_of,
    own_aux,
    random_of,
    restore_aux,
    with_random,
    without_buffers,
)
from lastgasp.pytorch.buckets import BucketLayout, fits, with_assignment
from lastgasp.pytorch.buckets import Layout as Buckets
from lastgasp.pytorch.buffers import persistent_buffers
from lastgasp.pytorch.collectives import Collectives, CommunicationMarks
from lastgasp.pytorch.common_directory import common_directory
from lastgasp.pytorch.compiled import changes_of, values_of
from lastgasp.pytorch.elastic.buffers import BufferValue, buffer_values, put_buffers_back
from lastgasp.pytorch.elastic.exchanges import EXCHANGES, exchanged
from lastgasp.pytorch.elastic.loader import ElasticLoader, GlobalBatch
from lastgasp.pytorch.elastic.numbers import as_rank
from lastgasp.pytorch.elastic.plan import owners
from lastgasp.pytorch.exception_origin import is_about_content, kind_of
from lastgasp.pytorch.faulty import Closure, Step, at_first_bytes, hook_model, hook_optimizer, replace
from lastgasp.pytorch.flags import Flags
from lastgasp.pytorch.from_files import EnteredFromFiles, Files
from lastgasp.pytorch.gasp_source import GaspSource
from lastgasp.pytorch.held_gradients import HeldGradients
from lastgasp.pytorch.inner_schedules import kept_inside, load_schedules
from lastgasp.pytorch.io import load_entry, load_verified, save_verified, without_crc32
from lastgasp.pytorch.loop.copies import Copies, address
from lastgasp.pytorch.loop.faults import install_faults
from lastgasp.pytorch.loop.marks import LoopMarks
from lastgasp.pytorch.loop.optimizer_update import collectives_begun
from lastgasp.pytorch.loop.outside import ReplicaWatch, watch_replicas
from lastgasp.pytorch.loop.ranks import connect, from_rank_0, local, place_of
from lastgasp.pytorch.loop.record import Buckets as BucketLayouts
from lastgasp.pytorch.loop.record import buffers_of
from lastgasp.pytorch.loop.state import TorchState
from lastgasp.pytorch.moving import MovingParameters
from lastgasp.pytorch.ondemand import OnDemand
from lastgasp.pytorch.one_pass import OnePass
from lastgasp.pytorch.own_dtypes import give_dtypes_back, have_dtypes_of
from lastgasp.pytorch.owncopy import schedule_of
from lastgasp.pytorch.position import (
    CHANGED,
    MAP,
    STATEFUL,
    STREAM,
    WORKERS,
    EpochPosition,
    EpochRecord,
    LoaderPosition,
    PassStart,
    decode_epoch,
    is_epoch_record,
    other_ranks,
    position_of,
    register_loader,
)
from lastgasp.pytorch.position.loaders import runs_workers, start_workers
from lastgasp.pytorch.prefetched import PrefetchedData, PrefetchedPosition
from lastgasp.pytorch.processgroups import key_of, process_groups
from lastgasp.pytorch.queued import QueuedWork
from lastgasp.pytorch.ranges import Range, Sink
from lastgasp.pytorch.rng import as_tensor
from lastgasp.pytorch.staged import StagedGasp, contribute, publish, stage, with_added
from lastgasp.pytorch.statedigest import digest, digests_of
from lastgasp.pytorch.stepranges import Open, StepRanges
from lastgasp.pytorch.unsaved import Unsaved, UnsavedData, UnsavedOptimizers, users_parts
from lastgasp.pytorch.weight_modes import EXCHANGED, patch_group, which_weights
from lastgasp.trailer import split_trailer, with_trailer

__all__ = [
    "CHANGED",
    "EXCHANGED",
    "EXCHANGES",
    "MAP",
    "STATEFUL",
    "STREAM",
    "WORKERS",
    "AsSet",
    "AuxRecorder",
    "AuxState",
    "BucketLayout",
    "BucketLayouts",
    "Buckets",
    "BufferValue",
    "Closure",
    "Collectives",
    "CommunicationMarks",
    "Copies",
    "ElasticLoader",
    "EnteredFromFiles",
    "EpochPosition",
    "EpochRecord",
    "Files",
    "Flags",
    "GaspSource",
    "GlobalBatch",
    "HeldGradients",
    "LoaderPosition",
    "LoopMarks",
    "MovingParameters",
    "OnDemand",
    "OnePass",
    "Open",
    "PassStart",
    "PrefetchedData",
    "PrefetchedPosition",
    "QueuedWork",
    "Range",
    "ReplicaWatch",
    "Sink",
    "StagedGasp",
    "Step",
    "StepRanges",
    "TorchState",
    "Unsaved",
    "UnsavedData",
    "UnsavedOptimizers",
    "address",
    "as_rank",
    "as_tensor",
    "at_first_bytes",
    "buffer_values",
    "buffers_of",
    "changes_of",
    "collectives_begun",
    "common_directory",
    "connect",
    "contribute",
    "decode_aux",
    "decode_epoch",
    "digest",
    "digests_of",
    "exception_origin",
    "exchanged",
    "extra_of",
    "extrastate",
    "fingerprints",
    "fits",
    "from_rank_0",
    "give_dtypes_back",
    "have_dtypes_of",
    "hook_model",
    "hook_optimizer",
    "install_faults",
    "is_about_content",
    "is_epoch_record",
    "kept_inside",
    "key_of",
    "kind_of",
    "load_entry",
    "load_schedules",
    "load_verified",
    "local",
    "other_ranks",
    "own_aux",
    "owners",
    "patch_group",
    "persistent_buffers",
    "place_of",
    "position_of",
    "process_groups",
    "publish",
    "put_buffers_back",
    "random_of",
    "register_loader",
    "replace",
    "restore_aux",
    "rng",
    "runs_workers",
    "save_verified",
    "schedule_of",
    "split_trailer",
    "stage",
    "start_workers",
    "users_parts",
    "values_of",
    "watch_replicas",
    "which_weights",
    "with_added",
    "with_assignment",
    "with_random",
    "with_trailer",
    "without_buffers",
    "without_crc32",
]
