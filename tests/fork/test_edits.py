# SPDX-License-Identifier: Apache-2.0
"""Pins each verb: what it changes, that undoing is exact, and what it calls drift."""

import libcst as cst
import pytest

from fork.edits import (
    AddClassAttribute,
    AddImport,
    Assigns,
    Defines,
    Imports,
    InsertAfter,
    InsertBefore,
    ReplaceMethod,
    SetKeyword,
    SetReturn,
    SetValue,
    Splice,
    State,
    body_digest,
    splice,
)
from fork.source import NotUnderstood, Source, all_nodes

FILE = "pkg/cache.py"

SOURCE = '''\
"""A small module."""
import os
from pkg.base import Base  # the base

LIMIT   =   1  # odd spacing stays


class Cache(Base):
    size: int = 8  # bytes
    name = "cache"
    table = [
        1,
        2,
    ]

    def __init__(self, width):
        self.width = width
        # Pages(width=32) in a comment is no call
        self.pages = pkg.Pages(count=2,  width=32)  # keep

        class Inner:
            size = 9

    def sizes(self):
        def helper():
            return 7

        return [128]

    def run(self, items):
        """Runs."""
        for item in items:
            if item:
                found = item
            else:
                skipped = item
        return found

    @property
    def last(self):
        return self.width


def main():
    return Cache(3)
'''


def digest_of(text, name, scope_name=None):
    source = Source(text.encode())
    function = next(
        node
        for node in all_nodes(source.module)
        if isinstance(node, cst.FunctionDef) and node.name.value == name
    )
    return body_digest(source, function, scope_name or name)


def states(edit, text):
    return edit.find(Source(text if isinstance(text, bytes) else text.encode()))


