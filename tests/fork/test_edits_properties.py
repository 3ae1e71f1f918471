# SPDX-License-Identifier: Apache-2.0
"""Pins, on generated sources: edits undo exactly, apply once, and never write over drift."""

import keyword
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fork.edits import (
    AddClassAttribute,
    AddImport,
    Assigns,
    InsertAfter,
    InsertBefore,
    SetKeyword,
    SetReturn,
    SetValue,
    State,
    splice,
)
from fork.source import Source

FILE = "pkg/m.py"
FEW = settings(max_examples=50, deadline=None)

RESERVED = {"Pages", "pages", "width", "sizes", "self", "extra", "check", "thing", "base", "pkg"}
names = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True).filter(
    lambda name: not keyword.iskeyword(name) and name not in RESERVED
)
numbers = st.integers(min_value=1, max_value=999)
# Text for comments and strings: several bytes a character, no control or quote characters.
texts = st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Z"), exclude_characters="\"'\\{}"),
    max_size=12,
)


@dataclass(frozen=True)
class Generated:
    """A source around one target class, and where its anchors are."""

    text: str
    newline: str
    cls: str
    indent: str
    pad: str
    value: int

    def again(self, line: str, level: int) -> str:
        """``line`` on a line of its own, ``level`` deep in the class, before what follows."""
        return f"{line}\n{self.pad}{self.indent * level}"

    @property
    def data(self) -> bytes:
        return self.text.replace("\n", self.newline).encode()

    def edits(self):
        """One edit of each verb that a generated source has a place for."""
        init, old = f"{self.cls}.__init__", str(self.value)
        return (
            SetKeyword(FILE, init, call="Pages", keyword="width", old=old, new="self.extra"),
            SetReturn(FILE, f"{self.cls}.sizes", old=f"[{old}]", new=f"check(\n  [{old}],\n)"),
            SetValue(FILE, self.cls, target="width", old=old, new=f"{old} * 2"),
            AddClassAttribute(FILE, self.cls, code="# ü\nextra: int = 64", after="width"),
            AddImport(FILE, "", code="from pkg.new import thing", after="pkg.base"),
            InsertAfter(FILE, init, anchor=Assigns("self.pages"), code="if 1:\n    check(2)"),
            InsertBefore(FILE, f"{self.cls}.sizes", anchor=Assigns("before"), code="check(1)"),
        )


@st.composite
def sources(draw):
    cls = draw(names).capitalize() + "X"
    value = draw(numbers)
    indent = draw(st.sampled_from(["  ", "    ", "\t", "        "]))

    def noise(level=0):
        """Blank lines, comments, strings, assignments, decoys: nothing that is an anchor."""
        pad = indent * level
        kinds = {
            "blank": lambda: "\n",
            "comment": lambda: f"{pad}# {draw(texts)} Pages(width={value})\n",
            "string": lambda: f'{pad}text_{draw(names)} = "{draw(texts)}"\n',
            "block": lambda: f'{pad}"""{draw(texts)}\n  {draw(texts)}"""\n',
            "call": lambda: f"{pad}Pages_{draw(names)}(width={value})\n",
            "compound": lambda: f"{pad}for i_{draw(names)} in x:\n{pad}{indent}pass\n",
        }
        return "".join(
            kinds[k]() for k in draw(st.lists(st.sampled_from(sorted(kinds)), max_size=3))
        )

    def tail():
        return draw(st.sampled_from(["", "  # é 漢 🚀", "\t# Pages(width=1)", "   "]))

    def decoy():
        """A class with every anchor in it, under another name or one level down."""
        body = (
            f"{{p}}class {{n}}:\n{{p}}{indent}width = {value}\n"
            f"{{p}}{indent}def sizes(self):\n{{p}}{indent * 2}return [{value}]\n"
        )
        name, nested = draw(
            st.sampled_from([(f"{cls}Y", False), (f"my_{cls}", False), (cls, True)])
        )
        if nested:
            return f"class Outer_{draw(names)}:\n" + body.format(p=indent, n=name)
        return body.format(p="", n=name)

    under = draw(st.sampled_from(["", "if x:\n", "try:\n"]))
    pad = indent if under else ""
    lines = [
        f"{noise(1)}{indent}width: int = {value}{tail()}\n{noise(1)}",
        f"{indent}def __init__(self):{tail()}\n{noise(2)}"
        f"{indent * 2}self.pages = Pages(a,  width={value}, b=[1]){tail()}\n{noise(2)}",
        f"{indent}def sizes(self):\n{noise(2)}{indent * 2}before = 1\n"
        f"{noise(2)}{indent * 2}return [{value}]{tail()}\n",
    ]
    body = f"class {cls}(Base):{tail()}\n" + "".join(lines)
    # Under a block, every line moves in; strings of several lines move too, consistently.
    body = "".join(pad + line if line.strip() else line for line in body.splitlines(keepends=True))
    end = {"": "", "if x:\n": "else:\n    pass\n", "try:\n": "finally:\n    pass\n"}[under]
    text = f"{noise()}from pkg.base import Base{tail()}\n{noise()}"
    text += f"{decoy() if draw(st.booleans()) else ''}{under}{body}{end}"
    text += f"{decoy() if draw(st.booleans()) else ''}{noise()}last = 1\n"
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    return Generated(text, newline, cls, indent, pad, value)


