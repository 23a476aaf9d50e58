"""libyaml and ruamel.yaml say the same of a file, to the place in the text; what libyaml refuses is read still."""

from __future__ import annotations

import io
import itertools
import json
from typing import Any

import pytest
from ruamel.yaml import YAML

from lastgasp.jobs.acjob import tree
from lastgasp.jobs.acjob.check import source_of
from lastgasp.jobs.acjob.patch import GOALS, goals_of, patch
from lastgasp.jobs.acjob.tree import Document, Node, Use, YamlProblem, parse
from support.acjob import NAME, bare, ready

yaml = pytest.importorskip("yaml", reason="PyYAML, for libyaml")
if not yaml.__with_libyaml__:
    pytest.skip("PyYAML is built without libyaml", allow_module_level=True)


def rewritten(flow: bool | None, sequence: int, offset: int) -> str:
    out, writer = io.StringIO(), YAML(typ="rt" if flow is None else "safe", pure=True)
    writer.indent(mapping=2, sequence=sequence, offset=offset)
    writer.default_flow_style = flow
    writer.dump(YAML(typ="safe", pure=True).load(ready("recover,dump")), out)
    return out.getvalue()


PARTS = """\
%YAML 1.1
---   # first
a: &a [1, 'two', "th\\"ree\\
  four", {five: , six: &b}]
? key
: plain words
  on two lines   # comment

b: !!map
  x: |+
    kept

  y: >-
    folded
      more


  # between
  z: !own {}
empty:
nothing: ~   # comment
tab:\t1\t# comment
wide: 漢字 🚀 é   # 注释　🚀
<<: [*a]
list:
- - deep
  -
- &last last
...
---
- 1
"""

FORMS = {
    "bare": bare(),
    "mindspore": bare("mindspore"),
    "ready": ready("recover,dump"),
    "windows": ready().replace("\n", "\r\n"),
    "no-last-newline": bare().rstrip("\n"),
    "json": json.dumps(YAML(typ="safe", pure=True).load(ready()), indent=2),
    "braces": rewritten(True, 2, 0),
    "flat-lists": rewritten(False, 2, 0),
    "deep-lists": rewritten(None, 4, 2),
    "two": f"{bare()}---\n{ready()}...\n---\n# nothing\n",
    "parts": PARTS,
    "parts-windows": PARTS.replace("\n", "\r\n"),
    "tab": bare().replace("framework: pytorch ", "framework:\tpytorch\t"),
}
WITH_JOBS = [name for name in FORMS if not name.startswith("parts")]


def said(documents: list[Document]) -> list[Any]:
    """All that a tree holds, with the order in which nodes are met in the place of aliases."""
    known: dict[int, int] = {}

    def use(one: Use) -> tuple[Any, ...]:
        return one.begin, one.end, one.line, one.alias, node(one.node)

    def node(one: Node | None) -> Any:
        if one is None or id(one) in known:
            return None if one is None else known[id(one)]
        known[id(one)] = len(known)
        places = one.begin, one.end, one.line, one.column, one.dash
        pairs = [(node(pair.key), use(pair)) for pair in one.pairs]
        return one.kind, places, one.text, one.style, one.flow, one.tag, pairs, [use(item) for item in one.items]

    return [node(document.root) for document in documents]


def by_ruamel(text: str, monkeypatch: pytest.MonkeyPatch) -> list[Document]:
    with monkeypatch.context() as patched:
        patched.setattr(tree, "_by_libyaml", lambda text: None)
        return parse(text)


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_both_give_the_same_tree(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = tree._by_libyaml(text)
    assert fast is not None
    assert said(fast) == said(by_ruamel(text, monkeypatch))


@pytest.mark.parametrize(
    ("form", "goal"), [*itertools.product(WITH_JOBS, ("dump", "recover")), *(("bare", one) for one in GOALS)]
)
def test_both_give_the_same_patch(form: str, goal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(NAME, FORMS[form].encode())
    fast = patch(source, goals_of(goal))
    monkeypatch.setattr(tree, "_by_libyaml", lambda text: None)
    slow = patch(source_of(NAME, FORMS[form].encode()), goals_of(goal))
    assert (fast.after, fast.diagnoses, fast.notes) == (slow.after, slow.diagnoses, slow.notes)


@pytest.mark.parametrize(
    "text",
    [
        bare() + "...\nkind: ConfigMap\n",  # a document without dashes
        "\ufeff" + bare(),  # libyaml's places leave it out
        bare().replace("team/train:1", '"a\x85b\u2028c"'),  # ends of lines to libyaml
    ],
)
def test_what_libyaml_does_not_take_is_read_by_ruamel(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tree._by_libyaml(text) is None
    assert said(parse(text)) == said(by_ruamel(text, monkeypatch))


@pytest.mark.parametrize("text", ["a: [\n", "a: b: c\n", "a:\n\tb: c\n", "a: *b\n", "a\x07: b\n", "&a [" * 200])
def test_errors_are_the_same(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(YamlProblem) as fast:
        parse(text)
    with pytest.raises(YamlProblem) as slow:
        by_ruamel(text, monkeypatch)
    assert str(fast.value) == str(slow.value)


def test_without_pyyaml_ruamel_reads_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(yaml, "CSafeLoader")
    assert tree._by_libyaml(bare()) is None
    assert len(parse(bare())) == 1