# Each case: the edit, a piece of SOURCE that is there once, and what it becomes.
CASES = {
    "keyword": (
        SetKeyword(
            FILE, "Cache.__init__", call="pkg.Pages", keyword="width", old="32", new="self.w"
        ),
        "count=2,  width=32)",
        "count=2,  width=self.w)",
    ),
    "keyword, new value on several lines": (
        SetKeyword(FILE, "Cache", call="pkg.Pages", keyword="count", old="2", new="f(\n    2,\n)"),
        "count=2,",
        "count=f(\n    2,\n),",
    ),
    "return, nested function has its own": (
        SetReturn(FILE, "Cache.sizes", old="[128]", new="sizes([128])"),
        "return [128]",
        "return sizes([128])",
    ),
    "return of the nested function": (
        SetReturn(FILE, "Cache.sizes.helper", old="7", new="70"),
        "return 7",
        "return 70",
    ),
    "value in the module": (
        SetValue(FILE, "", target="LIMIT", old="1", new="22"),
        "LIMIT   =   1  # odd",
        "LIMIT   =   22  # odd",
    ),
    "value with annotation": (
        SetValue(FILE, "Cache", target="size", old="8", new="16"),
        "size: int = 8",
        "size: int = 16",
    ),
    "value of an attribute": (
        SetValue(FILE, "Cache.__init__", target="self.width", old="width", new="width * 2"),
        "self.width = width\n",
        "self.width = width * 2\n",
    ),
    "value in a nested class": (
        SetValue(FILE, "Cache.__init__.Inner", target="size", old="9", new="10"),
        "            size = 9",
        "            size = 10",
    ),
    "value on several lines": (
        SetValue(FILE, "Cache", target="table", old="[\n        1,\n        2,\n    ]", new="[]"),
        "table = [\n        1,\n        2,\n    ]\n",
        "table = []\n",
    ),
    "value in a loop's branch": (
        SetValue(FILE, "Cache.run", target="skipped", old="item", new="None"),
        "skipped = item",
        "skipped = None",
    ),
    "class attribute with its comment": (
        AddClassAttribute(FILE, "Cache", code="\n# Tokens.\npage: int = 64\n", after="name"),
        'name = "cache"\n',
        'name = "cache"\n    # Tokens.\n    page: int = 64\n',
    ),
    "class attribute after one of several lines": (
        AddClassAttribute(FILE, "Cache", code="page = 64", after="table"),
        "    ]\n\n",
        "    ]\n    page = 64\n\n",
    ),
    "class attribute whose name a nested class has": (
        AddClassAttribute(FILE, "Cache.__init__.Inner", code="name = 1", after="size"),
        "size = 9\n",
        "size = 9\n            name = 1\n",
    ),
    "import": (
        AddImport(FILE, "", code="from pkg.other import thing", after="pkg.base"),
        "# the base\n",
        "# the base\nfrom pkg.other import thing\n",
    ),
    "import on several lines": (
        AddImport(
            FILE, "", code="\nfrom pkg.other import (\n    a,\n    b as c,\n)\n", after="pkg.base"
        ),
        "# the base\n",
        "# the base\nfrom pkg.other import (\n    a,\n    b as c,\n)\n",
    ),
    "after a call's assignment": (
        InsertAfter(FILE, "Cache.__init__", anchor=Assigns("self.pages"), code="check(self)"),
        "# keep\n",
        "# keep\n        check(self)\n",
    ),
    "after an anchor in a loop's if": (
        InsertAfter(
            FILE, "Cache.run", anchor=Assigns("found"), code="if found:\n    log('größe 漢')"
        ),
        "found = item\n",
        "found = item\n                if found:\n                    log('größe 漢')\n",
    ),
    "after an import": (
        InsertAfter(FILE, "", anchor=Imports("pkg.base"), code="X = 1"),
        "# the base\n",
        "# the base\nX = 1\n",
    ),
    "after a method, a blank line first": (
        InsertAfter(
            FILE,
            "Cache",
            anchor=Defines("sizes"),
            code="\n\n    @hook\n    def more(self):\n        return 1\n",
        ),
        "return [128]\n",
        "return [128]\n\n    @hook\n    def more(self):\n        return 1\n",
    ),
    "after the file's last definition": (
        InsertAfter(FILE, "", anchor=Defines("main"), code="\n\nmain()"),
        "return Cache(3)\n",
        "return Cache(3)\n\nmain()\n",
    ),
    "before an assignment": (
        InsertBefore(FILE, "Cache.__init__", anchor=Assigns("self.width"), code="check(\n    1\n)"),
        "        self.width = width\n",
        "        check(\n            1\n        )\n        self.width = width\n",
    ),
    "before an anchor in an else": (
        InsertBefore(FILE, "Cache.run", anchor=Assigns("skipped"), code="count(item)"),
        "                skipped = item\n",
        "                count(item)\n                skipped = item\n",
    ),
    "before a nested function": (
        InsertBefore(FILE, "Cache.sizes", anchor=Defines("helper"), code="x = 1"),
        "        def helper():\n",
        "        x = 1\n        def helper():\n",
    ),
    "before the first statement": (
        InsertBefore(FILE, "", anchor=Imports("pkg.base"), code="import sys"),
        "from pkg.base",
        "import sys\nfrom pkg.base",
    ),
    "replaced method": (
        ReplaceMethod(
            FILE,
            "Cache.sizes",
            digest=digest_of(SOURCE, "sizes"),
            code="\ndef sizes(self):\n    return self._stock_sizes() + [64]\n",
        ),
        "    def sizes(self):\n        def helper():\n            return 7\n\n"
        "        return [128]\n",
        "    def _stock_sizes(self):\n        def helper():\n            return 7\n\n"
        "        return [128]\n\n"
        "    def sizes(self):\n        return self._stock_sizes() + [64]\n",
    ),
    "replaced method with a decorator": (
        ReplaceMethod(
            FILE,
            "Cache.last",
            digest=digest_of(SOURCE, "last"),
            code="@property\ndef last(self):\n    return 0",
        ),
        "    def last(self):\n        return self.width\n",
        "    def _stock_last(self):\n        return self.width\n\n"
        "    @property\n    def last(self):\n        return 0\n",
    ),
    "replaced function at the end of the module": (
        ReplaceMethod(
            FILE, "main", digest=digest_of(SOURCE, "main"), code="def main():\n    return 0"
        ),
        "def main():\n    return Cache(3)\n",
        "def _stock_main():\n    return Cache(3)\n\n\ndef main():\n    return 0\n",
    ),
}

# Text in front of SOURCE: bytes and characters no longer count alike.
PREFIXES = {"plain": "", "unicode": '# größe — 漢字 🚀\nTITLE = "ﬁ é 🚀"\n'}