def applied(data: bytes, edits) -> bytes:
    """``data`` with the pending ones of ``edits`` done, as the engine does it."""
    source = Source(data)
    found = [edit.find(source) for edit in edits]
    assert not [f.why for f in found if f.state is State.DRIFT]
    return splice(data, [s for f in found if f.state is State.PENDING for s in f.splices])


@FEW
@given(sources())
def test_apply_and_revert_is_the_identity(generated):
    edits = generated.edits()
    source = Source(generated.data)
    assert [(e.find(source).state, e.find(source).why) for e in edits] == [(State.PENDING, "")] * 7
    once = applied(generated.data, edits)
    assert once != generated.data
    after = Source(once)
    assert {edit.find(after).state for edit in edits} == {State.APPLIED}
    assert applied(once, edits) == once
    undone = splice(once, [s for edit in edits for s in edit.find(after).splices])
    assert undone == generated.data


@FEW
@given(sources(), st.permutations(range(7)))
def test_edits_do_not_depend_on_their_order(generated, order):
    """One at a time, in any order, gives the same file as all at once."""
    edits = generated.edits()
    data = generated.data
    for number in order:
        data = applied(data, [edits[number]])
    assert data == applied(generated.data, edits)


@FEW
@given(sources(), st.integers(0, 6))
def test_lines_outside_the_edit_stay(generated, number):
    """Every line of the pristine file but one is in the edited one, in order."""
    edit = generated.edits()[number]
    before = generated.data.splitlines(keepends=True)
    after = applied(generated.data, [edit]).splitlines(keepends=True)
    start = next(i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    kept = len(before) - start
    while before[len(before) - kept :] != after[len(after) - kept :]:
        kept -= 1
    assert len(before) - start - kept <= 1


# A mutation of the anchor, and the verbs (by number in ``edits()``) that it concerns.
MUTATIONS = {
    "class renamed": ({0, 1, 2, 3, 5, 6}, lambda g: (f"class {g.cls}(", f"class {g.cls}Q(")),
    "class defined again": (
        {0, 1, 2, 3, 5, 6},
        lambda g: ("last = 1\n", f"class {g.cls}:\n{g.indent}pass\n"),
    ),
    "call renamed": ({0}, lambda g: ("= Pages(a", "= Pagez(a")),
    "call doubled": ({0}, lambda g: ("= Pages(a", f"= Pages(width={g.value}) + Pages(a")),
    "keyword renamed": ({0}, lambda g: ("(a,  width=", "(a,  breadth=")),
    "keyword's value": ({0}, lambda g: (f"(a,  width={g.value}", f"(a,  width={g.value + 1}")),
    "return's value": (
        {1},
        lambda g: (f"{g.indent}return [{g.value}]", f"{g.indent}return [{g.value}0]"),
    ),
    "value": ({2}, lambda g: (f"width: int = {g.value}", f"width: int = {g.value}0")),
    "neighbour renamed": ({2, 3}, lambda g: ("width: int", "breadth: int")),
    "attribute there": ({3}, lambda g: ("width: int", g.again("extra = 1", 1) + "width: int")),
    "import gone": ({4}, lambda g: ("from pkg.base", "from pkg.base2")),
    "import doubled": ({4}, lambda g: ("last = 1\n", "from pkg.base import Other\n")),
    "name imported": ({4}, lambda g: ("last = 1\n", "from z import thing\n")),
    "assignment renamed": ({5}, lambda g: ("self.pages =", "self.pagez =")),
    "assignment doubled": (
        {5},
        lambda g: ("self.pages =", g.again("self.pages = 0", 2) + "self.pages ="),
    ),
    "second anchor renamed": ({6}, lambda g: ("before = 1", "afterwards = 1")),
}


@pytest.mark.parametrize(("concerns", "mutate"), MUTATIONS.values(), ids=MUTATIONS)
@settings(max_examples=12, deadline=None)
@given(generated=sources())
def test_mutated_anchor_is_drift(concerns, mutate, generated):
    text = generated.text
    old, new = mutate(generated)
    head, mark, rest = text.partition(f"class {generated.cls}(")
    if old.startswith(("from", "class", "last")):
        assert text.count(old) == 1
        mutated = text.replace(old, new)
    else:  # the target class only: a decoy before or after may hold the same words
        assert old in rest
        mutated = head + mark + rest.replace(old, new, 1)
    mutated = mutated.replace("\n", generated.newline).encode()
    assert mutated != generated.data
    for number, edit in enumerate(generated.edits()):
        found = edit.find(Source(mutated))
        if number in concerns:
            assert found.state is State.DRIFT, (edit.describe(), mutated.decode())
            assert found.why
            assert not found.splices
        else:
            assert found.state is State.PENDING, (edit.describe(), found.why)
