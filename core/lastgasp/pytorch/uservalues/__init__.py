"""Plain values that a user's objects keep beside what checkpoints have: recorded at boundaries, put back in place."""

from __future__ import annotations

from lastgasp.pytorch.uservalues.carried import Began, Carried, changed
from lastgasp.pytorch.uservalues.keeper import UserValues
from lastgasp.pytorch.uservalues.kinds import is_users, is_users_module
from lastgasp.pytorch.uservalues.limits import ONCE, Limits
from lastgasp.pytorch.uservalues.places import Places, Root
from lastgasp.pytorch.uservalues.transfer import fill, packed

__all__ = [
    "ONCE",
    "Began",
    "Carried",
    "Limits",
    "Places",
    "Root",
    "UserValues",
    "changed",
    "fill",
    "is_users",
    "is_users_module",
    "packed",
]
