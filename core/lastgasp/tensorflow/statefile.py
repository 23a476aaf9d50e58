"""TensorFlow's state file `checkpoint`: a text proto that names the newest prefix and all that a manager keeps.

Written and read without TensorFlow. It has no checksum, and TensorFlow trusts it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

NAME = "checkpoint"
_STRING = r'"(?:[^"\\\n]|\\.)*"|' + r"'(?:[^'\\\n]|\\.)*'"
_FIELD = re.compile(rf"\s*(?P<name>\w+)\s*:\s*(?P<value>(?:(?:{_STRING})\s*)+|[-+.\w]+)\s*[,;]?|\s*#[^\n]*|\s+")
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|(.))", re.S)
_WRITTEN = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_MARK = b"# by lastgasp: which names are a manager's is not known\n"
"""A comment, which TensorFlow skips, and leaves out when it writes the file itself."""
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}


@dataclass(frozen=True)
class State:
    """The file's content. Names are relative to its directory, or absolute.

    Args:
        latest: the prefix to restore; kept: all that the manager may remove later, oldest first.
        times: when each of `kept` was saved, unix seconds; empty where the file has none.
        preserved: when the last checkpoint that is kept for ever was saved, unix seconds, or None.
    """

    latest: str
    kept: tuple[str, ...] = ()
    times: tuple[float, ...] = ()
    preserved: float | None = None


def parse(data: bytes) -> State | None:
    """The state, or None for anything that is not such a file. Unknown fields are ignored."""
    found: dict[str, list[str]] = {}
    position = 0
    try:
        text = data.decode()
        while position < len(text):
            match = _FIELD.match(text, position)
            if match is None:
                return None
            position = match.end()
            if match["name"]:
                found.setdefault(match["name"], []).append(_value(match["value"]))
        [latest] = found["model_checkpoint_path"]
        times = tuple(float(value) for value in found.get("all_model_checkpoint_timestamps", ()))
        preserved = [float(value) for value in found.get("last_preserved_timestamp", ())]
    except (ValueError, KeyError):  # UnicodeDecodeError is a ValueError
        return None
    kept = tuple(found.get("all_model_checkpoint_paths", ()))
    if not latest or len(times) not in (0, len(kept)):
        return None
    return State(latest, kept, times, preserved[-1] if preserved else None)


def is_repaired(data: bytes) -> bool:
    """Whether lastgasp has written the file without knowing whose names they are, and TensorFlow has not since."""
    return data.startswith(_MARK)


def encode(state: State, mark: bool = False) -> bytes:
    """The file of `state`, as TensorFlow writes it; `mark`: for `is_repaired`."""
    lines = [f"model_checkpoint_path: {_quoted(state.latest)}"]
    lines += [f"all_model_checkpoint_paths: {_quoted(name)}" for name in state.kept]
    lines += [f"all_model_checkpoint_timestamps: {time!r}" for time in state.times]
    lines += [] if state.preserved is None else [f"last_preserved_timestamp: {state.preserved!r}"]
    return (_MARK if mark else b"") + "".join(line + "\n" for line in lines).encode()


def repaired(old: State | None, directory: Path, chosen: Path, standing: Mapping[Path, float]) -> State | None:
    """The state that names `chosen`; None if `old` names it and no missing checkpoint.

    Args:
        old: the current state; None if the file is missing or unreadable.
        directory: of the file; chosen: the newest good checkpoint in it.
        standing: existing checkpoints not newer than `chosen`, oldest first -> when saved, unix seconds.
            A readable `old` says which of them a manager may remove; it keeps the others for ever.
    """
    named = _named(old, directory)
    if old is not None and local(old.latest, directory) == chosen and _is_right(old, directory, {*standing, chosen}):
        return None
    kept = [path for path in (standing if old is None else named) if path in standing and path != chosen]
    stems = {stem(path.name) for path in (kept if old is None else named)}
    # Whose they are is not known where several scripts' or managers' names stand there: nobody may remove any.
    kept = [*kept, chosen] if stems <= {stem(chosen.name)} or (old is not None and stem(chosen.name) in stems) else []
    times = tuple(named.get(path, standing.get(path, 0.0)) for path in kept)
    return State(chosen.name, tuple(path.name for path in kept), times, None if old is None else old.preserved)


def stem(prefix: str) -> str:
    """What a manager calls `checkpoint_name`: the prefix without the number that it ends with."""
    return re.sub(r"-\d+$", "", prefix)


def local(name: str, directory: Path) -> Path:
    """Where the checkpoint is that the state file of `directory` calls so; absolute names may be from before a move."""
    path = directory / name
    return path if os.path.isfile(f"{path}.index") and not _is_here(name, directory) else directory / path.name


def _is_right(state: State, directory: Path, there: Set[Path]) -> bool:
    """Whether TensorFlow finds all that it names."""
    return _named(state, directory).keys() <= there and all(_is_here(n, directory) for n in (state.latest, *state.kept))


def _is_here(name: str, directory: Path) -> bool:
    return os.path.realpath((directory / name).parent) == os.path.realpath(directory)


def _named(state: State | None, directory: Path) -> dict[Path, float]:
    """The checkpoints that it names, in its order -> when saved, if it says so."""
    if state is None:
        return {}
    paths: Sequence[Path] = [local(name, directory) for name in state.kept]
    times: Iterable[float] = state.times or [0.0] * len(paths)
    return dict(zip(paths, times, strict=True))


def _value(text: str) -> str:
    """A number as written; adjacent string literals as one string, without quotes and escapes."""
    literals = re.findall(_STRING, text)
    if not literals:
        return text
    raw = b"".join(literal[1:-1].encode() for literal in literals)
    return _ESCAPE.sub(_unescaped, raw).decode()


def _unescaped(match: re.Match[bytes]) -> bytes:
    octal, hexadecimal, letter = match.groups()
    if letter is not None:
        return _LETTERS.get(letter, letter)
    return bytes([int(octal, 8) & 255 if octal is not None else int(hexadecimal, 16)])


def _quoted(name: str) -> str:
    return '"' + "".join(_WRITTEN.get(letter, letter) for letter in name) + '"'
