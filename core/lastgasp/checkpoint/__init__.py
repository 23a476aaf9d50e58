"""Checkpoints that can be trusted: written with digests, committed atomically, verified before loading.

Writing: `Staged`. Reading in one process: `newest_good`, `VerifiedFile`. Reading with all ranks: `candidates`,
`verify`, `agree`, then `quarantine`. Pruning: `to_remove` and `apply`.
"""

from __future__ import annotations

from .agree import Agreement, agree
from .candidates import Candidate, candidates
from .commit import Staged
from .digest import HashingWriter, digest_file
from .layout import DirectoryLayout, SingleFile
from .manifest import FileEntry, Manifest, ManifestProblem, Provenance, World
from .progress import progress_bar
from .quarantine import quarantine
from .reader import VerifiedFile
from .restore import newest_good
from .retention import Counted, apply, to_remove
from .scattered import ScatteredLayout
from .verdict import Damage, Verdict
from .verify import Progress, verify

__all__ = [
    "Agreement",
    "Candidate",
    "Counted",
    "Damage",
    "DirectoryLayout",
    "FileEntry",
    "HashingWriter",
    "Manifest",
    "ManifestProblem",
    "Progress",
    "Provenance",
    "ScatteredLayout",
    "SingleFile",
    "Staged",
    "Verdict",
    "VerifiedFile",
    "World",
    "agree",
    "apply",
    "candidates",
    "digest_file",
    "newest_good",
    "progress_bar",
    "quarantine",
    "to_remove",
    "verify",
]
