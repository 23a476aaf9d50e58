"""A process for a rank that is missing: it runs the script up to its training, and waits there to be taken in.

The ranks that are there train on meanwhile. It says to its host's launcher what code it runs, and gets the order to
enter the training with the others; where the launcher is gone, or needs it no longer, it ends.
"""

from __future__ import annotations

import os
import platform
import sys

import msgspec
import xxhash

from lastgasp import __version__
from lastgasp.output import write_error

from .again import Again
from .imported import libraries, origin
from .new_process import ends_with
from .signin import telling_of_other_users, users

JOINS = "LASTGASP_JOINS"
"""Set by lastgasp alone, for such processes: by local rank from where it reads its order, and where it writes to."""
CODE = "LASTGASP_CODE"
"""Set by lastgasp alone, for ranks that others may join later: the file in which one of them says what code it runs."""
IF_ASKED = "?"
"""Before that file where others only join if the script has asked to go on with fewer ranks."""
CANNOT_JOIN = "this process cannot be taken in"
Code = dict[str, str]
"""The user's modules by name with a digest of their files, and the versions of what they build on."""
_KNOWN = ("torch", "lightning", "numpy")


def code_of_this_process() -> Code:
    """What this process runs."""
    modules = {name: origin(module) for name, module in list(sys.modules.items())}
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    modules["__main__"] = os.path.abspath(script) if script else ""
    found = {name: _digest(modules[name]) for name in modules.keys() - set(libraries(modules)) if modules[name]}
    versions = {name: str(getattr(sys.modules[name], "__version__", "")) for name in _KNOWN if name in sys.modules}
    return {name: text for name, text in found.items() if text} | {
        f"version of {name}": text for name, text in versions.items()
    } | {"version of Python": platform.python_version(), "version of lastgasp": __version__}  # fmt: skip


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return xxhash.xxh3_128_hexdigest(file.read())
    except OSError:  # built in, or frozen
        return ""


def tell_code(asked: bool = False) -> None:
    """On a rank that is about to train: say what it runs, where its launcher asks for that. Never raises.

    Args:
        asked: its script has asked to go on with fewer ranks.
    """
    path = os.environ.get(CODE, "")
    if not path or (path.startswith(IF_ASKED) and not asked) or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    path = path.removeprefix(IF_ASKED)
    try:
        with telling_of_other_users(path), open(path, "ab", buffering=0) as file:
            file.write(msgspec.json.encode(code_of_this_process()) + b"\n")
    except OSError:  # the launcher is gone
        return


def different(ours: Code, theirs: Code) -> str:
    """In what two processes run other code, in words; empty if in nothing that both have.

    One may have imported what the other has not: ranks may do different things.
    """
    if not ours or "__main__" not in ours.keys() & theirs.keys():
        return "it is not known what the other ranks run"
    names = sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name])
    named = ("the script" if name == "__main__" else name for name in names[:3])
    return f"it runs other code than the ranks that are there ({', '.join(named)})" if names else ""


def is_to_be_taken_in() -> bool:
    """Whether this process was started to be taken in, and has not asked for its order yet."""
    return bool(os.environ.get(JOINS))


def order_when_taken_in() -> Again | None:
    """Wait for the order, in a process that was started to be taken in; None in any other. Asked once.

    Its launcher ends this wait in any case: by the order, by closing its end, or with its own end.

    Raises:
        SystemExit: there is no place for this process any more.
    """
    rows = [row.split() for row in os.environ.pop(JOINS, "").split(";")]
    paths = next((row[1:] for row in rows if row and (len(rows) == 1 or row[0] == os.environ.get("LOCAL_RANK"))), None)
    if paths is None:
        return None
    try:
        with open(paths[0], "rb") as orders, open(paths[1], "wb", buffering=0) as words:
            words.write(msgspec.json.encode(code_of_this_process()) + b"\n")
            line = orders.readline()
    except PermissionError:
        write_error(f"lastgasp: {CANNOT_JOIN}: {users(paths[0])}")
        raise SystemExit(1) from None
    except OSError:
        line = b""
    if not line:
        raise SystemExit(0)
    again = msgspec.json.decode(line, type=Again)
    ends_with(os.getppid())
    os.environ.update(again.environment)
    return again
