"""parallel_group.json, from which TaskD's slow-node tool learns the process groups (docs/facts/taskd.md §6, §7)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

GROUPS_FILE = "parallel_group.json"
"""A file beside a rank's rows. Neither TaskD's ageing nor lastgasp's removes it."""


def groups_text(groups: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The content of parallel_group.json, to be written by `RankFiles.beside`.

    Args:
        groups: by the key that communication marks give as `groupName`: `group_name` (the tool looks for `tp` and
            `pp`), `group_rank` (this rank's number within) and `global_ranks`, of the groups that this rank is in.

    Raises:
        KeyError: an entry lacks one of the three.
    """
    content = {
        str(key): {
            "group_name": str(entry["group_name"]),
            "group_rank": int(entry["group_rank"]),
            "global_ranks": [int(rank) for rank in entry["global_ranks"]],
        }
        for key, entry in groups.items()
    }
    return json.dumps(content, indent=4).encode()
