"""Which of pytest-xdist's workers has which tests."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling


class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
    """A group at a time; `--dist loadgroup` of xdist 3.8 knows no groups under pytest 9.2."""

    def _split_scope(self, nodeid: str) -> Any:
        return group_of(self.config.rootpath / nodeid.partition("::")[0])


@functools.cache
def group_of(module: Path) -> str:
    """MindSpore's tests, the other jobs, or a module of quick tests.

    MindSpore's wait more than they compute, and only one msrun may be up at a time; so they share the machine with the
    other jobs, which come one at a time too. Whichever worker is free takes quick tests.
    """
    if "from support.mindspore" in module.read_text():
        return "mindspore"
    return module.stem if module.parent.name in ("arch", "unit") else "jobs"