@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
@pytest.mark.parametrize(("edit", "old", "new"), CASES.values(), ids=CASES)
def test_edit_changes_its_place_only_and_undoes(edit, old, new, prefix, newline):
    assert SOURCE.count(old) == 1
    pristine = (prefix + SOURCE).replace("\n", newline).encode()
    expected = (prefix + SOURCE.replace(old, new)).replace("\n", newline).encode()

    found = states(edit, pristine)
    assert (found.state, found.why) == (State.PENDING, "")
    edited = splice(pristine, list(found.splices))
    assert edited == expected
    undo = states(edit, edited)
    assert (undo.state, undo.why) == (State.APPLIED, "")
    assert splice(edited, list(undo.splices)) == pristine


@pytest.mark.parametrize("edit", [case[0] for case in CASES.values()], ids=CASES)
def test_description_names_file_and_scope(edit):
    assert edit.describe().startswith(FILE)
    assert edit.scope in edit.describe()
    assert "\n" not in edit.describe()


@pytest.mark.parametrize("edit", [case[0] for case in CASES.values()], ids=CASES)
def test_content_is_plain_and_whole(edit):
    content = edit.content()
    assert content["verb"] == type(edit).__name__
    assert content.keys() == {"verb", *vars(edit)}
    assert all(isinstance(value, str | list) for value in content.values())


# Sources without a line break at their end: edits of values still work.
@pytest.mark.parametrize(
    ("edit", "text", "expected"),
    [
        (SetValue(FILE, "", target="X", old="1", new="2"), "X = 1", "X = 2"),
        (SetValue(FILE, "", target="X", old="(1, 2)", new="(3,)"), "X = (1, 2)", "X = (3,)"),
        (
            SetReturn(FILE, "f", old="1", new="2"),
            "def f():\n    return 1",
            "def f():\n    return 2",
        ),
        (SetKeyword(FILE, "", call="F", keyword="k", old="1", new="2"), "F(k=1)", "F(k=2)"),
        (InsertBefore(FILE, "", anchor=Assigns("X"), code="Y = 1"), "X = 1", "Y = 1\nX = 1"),
        (
            InsertAfter(FILE, "", anchor=Assigns("X"), code="Y = 1"),
            "X = 1\nZ = 1",
            "X = 1\nY = 1\nZ = 1",
        ),
    ],
)
def test_no_line_break_at_the_end_of_the_file(edit, text, expected):
    found = states(edit, text)
    edited = splice(text.encode(), list(found.splices))
    assert edited.decode() == expected
    undo = states(edit, edited)
    assert undo.state is State.APPLIED
    assert splice(edited, list(undo.splices)).decode() == text


ONE_METHOD = "class C:\n    def f(self):\n        return 1"


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (InsertAfter(FILE, "", anchor=Assigns("X"), code="Y = 1"), "X = 1"),
        (AddImport(FILE, "", code="from a import b", after="c"), "from c import d"),
        (AddClassAttribute(FILE, "C", code="y = 1", after="x"), "class C:\n    x = 1"),
        (
            ReplaceMethod(
                FILE, "C.f", digest=digest_of(ONE_METHOD, "f"), code="def f(self):\n    return 2"
            ),
            ONE_METHOD,
        ),
    ],
    ids=["insert", "import", "attribute", "method"],
)
def test_nothing_is_added_after_a_last_line_without_line_break(edit, text):
    """Undoing could not tell whose the line break was."""
    assert states(edit, text).state is State.DRIFT


KEYWORD = SetKeyword(FILE, "C.f", call="F", keyword="k", old="32", new="64")
RETURN = SetReturn(FILE, "C.f", old="1", new="2")
VALUE = SetValue(FILE, "C", target="x", old="1", new="2")
ATTRIBUTE = AddClassAttribute(FILE, "C", code="# Why.\ny: int = 64", after="x")
IMPORT = AddImport(FILE, "", code="from a import b", after="c")
AFTER = InsertAfter(FILE, "C.f", anchor=Assigns("x"), code="check(x)")
BEFORE = InsertBefore(FILE, "C.f", anchor=Assigns("x"), code="check(x)")
ON_DEF = InsertAfter(FILE, "C", anchor=Defines("f"), code="\n\n@hook\ndef g(self):\n    pass\n")
REPLACE = ReplaceMethod(
    FILE,
    "C.f",
    digest=digest_of("def f(self):\n    return 1\n", "f"),
    code="def f(self):\n    return 2",
)

