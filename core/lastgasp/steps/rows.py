"""The text of the profiling files: what TaskD's worker writes, byte for byte (docs/facts/taskd.md §6, §9).

A range without a stream is two rows (host start, host end), one with a stream is four (host start, device start,
host end, device end), in the order of tests/golden/taskd-rows.jsonl. Only the host's start row has the name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from . import bits
from . import format as layout
from .ring import Name

ROW_MAX = 999
"""Bytes of a row with its line feed. TaskD formats a row in C into 1000 bytes and drops what is longer."""
DOMAIN_MAX = 120
"""Bytes of a domain as it is written."""
OWN_DOMAIN = "lastgasp"
"""The domain of rows about the marks themselves. Readers of TaskD's files ignore other domains."""
DROPPED = "dropped "
"""Begins the name of such rows; the number of lost ranges follows."""
TEMPLATES_MAX = 4096


class Origin(NamedTuple):
    """What the rows of one process have in common.

    Attributes:
        pid: of the process that was marked.
        device: number of its device on its host; 0 where there is none.
        wall_offset: ns to add to a monotonic time.
        stream: stands in the device rows; any constant does (docs/facts/taskd.md §9).
    """

    pid: int
    device: int
    wall_offset: int
    stream: int = 0


_ESCAPES = {c: f"\\u{c:04x}" for c in (*range(0x20), *map(ord, "<>&"), 0x2028, 0x2029)}
_ESCAPES |= {ord('"'): '\\"', ord("\\"): "\\\\", ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}
# What Python makes of bytes that are not UTF-8; Go writes this for each such byte.
_ESCAPES |= dict.fromkeys(range(0xD800, 0xE000), "\\ufffd")

# In a template %s stands for a time, the Id and the value; %.0s takes a value and prints nothing.
_ROW = (
    '{{"Kind":1,"Flag":{flag},"SourceKind":{source},"Timestamp":%s,"Id":%s,'
    '"MsptiObjectId":{{"Pt":{{"ProcessId":{a},"ThreadId":{b}}},"Ds":{{"DeviceId":{a},"StreamId":{b}}}}},'
    '"Name":"{name}","Domain":"{domain}"}}\n'
)
_FRAME_MAX = len(_ROW.format(flag=16, source=0, a=1 << 31, b=1 << 31, name="", domain="").replace("%s", "9" * 20))
_VALUE_MAX = 20
_HOST, _DEVICE = 0, 1


def escape(text: str, limit: int = ROW_MAX) -> str:
    """`text` inside a JSON string as Go's encoder writes it, cut at a character to `limit` bytes."""
    written = text.translate(_ESCAPES)
    if len(written.encode()) <= limit:
        return written
    kept = []
    for character in text:
        piece = character.translate(_ESCAPES)
        limit -= len(piece.encode())
        if limit < 0:
            break
        kept.append(piece)
    return "".join(kept)


class Renderer:
    """Turns the records of one ring into rows, at one `%` each.

    Args:
        origin: of the ring's process.
        names: the ring's names from a slot on; asked again when a record has a newer one.
    """

    def __init__(self, origin: Origin, names: Callable[[int], Sequence[Name]]) -> None:
        self._origin = origin
        self._fetch = names
        self._names: list[Name] = []
        self._templates: dict[tuple[int, int], tuple[bool, str]] = {}

    def render(self, records: bytes) -> bytes:
        """Format complete records as rows, in their order."""
        offset, templates = self._origin.wall_offset, self._templates
        rows: list[str] = []
        for begin, end, number, value, device_begin, device_end, name, thread in layout.RECORD.iter_unpack(records):
            stream, template = templates.get((name, thread)) or self._template(name, thread)
            first, last, own = str(begin + offset), str(end + offset), str(number)
            if not stream:
                rows.append(template % (first, own, value, last, own))
                continue
            begun, done = first, last
            if device_begin and device_end:
                begun, done = str(device_begin + offset), str(device_end + offset)
            rows.append(template % (first, own, value, begun, own, last, own, done, own))
        return "".join(rows).encode()

    def _template(self, slot: int, thread: int) -> tuple[bool, str]:
        if slot >= len(self._names):
            self._names += self._fetch(len(self._names))
        if len(self._templates) >= TEMPLATES_MAX:
            self._templates.clear()
        known = slot < len(self._names)
        name = self._names[slot] if known else Name(f"unknown name {slot}", OWN_DOMAIN, bits.STEP, True)
        template = self._templates[slot, thread] = name.stream, template_of(name, thread, self._origin)
        return template


def render(records: bytes, names: Sequence[Name], origin: Origin) -> bytes:
    """Format complete records as rows, in their order.

    Args:
        records: as they lie in the ring (`format.RECORD`).
        names: of the ring, by slot.
        origin: of the ring's process.
    """
    return Renderer(origin, lambda first: names[first:]).render(records)


def dropped(count: int, number: int, wall_ns: int, origin: Origin) -> bytes:
    """The four rows that say that `count` ranges found no room in the ring and are not in the file.

    Args:
        number: an Id of their own.
        wall_ns: now, since the epoch.
    """
    template = template_of(Name(f"{DROPPED}{{}}", OWN_DOMAIN, bits.STEP, True), origin.pid, origin)
    return (template % (wall_ns, number, count, *(wall_ns, number) * 3)).encode()


def template_of(name: Name, thread: int, origin: Origin) -> str:
    """The rows of one range with `%s` for what differs between two of that name and thread.

    Its arguments: begin, Id, value, then for a host range: end, Id; for a stream range: device begin, Id, end, Id,
    device end, Id. Times in ns since the epoch.
    """
    host, device = (origin.pid, thread), (origin.device, origin.stream)
    if not name.stream:
        return _row(2, _HOST, host, *_title(name)) + _row(4, _HOST, host)
    return (
        _row(16, _HOST, host, *_title(name))
        + _row(16, _DEVICE, device)
        + _row(32, _HOST, host)
        + _row(32, _DEVICE, device)
    )


def _row(flag: int, source: int, place: tuple[int, int], name: str = "", domain: str = "") -> str:
    return _ROW.format(flag=flag, source=source, a=place[0], b=place[1], name=name, domain=domain)


def _title(name: Name) -> tuple[str, str]:
    """Name and domain for a template, cut so that the row stays within `ROW_MAX`."""
    domain = escape(name.domain, DOMAIN_MAX)
    room = ROW_MAX - _FRAME_MAX - len(domain.encode())
    before, placeholder, after = name.text.partition("{}")
    if not placeholder:
        return escape(name.text, room).replace("%", "%%") + "%.0s", domain.replace("%", "%%")
    before = escape(before, room - _VALUE_MAX)
    after = escape(after, room - _VALUE_MAX - len(before.encode()))
    return f"{before.replace('%', '%%')}%s{after.replace('%', '%%')}", domain.replace("%", "%%")
