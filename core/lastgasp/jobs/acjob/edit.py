"""Edits a YAML text in place: whatever is not meant to change stays the same, byte for byte.

Changes are gathered first, as values at paths below nodes; then the new text is made in one go, parsed again, and
compared with the intended content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lastgasp.errors import LastgaspError

from .tree import Document, Node, Pair, Use, YamlProblem, parse, place

Value: TypeAlias = "str | int | Mapping[str, Value] | Sequence[Value]"
_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./'\[\]-]*")
_PROPERTY = re.compile(r"[&!][^\s,\[\]{}]*\s+")
"""An anchor or a tag before a value."""


class Quoted(str):
    """A string that is written in quotes even where that is not necessary, as is customary for label values."""


class CannotEdit(LastgaspError):
    """The text is written in a form in which the change cannot be made."""


@dataclass(frozen=True)
class _Insert:
    """Text to insert at a position. At the same one the deeper goes first, and an item before its map's next key."""

    at: int
    column: int
    is_map: bool
    text: str
    until: int

    @property
    def order(self) -> tuple[int, int, bool]:
        return self.at, -self.column, self.is_map


class Edits:
    """Gathers changes to one text and makes the new one.

    Args:
        text: what `documents` were read from.
        documents: all documents of the file.
    """

    def __init__(self, text: str, documents: Sequence[Document]) -> None:
        self.text, self.documents = text, documents
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self.indents_lists = _indents_lists(documents)
        self._more: dict[int, tuple[Node, Any]] = {}
        self._fills: dict[int, tuple[Node, Pair, Any]] = {}
        self._scalars: dict[int, tuple[Use, str | int]] = {}
        """Keyed by use, not by node: another alias of the same node keeps its value."""
        self._gone: dict[int, tuple[Node, Pair]] = {}

    def __bool__(self) -> bool:
        return bool(self._more or self._fills or self._scalars or self._gone)

    # -- gathering --------------------------------------------------------------------------------

    def put(self, node: Node, path: Sequence[str], value: Value) -> None:
        """Set `value` at `path` below the map `node`, creating maps on the way. No change if it is there already.

        A value that also appears elsewhere, through an alias or a merge key, does not change there.
        """
        pair, rest = node.pair(path[0]), path[1:]
        if pair is None:
            _set(self._addition(node, {}), path, value)
        elif pair.node.kind == "scalar" and (rest or not isinstance(value, str | int)):
            self._must_be_null(pair)
            _set(self._fill(node, pair, {}), rest, value)
        elif rest:
            self.put(pair.node, rest, value)
        elif any(one is pair for one in node.pairs):
            self._replace(pair, value)
        elif self._said(pair) != _plain(value):  # from a merged map: the map's own key takes precedence
            _set(self._addition(node, {}), path, value)

    def append(self, node: Node, path: Sequence[str], item: Value) -> None:
        """Append `item` to the list at `path` below the map `node`, creating the list and maps on the way."""
        pair, rest = node.pair(path[0]), path[1:]
        if pair is None:
            _append(_set(self._addition(node, {}), path, []), item)
        elif pair.node.kind == "scalar":
            self._must_be_null(pair)
            _append(_set(self._fill(node, pair, {}), rest, []) if rest else self._fill(node, pair, []), item)
        elif rest:
            self.append(pair.node, rest, item)
        else:
            _append(self._addition(pair.node, []), item)

    def remove(self, node: Node, names: Sequence[str], parent: tuple[Node, str]) -> None:
        """Remove entries from the map `node`, held by `parent` under that key; if none is left, also that key."""
        gone = [pair for pair in node.pairs if pair.key.text in names]
        if len(gone) == len(node.pairs) and gone and id(node) not in self._more:
            node, gone = parent[0], [pair for pair in parent[0].pairs if pair.key.text == parent[1]]
        self._gone |= {id(pair): (node, pair) for pair in gone}

    def quote(self, use: Use) -> None:
        """Turn a scalar into a string of the same spelling: `on` becomes `"on"`."""
        self._replace(use, Quoted(use.node.text))

    def unquote(self, use: Use) -> None:
        """Turn a quoted number into a number: `"1"` becomes `1`."""
        self._replace(use, int(use.node.text))

    def _replace(self, use: Use, value: Value) -> None:
        if not isinstance(value, str | int) or use.node.kind != "scalar":
            raise CannotEdit(f"line {use.line}: expected a single value there")
        if self._said(use) != _plain(value):
            self._scalars[id(use)] = (use, value)

    def _said(self, use: Use) -> Any:
        """Type and text of a scalar, including the changes so far."""
        new = self._scalars.get(id(use))
        return (use.node.type, use.node.text) if new is None else _plain(new[1])

    def _addition(self, node: Node, empty: Any) -> Any:
        if node.kind != ("map" if isinstance(empty, dict) else "list"):
            raise CannotEdit(f"line {node.line}: expected a {'map' if isinstance(empty, dict) else 'list'} there")
        return self._more.setdefault(id(node), (node, empty))[1]

    def _fill(self, parent: Node, pair: Pair, empty: Any) -> Any:
        return self._fills.setdefault(id(pair), (parent, pair, empty))[2]

    def _must_be_null(self, pair: Pair) -> None:
        if pair.node.type != "null" or pair.alias:
            raise CannotEdit(f"line {pair.line}: {pair.key.text} holds {pair.node.text!r}, no map or list")

    # -- the new text -----------------------------------------------------------------------------

    def apply(self) -> tuple[str, list[Document]]:
        """The text with all changes, and its documents.

        Raises:
            CannotEdit: the new text would not have the intended content, and must not be used.
        """
        self._refuse_followers()
        inserts = [self._addition_text(node, more) for node, more in self._more.values()]
        inserts += [one for parent, pair, more in self._fills.values() for one in self._fill_text(parent, pair, more)]
        inserts += [self._scalar_text(use, value) for use, value in self._scalars.values()]
        inserts += [self._removal(node, pair) for node, pair in self._gone.values()]
        pieces, at = [], 0
        for one in sorted(inserts, key=lambda insert: insert.order):
            pieces += [self.text[at : one.at], one.text]
            at = max(at, one.until)
        text = "".join(pieces) + self.text[at:]
        return text, self._verified(text)

    def _refuse_followers(self) -> None:
        """Refuse changes that would also change an alias which is meant to keep its value."""
        changed = {id(use.node) for use, _ in self._scalars.values() if not use.alias}
        for use in _uses(self.documents) if changed else ():
            if use.alias and id(use.node) in changed and id(use) not in self._scalars:
                name = self.text[use.begin : use.end]
                raise CannotEdit(f"line {use.line}: {name} repeats a value that has to change elsewhere; write it out")

    def _verified(self, text: str) -> list[Document]:
        meant = [self._data(document.root, {}) for document in self.documents]
        try:
            documents = parse(text)
        except YamlProblem as problem:
            raise CannotEdit(f"this change cannot be made: the result would not be YAML ({problem})") from None
        said = Edits(text, documents)
        if meant != [said._data(document.root, {}) for document in documents]:
            raise CannotEdit("this change cannot be made in the text as it is written: make it by hand")
        return documents

    def _data(self, node: Node | None, known: dict[int, Any]) -> Any:
        """A node's content including the gathered changes: maps, lists, and (type, text) of scalars."""
        if node is None:
            return None
        if id(node) not in known:
            more = self._more.get(id(node), (node, None))[1]
            if node.kind == "scalar":
                known[id(node)] = (node.type, node.text)
            elif node.kind == "map":
                left = [pair for pair in node.pairs if id(pair) not in self._gone]
                known[id(node)] = {pair.key.text: self._pair_data(pair, known) for pair in left}
                known[id(node)].update(_plain(more or {}))
            else:
                known[id(node)] = [self._use_data(use, known) for use in node.items] + _plain(more or [])
        return known[id(node)]

    def _pair_data(self, pair: Pair, known: dict[int, Any]) -> Any:
        fill = self._fills.get(id(pair))
        return self._use_data(pair, known) if fill is None else _plain(fill[2])

    def _use_data(self, use: Use, known: dict[int, Any]) -> Any:
        return self._data(use.node, known) if id(use) not in self._scalars else self._said(use)

    def _scalar_text(self, use: Use, value: str | int) -> _Insert:
        begin, end = (use.begin, use.end) if use.alias else (use.node.begin, use.node.end)
        while not use.alias and (found := _PROPERTY.match(self.text, begin, end)):
            begin = found.end()
        text = _scalar(Quoted(value) if use.node.style and isinstance(value, str) else value)
        blank = " " if begin == end and self.text[begin - 1 : begin] == ":" else ""
        return _Insert(begin, 0, False, blank + text, end)

    def _removal(self, node: Node, pair: Pair) -> _Insert:
        begin = self.text.rfind("\n", 0, pair.key.begin) + 1
        if node.flow or self.text[begin : pair.key.begin].strip():
            raise CannotEdit(f"line {pair.line}: {pair.key.text} has to be removed; remove it by hand")
        end = pair.end if self.text[pair.end - 1] == "\n" else self.text.find("\n", pair.end) + 1
        return _Insert(begin, 0, False, "", end or len(self.text))

    def _addition_text(self, node: Node, more: Any) -> _Insert:
        if node.flow:
            return self._flow_addition(node, more)
        if not node.pairs and not node.items:
            raise CannotEdit(f"line {node.line}: nothing can be inserted there; change it by hand")
        column = self._column(node)
        return self._lines_behind(node.end, _lines(more, column, self.indents_lists), column, node.kind == "map")

    def _flow_addition(self, node: Node, more: Any) -> _Insert:
        uses = [*node.pairs, *node.items]
        quotes = any(pair.key.style for pair in node.pairs) or self._is_json
        inner = _flow(more, quotes)[1:-1]
        if uses:
            return _Insert(uses[-1].end, 0, False, f", {inner}", uses[-1].end)
        at = self.text.index("{" if node.kind == "map" else "[", node.begin) + 1
        return _Insert(at, 0, False, inner, node.end - 1)

    @property
    def _is_json(self) -> bool:
        roots = [document.root for document in self.documents if document.root is not None]
        return bool(roots) and roots[0].flow and any(pair.key.style for pair in roots[0].pairs)

    def _fill_text(self, parent: Node, pair: Pair, more: Any) -> list[_Insert]:
        if parent.flow:
            blank = "" if self.text[pair.begin - 1] == " " else " "
            return [_Insert(pair.begin, 0, False, blank + _flow(more, self._is_json), pair.node.end)]
        column = pair.key.column - 1
        inner = column + (2 if isinstance(more, dict) or self.indents_lists else 0)
        lines = self._lines_behind(pair.node.end, _lines(more, inner, self.indents_lists), inner, False)
        gone = [] if pair.node.begin == pair.node.end else [_Insert(pair.node.begin, 0, False, "", pair.node.end)]
        return [*gone, lines]

    def _lines_behind(self, end: int, lines: list[str], column: int, is_map: bool) -> _Insert:
        """Insert entire lines after the line that contains the position before `end`."""
        at = end if self.text[end - 1 : end] == "\n" else self.text.find("\n", end) + 1
        body = self.newline.join(lines)
        if at > 0:
            return _Insert(at, column, is_map, body + self.newline, at)
        return _Insert(len(self.text), column, is_map, self.newline + body, len(self.text))

    def _column(self, node: Node) -> int:
        at = node.dash if node.kind == "list" else node.pairs[0].key.begin
        return place(self.text, at)[1] - 1


