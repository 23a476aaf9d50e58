"""Checkpoints with manifests: layouts, candidates, verification, atomic commits, what does not load."""

from __future__ import annotations

from lastgasp.checkpoint import (
    Agreement,
    Candidate,
    Damage,
    DirectoryLayout,
    FileEntry,
    ScatteredLayout,
    SingleFile,
    Staged,
    Verdict,
    candidates,
    newest_good,
    progress_bar,
    verify,
)
from lastgasp.checkpoint.addenda import has_ended, mark_ended
from lastgasp.checkpoint.adopt import ADOPTED, data_files, read_entries, read_files, remove_orphans, write_manifest
from lastgasp.checkpoint.layout import is_moved_away, next_path
from lastgasp.checkpoint.manifest import Fit, Kind, Manifest
from lastgasp.checkpoint.manifest import read as read_manifest
from lastgasp.checkpoint.manifest_lookup import has_manifest
from lastgasp.checkpoint.moving import put_back, set_aside
from lastgasp.checkpoint.part import SavedPart, part_of
from lastgasp.checkpoint.quarantine import quarantine, set_aside_unfit
from lastgasp.checkpoint.reader import VerifiedFile
from lastgasp.checkpoint.retention import prune, remove
from lastgasp.checkpoint.samefit import differences, is_of_home, name_of_fit, number_of
from lastgasp.checkpoint.torch_zip import zip_problem
from lastgasp.checkpoint.trial import Trial, is_about_content, trained_again
from lastgasp.checkpoint.unknown import all_of_training, unknown

__all__ = [
    "ADOPTED",
    "Agreement",
    "Candidate",
    "Damage",
    "DirectoryLayout",
    "FileEntry",
    "Fit",
    "Kind",
    "Manifest",
    "SavedPart",
    "ScatteredLayout",
    "SingleFile",
    "Staged",
    "Trial",
    "Verdict",
    "VerifiedFile",
    "all_of_training",
    "candidates",
    "data_files",
    "differences",
    "has_ended",
    "has_manifest",
    "is_about_content",
    "is_moved_away",
    "is_of_home",
    "mark_ended",
    "name_of_fit",
    "newest_good",
    "next_path",
    "number_of",
    "part_of",
    "progress_bar",
    "prune",
    "put_back",
    "quarantine",
    "read_entries",
    "read_files",
    "read_manifest",
    "remove",
    "remove_orphans",
    "set_aside",
    "set_aside_unfit",
    "trained_again",
    "unknown",
    "verify",
    "write_manifest",
    "zip_problem",
]
