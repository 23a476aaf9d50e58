"""Recovery in place for adapters of torch frameworks: a training that is entered again in the same process.

The adapter calls `enter` around its framework's training. In it, its run takes what it begins with from the `Entry`
(`current().take()`), and has a subclass of `AgainHere` that says where things are in the framework.
"""

from __future__ import annotations

from lastgasp.config import Recovery
from lastgasp.gasp.again import INCARNATION, NEW, Again
from lastgasp.gasp.going_on import Fewer
from lastgasp.gasp.joining import is_to_be_taken_in, order_when_taken_in, tell_code
from lastgasp.gasp.new_process import order_of_this_process
from lastgasp.pytorch.handover import cloned
from lastgasp.pytorch.loop.again import LATER, Entry, Renewed, current, enter, in_progress
from lastgasp.pytorch.loop.again_here import MEMORY, AgainHere, users_handler
from lastgasp.pytorch.loop.kept_objects import KeptModules, renew_scaler
from lastgasp.pytorch.loop.memory import Held, Memory, bytes_of
from lastgasp.pytorch.loop.parts_again import PartsAgain
from lastgasp.pytorch.loop.sigterm_between import SigtermBetween
from lastgasp.pytorch.uservalues import (
    ONCE,
    Began,
    Carried,
    Limits,
    Places,
    Root,
    UserValues,
    changed,
    fill,
    is_users,
    is_users_module,
    packed,
)

__all__ = [
    "INCARNATION",
    "LATER",
    "MEMORY",
    "NEW",
    "ONCE",
    "Again",
    "AgainHere",
    "Began",
    "Carried",
    "Entry",
    "Fewer",
    "Held",
    "KeptModules",
    "Limits",
    "Memory",
    "PartsAgain",
    "Places",
    "Recovery",
    "Renewed",
    "Root",
    "SigtermBetween",
    "UserValues",
    "bytes_of",
    "changed",
    "cloned",
    "current",
    "enter",
    "fill",
    "in_progress",
    "is_to_be_taken_in",
    "is_users",
    "is_users_module",
    "order_of_this_process",
    "order_when_taken_in",
    "packed",
    "renew_scaler",
    "tell_code",
    "users_handler",
]