def _set(into: dict[str, Any], path: Sequence[str], value: Any) -> Any:
    for key in path[:-1]:
        into = into.setdefault(key, {})
    return into.setdefault(path[-1], value)


def _append(into: list[Any], item: Value) -> None:
    if item not in into:
        into.append(item)


def _indents_lists(documents: Sequence[Document]) -> bool:
    """Whether most block lists of the file are indented deeper than their key."""
    votes = 0
    for use in _uses(documents):
        if isinstance(use, Pair) and use.node.kind == "list" and not (use.node.flow or use.alias) and use.node.items:
            votes += 1 if use.node.items[0].node.column - 2 > use.key.column else -1
    return votes > 0


def _uses(documents: Sequence[Document]) -> Iterator[Use]:
    """Every entry and item, once."""
    seen = set[int]()
    todo = [document.root for document in documents if document.root is not None]
    while todo:
        node = todo.pop()
        if id(node) not in seen:
            seen.add(id(node))
            for use in (*node.pairs, *node.items):
                yield use
                todo.append(use.node)


def _plain(value: Any) -> Any:
    """The same form as `Edits._data` returns."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return ("number" if isinstance(value, int) else "string", str(value))


def _lines(value: Any, column: int, indents_lists: bool) -> list[str]:
    pad = " " * column
    if isinstance(value, list):
        lines = []
        for item in value:
            first, *rest = _lines(item, column + 2, indents_lists)
            lines += [f"{pad}- {first.lstrip()}", *rest]
        return lines
    if not isinstance(value, dict):
        return [pad + _scalar(value)]
    lines = []
    for key, one in value.items():
        if isinstance(one, dict | list):
            inner = column + (2 if isinstance(one, dict) or indents_lists else 0)
            lines += [f"{pad}{_scalar(key)}:", *_lines(one, inner, indents_lists)]
        else:
            lines.append(f"{pad}{_scalar(key)}: {_scalar(one)}")
    return lines


def _flow(value: Any, quotes: bool) -> str:
    if isinstance(value, dict):
        keys = {key: _in_quotes(key) if quotes else _scalar(key) for key in value}
        return "{" + ", ".join(f"{keys[key]}: {_flow(one, quotes)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(one, quotes) for one in value) + "]"
    return _scalar(Quoted(value) if isinstance(value, str) else value)


def _scalar(value: str | int) -> str:
    if isinstance(value, int):
        return str(value)
    probe = Node("scalar", 0, 0, 1, 1, value)
    plain = _PLAIN.fullmatch(value) and probe.type == "string" and not isinstance(value, Quoted)
    return value if plain else _in_quotes(value)


def _in_quotes(text: str) -> str:
    inner = "".join(_ESCAPES.get(char, char) for char in text)
    return f'"{inner}"'


_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