# Each case: the edit, a source it does not fit, and words the reason must have.
DRIFT = {
    # Nothing to anchor on.
    "class gone": (KEYWORD, "class D:\n    def f(self):\n        F(k=32)\n", ["'C'", "none"]),
    "method gone": (RETURN, "class C:\n    def g(self):\n        return 1\n", ["'f'", "none"]),
    "method is a module's function": (
        RETURN,
        "class C:\n    x = 1\ndef f():\n    return 1\n",
        ["'f'"],
    ),
    "call gone": (KEYWORD, "class C:\n    def f(self):\n        G(k=32)\n", ["call of F", "none"]),
    "call of another's F": (KEYWORD, "class C:\n    def f(self):\n        m.F(k=32)\n", ["none"]),
    "call in a string": (KEYWORD, "class C:\n    def f(self):\n        'F(k=32)'\n", ["none"]),
    "keyword gone": (KEYWORD, "class C:\n    def f(self):\n        F(32)\n", ["'k'", "none"]),
    "return gone": (RETURN, "class C:\n    def f(self):\n        pass\n", ["return", "none"]),
    "return of a nested function": (
        RETURN,
        "class C:\n    def f(self):\n        def g():\n            return 1\n",
        ["return", "none"],
    ),
    "bare return": (RETURN, "class C:\n    def f(self):\n        return\n", ["nothing", "'1'"]),
    "value only declared": (VALUE, "class C:\n    x: int\n", ["assignment to x", "none"]),
    "value in a method only": (VALUE, "class C:\n    def f(self):\n        x = 1\n", ["none"]),
    "attribute's neighbour gone": (ATTRIBUTE, "class C:\n    z = 1\n", ["attribute x", "none"]),
    "attribute's class is a function": (ATTRIBUTE, "def C():\n    x = 1\n", ["not a class"]),
    "attribute's neighbour under an if": (
        ATTRIBUTE,
        "class C:\n    if DEBUG:\n        x = 1\n",
        ["attribute x", "none"],
    ),
    "import's neighbour gone": (IMPORT, "import c\n", ["import from c", "none"]),
    "import's neighbour relative": (IMPORT, "from .c import d\n", ["none"]),
    "anchor gone": (
        AFTER,
        "class C:\n    def f(self):\n        y = 1\n",
        ["assignment to x", "none"],
    ),
    "anchor in a nested function": (
        AFTER,
        "class C:\n    def f(self):\n        def g():\n            x = 1\n",
        ["none"],
    ),
    # More than one.
    "two classes under if and else": (
        KEYWORD,
        "if A:\n    class C:\n        def f(self):\n            F(k=32)\n"
        "else:\n    class C:\n        def f(self):\n            F(k=32)\n",
        ["'C'", "found 2"],
    ),
    "two classes under elif": (
        VALUE,
        "if A:\n    class C:\n        x = 1\nelif B:\n    class C:\n        x = 1\n",
        ["found 2"],
    ),
    "two classes under try and except": (
        VALUE,
        "try:\n    class C:\n        x = 1\nexcept E:\n    class C:\n        x = 1\n",
        ["found 2"],
    ),
    "decoy class at the end": (VALUE, "class C:\n    x = 1\nclass C:\n    pass\n", ["found 2"]),
    "two methods": (
        RETURN,
        "class C:\n    def f(self):\n        return 1\n    def f(self):\n        return 1\n",
        ["'f'", "found 2"],
    ),
    "two calls": (
        KEYWORD,
        "class C:\n    def f(self):\n        F(k=32)\n        F(k=32)\n",
        ["found 2"],
    ),
    "second call in a nested function": (
        KEYWORD,
        "class C:\n    def f(self):\n        F(k=32)\n        g = lambda: F(k=32)\n",
        ["found 2"],
    ),
    "call inside the call": (
        KEYWORD,
        "class C:\n    def f(self):\n        F(F(k=32), k=32)\n",
        ["found 2"],
    ),
    "two returns": (
        RETURN,
        "class C:\n    def f(self):\n        if a:\n            return 1\n        return 1\n",
        ["found 2"],
    ),
    "two assignments": (VALUE, "class C:\n    x = 1\n    if A:\n        x = 1\n", ["found 2"]),
    "two attributes": (ATTRIBUTE, "class C:\n    x = 1\n    x = 2\n", ["found 2"]),
    "two imports": (IMPORT, "from c import d\nfrom c import e\n", ["found 2"]),
    "two anchors": (
        AFTER,
        "class C:\n    def f(self):\n        x = 1\n        x = 2\n",
        ["found 2"],
    ),
    "two methods to replace": (
        REPLACE,
        "class C:\n    def f(self):\n        return 1\n    def f(self):\n        return 1\n",
        ["found 2"],
    ),
    # The old value is another: the reason shows the value found.
    "keyword changed": (KEYWORD, "class C:\n    def f(self):\n        F(k=48)\n", ["'48'", "'32'"]),
    "return changed": (
        RETURN,
        "class C:\n    def f(self):\n        return [3]\n",
        ["'[3]'", "'1'"],
    ),
    "value changed": (VALUE, "class C:\n    x = 10\n", ["'10'", "'1'"]),
    "value in parentheses": (VALUE, "class C:\n    x = (1)\n", ["'(1)'", "'1'"]),
    "value with other spacing": (
        SetValue(FILE, "", target="X", old="a + 1", new="2"),
        "X = a+1\n",
        ["'a+1'", "'a + 1'"],
    ),
    "method changed": (
        REPLACE,
        "class C:\n    def f(self):\n        return 3\n",
        ["digest", "C.f"],
    ),
    "method has another parameter": (
        REPLACE,
        "class C:\n    def f(self, a):\n        return 1\n",
        ["digest"],
    ),
    # Half there, or there in another form.
    "attribute there, another value": (
        ATTRIBUTE,
        "class C:\n    x = 1\n    y: int = 32\n",
        ["already", "'y'", "y: int = 32"],
    ),
    "attribute there, elsewhere": (
        ATTRIBUTE,
        "class C:\n    x = 1\n    z = 1\n    # Why.\n    y: int = 64\n",
        ["already"],
    ),
    "attribute there without its comment": (
        ATTRIBUTE,
        "class C:\n    x = 1\n    y: int = 64\n",
        ["already"],
    ),
    "attribute is a method": (
        ATTRIBUTE,
        "class C:\n    x = 1\n    def y(self):\n        pass\n",
        ["already", "'y'", "def y(self):"],
    ),
    "attribute there twice": (
        ATTRIBUTE,
        "class C:\n    x = 1\n    # Why.\n    y: int = 64\n    y = 3\n",
        ["already"],
    ),
    "name imported from elsewhere": (
        IMPORT,
        "from c import d\nfrom z import b\n",
        ["already imports b"],
    ),
    "name imported as another": (IMPORT, "from c import d\nimport z as b\n", ["already imports b"]),
    "import there, elsewhere": (IMPORT, "from a import b\nfrom c import d\n", ["already"]),
    "import there twice": (
        IMPORT,
        "from c import d\nfrom a import b\nfrom a import b\n",
        ["already"],
    ),
    "inserted line there, elsewhere": (
        AFTER,
        "class C:\n    def f(self):\n        check(x)\n        x = 1\n",
        ["'check(x)'", "already"],
    ),
    "inserted line there twice": (
        AFTER,
        "class C:\n    def f(self):\n        x = 1\n        check(x)\n        check(x)\n",
        ["already"],
    ),
    "inserted line there with a comment": (
        AFTER,
        "class C:\n    def f(self):\n        x = 1\n        check(x)  # by hand\n        y = 1\n",
        ["already"],
    ),
    "inserted method there, other body": (
        ON_DEF,
        "class C:\n    def f(self):\n        pass\n\n    @hook\n    def g(self):\n        go()\n",
        ["def g(self):", "already"],
    ),
    "old method renamed, new one missing": (
        REPLACE,
        "class C:\n    def _stock_f(self):\n        return 1\n",
        ["in part"],
    ),
    "old method renamed, new one differs": (
        REPLACE,
        "class C:\n    def _stock_f(self):\n        return 1\n\n    def f(self):\n        go()\n",
        ["in part"],
    ),
    "new method there, old one not renamed": (
        REPLACE,
        "class C:\n    def f(self):\n        return 1\n\n    def f(self):\n        return 2\n",
        ["found 2"],
    ),
}


