"""A YAML file as nodes that know their position in its text.

Events come from ruamel.yaml, or from libyaml if that is installed as well; the tree is lastgasp's own, because an alias
must keep its own position, a merge key must stay visible, and a patch edits the text in place: every other byte
stays the same. ruamel.yaml's round trip does not do that (docs/how-it-works.md §10). Scalars are judged
as Kubernetes does, whose parser follows YAML 1.1: a plain `on` is a boolean there.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from lastgasp.errors import LastgaspError, MissingExtra

Kind = Literal["map", "list", "scalar"]
ScalarType = Literal["string", "bool", "number", "null"]
DEEPEST = 100
"""Levels of nesting; a job has about 15."""
MOST_NODES = 1_000_000
"""Nodes that a document may have with its aliases expanded; Kubernetes' own limit is lower."""
MERGE = "<<"
_UNCOUNTED = re.compile("[\ufeff\x85\u2028\u2029]")
"""libyaml does not count byte order marks in its positions, and treats the others as line ends."""

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = re.compile(r"y|Y|yes|Yes|YES|n|N|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF")
_NUMBER = re.compile(
    r"[-+]?(0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*|([0-9][0-9_]*\.[0-9_]*|\.[0-9_]+)([eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(inf|Inf|INF))|\.(nan|NaN|NAN)"
)


class YamlProblem(LastgaspError):
    """A text that Kubernetes would not read as YAML.

    Args:
        line, column: where, from 1.
        reason: what is wrong.
        fix: what to do.
    """

    def __init__(self, line: int, column: int, reason: str, fix: str) -> None:
        self.line, self.column, self.reason, self.fix = line, column, reason, fix
        super().__init__(f"line {line}, column {column}: {reason}. {fix}")


@dataclass(eq=False, slots=True)
class Node:
    """One value. `begin` and `end` bound its text, without comments and blanks after it.

    Attributes:
        kind: map, list or scalar.
        begin, end: places in the text.
        line, column: of `begin`, from 1.
        text: a scalar's value.
        style: a scalar's quotes (`'`, `"`, `|`, `>`) or empty.
        flow: a map or list in brackets.
        tag: as written, or empty.
        pairs: of a map, in order.
        items: of a list, in order.
        dash: of a block list: the place of its first dash.
    """

    kind: Kind
    begin: int
    end: int
    line: int
    column: int
    text: str = ""
    style: str = ""
    flow: bool = False
    tag: str = ""
    pairs: list[Pair] = field(default_factory=list)
    items: list[Use] = field(default_factory=list)
    dash: int = 0

    @property
    def type(self) -> ScalarType:
        """The type that Kubernetes gives to a scalar."""
        if self.style or self.tag.endswith(":str") or self.tag == "!":
            return "string"
        if self.text in _NULL:
            return "null"
        if _BOOL.fullmatch(self.text):
            return "bool"
        return "number" if _NUMBER.fullmatch(self.text) else "string"

    def pair(self, key: str) -> Pair | None:
        """The entry of that key; merged maps are searched after the map's own keys."""
        if self.kind != "map":
            return None
        merged: list[Node] = []
        for pair in self.pairs:
            if pair.key.text == key and pair.key.kind == "scalar":
                return pair
            if pair.is_merge:
                merged += [pair.node] if pair.node.kind == "map" else [use.node for use in pair.node.items]
        return next((found for one in merged if one is not self and (found := one.pair(key))), None)

    def get(self, *path: str) -> Node | None:
        """The node at the end of a path of keys; None if the path ends early or in null."""
        node: Node | None = self
        for key in path:
            found = node.pair(key) if node is not None else None
            node = found.node if found is not None else None
        return None if node is None or (node.kind == "scalar" and node.type == "null") else node

    def string(self, *path: str) -> str | None:
        """The text of the scalar at the end of a path, of any type; None if there is none."""
        node = self.get(*path)
        return node.text if node is not None and node.kind == "scalar" else None

    def maps(self, *path: str) -> list[Node]:
        """The maps in the list at the end of a path."""
        node = self.get(*path)
        return [use.node for use in node.items if use.node.kind == "map"] if node is not None else []


