"""For drop-in packages of other systems' registration: a worker whose state nobody has handed to lastgasp."""

from __future__ import annotations

from lastgasp.logs import set_up as set_up_logs
from lastgasp.steps import bits
from lastgasp.steps.groups import GROUPS_FILE, groups_text
from lastgasp.steps.marks import Marks
from lastgasp.steps.places import task_id
from lastgasp.unprotected import UnprotectedWorker, Worker, marks_directory, marks_here, session_here

__all__ = [
    "GROUPS_FILE",
    "Marks",
    "UnprotectedWorker",
    "Worker",
    "bits",
    "groups_text",
    "marks_directory",
    "marks_here",
    "session_here",
    "set_up_logs",
    "task_id",
]