@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize(("edit", "text", "words"), DRIFT.values(), ids=DRIFT)
def test_drift_says_what_was_found(edit, text, words, newline):
    found = states(edit, text.replace("\n", newline))
    assert found.state is State.DRIFT
    assert found.splices == ()
    assert all(word in found.why for word in words), found.why


# Things of the same name that are not the anchor: none of them confuses the edit.
DECOYS = {
    "class of the same name inside another": (
        VALUE,
        "class Outer:\n    class C:\n        x = 1\n\n\nclass C:\n    x = ~1\n",
    ),
    "method of the same name in another class": (
        RETURN,
        "class D:\n    def f(self):\n        return 1\n"
        "class C:\n    def f(self):\n        return ~1\n",
    ),
    "class under if": (VALUE, "if A:\n    class C:\n        x = ~1\n"),
    "class under else": (VALUE, "if A:\n    pass\nelse:\n    class C:\n        x = ~1\n"),
    "class under try, else": (
        VALUE,
        "try:\n    pass\nexcept E:\n    pass\nelse:\n    class C:\n        x = ~1\n",
    ),
    "class under with": (VALUE, "with a:\n    class C:\n        x = ~1\n"),
    "async method": (RETURN, "class C:\n    async def f(self):\n        return ~1\n"),
    "compared, not assigned": (VALUE, "class C:\n    x == 1\n    x = ~1\n"),
    "assigned in a nested class": (VALUE, "class C:\n    x = ~1\n    class D:\n        x = 1\n"),
    "value shares its line": (VALUE, "class C:\n    w = 1; x = ~1; z = 1\n"),
    "class on one line": (VALUE, "class C: x = ~1\n"),
    "tab indentation": (RETURN, "class C:\n\tdef f(self):\n\t\treturn ~1\n"),
}