@dataclass(eq=False, slots=True)
class Use:
    """A node at a position: where it is written, or where an alias repeats it."""

    node: Node
    begin: int
    end: int
    line: int
    alias: bool = False


@dataclass(eq=False, slots=True)
class Pair(Use):
    """A map's entry."""

    key: Node = field(kw_only=True)

    @property
    def is_merge(self) -> bool:
        """Whether it is `<<: *other`."""
        return self.key.text == MERGE and not self.key.style and self.key.kind == "scalar"


@dataclass(frozen=True)
class Document:
    """One document of a file; `root` is None if it is empty."""

    root: Node | None


def parse(text: str) -> list[Document]:
    """The documents of a file.

    Raises:
        YamlProblem: it is not YAML, or exceeds the limits of nesting or expansion.
        MissingExtra: ruamel.yaml is not installed.
    """
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError, YAMLError
        from ruamel.yaml.reader import ReaderError
    except ModuleNotFoundError as error:
        raise MissingExtra("ruamel.yaml", "cli") from error
    try:
        documents = _by_libyaml(text)
        if documents is None:
            yaml = YAML(typ="safe", pure=True)
            yaml.Scanner = _scanner()
            documents = _Builder(text).build(yaml.parse(text))
    except ReaderError as error:
        line, column = place(text, error.position)
        raise YamlProblem(line, column, "a character that YAML does not allow", "Remove it.") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = f"{error.problem or error.context}"
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        raise YamlProblem(line, column, reason, _remedy(text, reason, line)) from None
    except YAMLError as error:
        raise YamlProblem(1, 1, str(error).partition("\n")[0], "Correct it.") from None
    for document in documents:
        _size(document.root, {}, 0)
    return documents


def _by_libyaml(text: str) -> list[Document] | None:
    """The same documents, ten times as fast; None if PyYAML has no libyaml here, or it refuses the text.

    Kubernetes' parser is a port of libyaml. It rejects some things that YAML 1.2 allows, and its errors say less: such
    texts are left to ruamel.yaml, as are those with characters that the two count differently.
    """
    try:
        yaml = importlib.import_module("yaml")
        loader = yaml.CSafeLoader
    except (ImportError, AttributeError):
        return None
    try:
        return _Builder(text).build(yaml.parse(text, Loader=loader)) if not _UNCOUNTED.search(text) else None
    except yaml.YAMLError:
        return None


@functools.cache
def _scanner() -> Any:
    """ruamel.yaml's, but with tabs allowed before a comment or a value, as in Kubernetes' parser."""
    from ruamel.yaml.scanner import Scanner

    class TabScanner(Scanner):
        def scan_to_next_token(self) -> None:
            super().scan_to_next_token()
            while not self.allow_simple_key and self.reader.peek() == "\t":
                self.reader.forward()
                super().scan_to_next_token()

    return TabScanner


def place(text: str, index: int) -> tuple[int, int]:
    """Line and column of a place in the text, from 1."""
    begin = text.rfind("\n", 0, index) + 1
    return text.count("\n", 0, index) + 1, index - begin + 1


def _remedy(text: str, reason: str, line: int) -> str:
    lines = text.split("\n")
    if "\\t" in reason or any("\t" in one[: len(one) - len(one.lstrip())] for one in lines[max(0, line - 2) : line]):
        return "Indent with spaces: YAML allows no tabs there."
    return "Correct the line; often it is the indentation, a missing quote or a missing space after a colon."


def _size(node: Node | None, known: dict[int, int], depth: int) -> int:
    """The number of nodes below `node` with aliases expanded; 0 in `known` marks one that is being counted."""
    if node is None:
        return 0
    found = known.get(id(node))
    if found == 0 or depth > DEEPEST:
        reason = "an alias that contains itself" if found == 0 else f"nested deeper than {DEEPEST} levels"
        raise YamlProblem(node.line, node.column, reason, "Kubernetes cannot represent it: write it out.")
    if found is None:
        known[id(node)] = 0
        below = [use.node for use in (*node.items, *node.pairs)]
        found = known[id(node)] = 1 + sum(_size(one, known, depth + 1) for one in below)
        if found > MOST_NODES:
            reason = f"more than {MOST_NODES} values with its aliases written out"
            raise YamlProblem(node.line, node.column, reason, "Use fewer aliases of aliases.")
    return found


