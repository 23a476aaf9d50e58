"""Edits of any YAML: what was put is there afterwards, everything else is as it was; or it is refused."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from lastgasp.jobs.acjob.edit import CannotEdit, Edits, Quoted
from lastgasp.jobs.acjob.tree import Node, parse

words = st.sampled_from(["a", "on", "8000", "x: y", "", "# no", "- z", "multi\nline\n", "\ttab", "é", "it's", '"', "~"])
scalars = st.one_of(words, st.integers(-5, 9999), st.booleans(), st.none())
keys = st.sampled_from(["labels", "env", "on", "a b", "k1", "x:y", "annotations", "1"])
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=12,
)
maps = st.dictionaries(keys, trees, min_size=1, max_size=5)


def text_of(tree: Any, flow: bool | None, sequence: int, offset: int) -> str:
    out, yaml = io.StringIO(), YAML(typ="rt" if flow is None else "safe", pure=True)
    yaml.indent(mapping=2, sequence=sequence, offset=offset)
    yaml.default_flow_style = flow
    yaml.dump(tree, out)
    return out.getvalue()


def load(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def maps_of(node: Node) -> list[tuple[tuple[Any, ...], Node]]:
    """All maps with the path to each."""
    found: list[tuple[tuple[Any, ...], Node]] = [((), node)] if node.kind == "map" else []
    inner = [(pair.key.text, pair.node) for pair in node.pairs] + [(n, use.node) for n, use in enumerate(node.items)]
    return found + [((step, *path), one) for step, child in inner for path, one in maps_of(child)]


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        # A key may have been read as another type, as 1 or on.
        tree = tree[step] if isinstance(tree, list) else next(v for k, v in tree.items() if key_text(k) == step)
    return tree


def key_text(key: Any) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(maps, st.sampled_from([None, False, True]), st.sampled_from([(2, 0), (4, 2)]), st.data(), st.booleans())
def test_what_was_put_is_there_and_nothing_else_has_changed(
    tree: dict[str, Any], flow: bool | None, indent: tuple[int, int], data: st.DataObject, windows: bool
) -> None:
    text = text_of(tree, flow, *indent)
    text = text.replace("\n", "\r\n") if windows and "multi" not in text else text
    documents = parse(text)
    assert documents[0].root is not None
    path, node = data.draw(st.sampled_from(maps_of(documents[0].root)))
    edits = Edits(text, documents)
    item = {"name": "X", "value": Quoted("on")}
    try:
        edits.put(node, ("new", "deep"), Quoted("8000"))
        edits.append(node, ("env2",), item)
        edits.append(node, ("env",), item)
        after, _ = edits.apply()
    except CannotEdit:
        there = at(load(text), path)
        without_braces = node.flow and text[node.begin] != "{"  # [a: 1] is a list with a map in it
        assert without_braces or ("env" in there and not isinstance(there["env"], list | None))
        return
    expected = load(text)
    place = at(expected, path)
    place["new"], place["env2"] = {"deep": "8000"}, [item]
    place["env"] = [*(place.get("env") or []), item]
    assert load(after) == expected
    lines = iter(after.splitlines())
    if not node.flow and "env" not in at(load(text), path):
        assert all(line in lines for line in text.splitlines())  # in order, with new ones between


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("m:\n  a: 1\n\n# end\n", 'm:\n  a: 1\n  b: "2"\n\n# end\n'),
        ("m: {a: 1}\n", 'm: {a: 1, b: "2"}\n'),
        ("m: {}   # none\n", 'm: {b: "2"}   # none\n'),
        ("m:   # none\nn: 1\n", 'm:   # none\n  b: "2"\nn: 1\n'),
        ("m: ~\n", 'm: \n  b: "2"\n'),
        ("m:", 'm:\n  b: "2"'),
        ("{m: {a: 1,}, n: 1}", '{m: {a: 1, b: "2",}, n: 1}'),
        ("{m: , n: 1}", '{m: {b: "2"} , n: 1}'),
        ("? m\n: a: 1\n", '? m\n: a: 1\n  b: "2"\n'),
        ("m: !!map\n  a: 1\n", 'm: !!map\n  a: 1\n  b: "2"\n'),
        ("m: &x\n  a: 1\nn: *x\n", 'm: &x\n  a: 1\n  b: "2"\nn: *x\n'),
        ("m:\n  a: |+\n    x\n\nn: 1\n", 'm:\n  a: |+\n    x\n\n  b: "2"\nn: 1\n'),
        ("m:\n  b: &v 1   # one\n", 'm:\n  b: &v "2"   # one\n'),
        ("n: &v 1\nm:\n  b: *v   # as n\n", 'n: &v 1\nm:\n  b: "2"   # as n\n'),
        ("x: &x\n  b: 1\nm:\n  <<: *x\n", 'x: &x\n  b: 1\nm:\n  <<: *x\n  b: "2"\n'),
        ('x: &x\n  b: "2"\nm:\n  <<: *x\n', 'x: &x\n  b: "2"\nm:\n  <<: *x\n'),
        ("m:\n  b:\n", 'm:\n  b: "2"\n'),
        ("m:\n  b:   # none\n", 'm:\n  b: "2"   # none\n'),
        ("m: {b: }\n", 'm: {b: "2" }\n'),
        ("m:\n  a: 1\t# a tab\n", 'm:\n  a: 1\t# a tab\n  b: "2"\n'),
        ("m:\t# a tab\n  b:\t1\n", 'm:\t# a tab\n  b:\t"2"\n'),
        ("m:\n  b: '1'\n", 'm:\n  b: "2"\n'),
    ],
)
def test_how_a_value_is_put(before: str, after: str) -> None:
    documents = parse(before)
    assert documents[0].root is not None
    edits = Edits(before, documents)
    edits.put(documents[0].root, ("m", "b"), Quoted("2"))
    assert edits.apply()[0] == after


def put_and_apply(edits: Edits, root: Node) -> str:
    edits.put(root, ("m", "b"), "2")
    return edits.apply()[0]


@pytest.mark.parametrize(
    "before", ["m: text\n", "m: [1]\n", "m: *x\n", "m: &x ~\nn: *x\n", "m:\n  b: &v 1\nn: *v\n", "m: {b: &v , n: *v}\n"]
)
def test_what_cannot_be_put_is_refused(before: str) -> None:
    before = f"x: &x ~\n{before}" if before == "m: *x\n" else before
    documents = parse(before)
    assert documents[0].root is not None
    edits = Edits(before, documents)
    with pytest.raises(CannotEdit):
        put_and_apply(edits, documents[0].root)