@pytest.mark.parametrize(("edit", "marked"), DECOYS.values(), ids=DECOYS)
def test_decoys_do_not_confuse(edit, marked):
    """``~1`` marks the place that becomes 2."""
    text = marked.replace("~1", "1")
    found = states(edit, text)
    assert found.state is State.PENDING, found.why
    assert splice(text.encode(), list(found.splices)).decode() == marked.replace("~1", "2")


def test_insertion_takes_over_tabs():
    text = "class C:\n\tdef f(self):\n\t\tx = 1\n"
    found = states(AFTER, text)
    assert splice(text.encode(), list(found.splices)).decode() == text + "\t\tcheck(x)\n"


@pytest.mark.parametrize(
    "line", ["x = 1; y = 2", "y = 2; x = 1", "y = x = 1; z = 3"], ids=["first", "last", "chain"]
)
@pytest.mark.parametrize("edit", [AFTER, BEFORE], ids=["after", "before"])
def test_anchor_that_shares_its_line_is_drift(edit, line):
    """Beside the line is not beside the anchor: another statement would come between."""
    found = states(edit, f"class C:\n    def f(self):\n        {line}\n")
    assert found.state is State.DRIFT
    assert "shares its line" in found.why


@pytest.mark.parametrize("edit", [AFTER, BEFORE], ids=["after", "before"])
def test_anchor_behind_a_colon_is_drift(edit):
    found = states(edit, "class C:\n    def f(self):\n        if a: x = 1\n")
    assert found.state is State.DRIFT


def test_before_a_comment_on_top_of_the_anchor():
    text = "class C:\n    def f(self):\n        a = 0\n        # about x\n        x = 1\n"
    found = states(BEFORE, text)
    edited = splice(text.encode(), list(found.splices)).decode()
    assert edited == text.replace("        # about x\n", "        check(x)\n        # about x\n")


def test_before_a_decorated_definition_is_before_its_decorator():
    text = "a = 0\n\n\n@first\n@second\ndef f():\n    pass\n"
    found = states(InsertBefore(FILE, "", anchor=Defines("f"), code="x = 1"), text)
    edited = splice(text.encode(), list(found.splices)).decode()
    assert edited == text.replace("@first", "x = 1\n@first")


def test_import_is_not_added_where_only_type_checkers_read():
    """The anchor moved under TYPE_CHECKING: there, the name would not exist at run time."""
    text = "if TYPE_CHECKING:\n    from c import d\n"
    assert states(IMPORT, text).state is State.DRIFT