class _Builder:
    """Builds nodes from events."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.anchors: dict[str, Node] = {}
        self.documents: list[Document] = []

    def build(self, events: Iterator[Any]) -> list[Document]:
        for event in events:
            if type(event).__name__ == "DocumentStartEvent":
                self.anchors = {}
                use = self._use(next(events), events, 0)
                empty = use.node.kind == "scalar" and use.node.type == "null"
                self.documents.append(Document(None if empty else use.node))
        return self.documents

    def _use(self, event: Any, events: Iterator[Any], depth: int) -> Use:
        kind = type(event).__name__
        begin, end = event.start_mark.index, event.end_mark.index
        if kind == "AliasEvent":
            node = self.anchors.get(event.anchor)
            if node is None:
                line, column = place(self.text, begin)
                raise YamlProblem(line, column, f"alias *{event.anchor} of nothing", f"Define &{event.anchor} before.")
            return Use(node, begin, end, event.start_mark.line + 1, alias=True)
        if depth > DEEPEST:
            reason = f"nested deeper than {DEEPEST} levels"
            raise YamlProblem(event.start_mark.line + 1, event.start_mark.column + 1, reason, "It cannot be a job.")
        node = self._node(event, kind, begin, end)
        if event.anchor:
            self.anchors[event.anchor] = node
        if kind == "MappingStartEvent":
            self._fill_map(node, events, depth)
        elif kind == "SequenceStartEvent":
            self._fill_list(node, event, events, depth)
        return Use(node, node.begin, node.end, node.line)

    def _node(self, event: Any, kind: str, begin: int, end: int) -> Node:
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        tag = str(event.tag or "")
        if kind == "ScalarEvent":
            return Node("scalar", begin, self._scalar_end(event, begin, end), line, column, event.value,
                        event.style or "", tag=tag)  # fmt: skip
        return Node("map" if kind == "MappingStartEvent" else "list", begin, end, line, column,
                    flow=bool(event.flow_style), tag=tag)  # fmt: skip

    def _scalar_end(self, event: Any, begin: int, end: int) -> int:
        """The end without the blank lines after a block scalar, unless `|+` keeps them."""
        if event.style not in ("|", ">") or "+" in self.text[begin:end].partition("\n")[0]:
            return int(end)
        return int(begin) + len(self.text[begin:end].rstrip())

    def _fill_map(self, node: Node, events: Iterator[Any], depth: int) -> None:
        for event in events:
            if type(event).__name__ == "MappingEndEvent":
                self._close(node, event, [pair.end for pair in node.pairs])
                return
            key = self._use(event, events, depth + 1)
            use = self._use(next(events), events, depth + 1)
            self._settle(key, use)
            node.pairs.append(Pair(use.node, use.begin, max(use.end, key.end), use.line, use.alias, key=key.node))

    def _settle(self, key: Use, value: Use) -> None:
        """Place an empty value after its colon, not after the comments that follow."""
        node, colon = value.node, self.text.find(":", key.end)
        if value.alias or node.kind != "scalar" or node.begin != node.end or self.text[key.end : colon].strip():
            return
        node.begin = node.end = value.begin = value.end = colon + 1
        node.line = value.line = key.line
        node.column = colon + 2 - (self.text.rfind("\n", 0, colon) + 1)

    def _fill_list(self, node: Node, start: Any, events: Iterator[Any], depth: int) -> None:
        at = start.end_mark.index
        node.dash = at if self.text[at : at + 1] == "-" else at - 1
        for event in events:
            if type(event).__name__ == "SequenceEndEvent":
                self._close(node, event, [use.end for use in node.items])
                return
            node.items.append(self._use(event, events, depth + 1))

    def _close(self, node: Node, event: Any, ends: list[int]) -> None:
        node.end = event.end_mark.index if node.flow else max([node.end, *ends])