METHOD = """\
def f(self, a=1):
    # first
    if a:
        x = g(a)  # why

        y = 2
    return x
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    # first\n", ""),
        ("  # why", "  # another reason"),
        ("  # why", ""),
        ("\n\n", "\n"),
        ("    return", "\n\n    # last\n    return"),
        ("def f", "# on top\n\ndef f"),
    ],
)
def test_digest_ignores_comments_and_blank_lines(old, new):
    assert METHOD.count(old) == 1
    assert digest_of(METHOD.replace(old, new), "f") == digest_of(METHOD, "f")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a=1", "a=2"),
        ("(self, a=1)", "(self, a=1, b=2)"),
        ("def f", "async def f"),
        ("def f", "@cached\ndef f"),
        ("g(a)", "g(b)"),
        ("    return x", "    return y"),
        ("        y = 2\n", ""),
        ("        y = 2", "    y = 2"),  # out of the if: no other character changes
        ("    return x", "        return x"),  # into it
    ],
)
def test_digest_sees_code(old, new):
    assert METHOD.count(old) == 1
    assert digest_of(METHOD.replace(old, new), "f") != digest_of(METHOD, "f")


@pytest.mark.parametrize("text", ["a\n    b", "a\n\nb", "a\n# b"], ids=["indent", "blank", "hash"])
def test_digest_sees_inside_strings(text):
    def method(value):
        return f'def f():\n    return """{value}"""\n'

    assert digest_of(method(text), "f") != digest_of(method("a\nb"), "f")


def test_digest_does_not_depend_on_place_or_line_breaks():
    nested = "class C:\n" + "".join(f"    {line}\n" for line in METHOD.splitlines())
    assert digest_of(nested, "f") == digest_of(METHOD, "f")
    assert digest_of(METHOD.replace("\n", "\r\n"), "f") == digest_of(METHOD, "f")


@pytest.mark.parametrize(
    ("splices", "expected"),
    [
        ([], b"abcdef"),
        ([Splice(1, 2, b"X")], b"aXcdef"),
        ([Splice(4, 5, b""), Splice(0, 1, b"XYZ")], b"XYZbcdf"),
        ([Splice(2, 2, b"X"), Splice(2, 4, b"Y")], b"abXYef"),
        ([Splice(1, 3, b"X"), Splice(3, 3, b"Y")], b"aXYdef"),
        ([Splice(6, 6, b"X")], b"abcdefX"),
    ],
)
def test_splice(splices, expected):
    assert splice(b"abcdef", splices) == expected


@pytest.mark.parametrize(
    "splices",
    [
        [Splice(1, 3, b""), Splice(2, 4, b"")],
        [Splice(1, 5, b""), Splice(2, 3, b"")],
        [Splice(1, 3, b"X"), Splice(1, 3, b"X")],
        [Splice(1, 3, b"X"), Splice(2, 2, b"Y")],
    ],
)
def test_overlapping_splices_are_refused(splices):
    with pytest.raises(ValueError, match="overlap"):
        splice(b"abcdef", splices)


BOM = b"\xef\xbb\xbf"
LATIN = "# -*- coding: latin-1 -*-\n# é é é é é é\n".encode("latin-1")


@pytest.mark.parametrize("edit", [VALUE, ATTRIBUTE], ids=["value", "attribute"])
@pytest.mark.parametrize(
    "prefix", [BOM, LATIN, b"# coding: unheard-of\n"], ids=["BOM", "latin-1", "?"]
)
def test_other_encodings_are_edited_rightly_or_not_at_all(edit, prefix):
    body = b"class C:\n    x = 1\n"
    wanted = {
        VALUE: b"class C:\n    x = 2\n",
        ATTRIBUTE: body + b"    # Why.\n    y: int = 64\n",
    }[edit]
    try:
        found = states(edit, prefix + body)
    except NotUnderstood:
        return
    if found.state is not State.DRIFT:
        assert splice(prefix + body, list(found.splices)) == prefix + wanted


@pytest.mark.parametrize(
    "data",
    [
        b"match x:\n  case 1\n",
        b"def f(:\n",
        b"x = 1\n\0",
        b"x = '\xff'\n",
        b"if x:\n\ty\n        z\n",
    ],
    ids=["match", "def", "NUL", "not UTF-8", "tabs and blanks"],
)
def test_broken_source_is_not_understood(data):
    with pytest.raises(NotUnderstood) as caught:
        Source(data)
    assert str(caught.value)
    assert "\n" not in str(caught.value)
