# SPDX-License-Identifier: Apache-2.0
"""The verbs of a patch: one structural edit of one upstream file each.

An edit names what it anchors on (file, scope, names, the old value) and nothing
else of upstream. On a tree it is found ``PENDING`` (the old form, exactly once),
``APPLIED`` (the new form, exactly once) or ``DRIFT`` (anything else, with what
was found). Both directions are splices of bytes, so everything outside the edit
stays as it was, and undoing it gives back the pristine bytes.

    SetKeyword("pkg/a.py", "C.__init__", call="F", keyword="k", old="32", new="64")
    SetReturn("pkg/a.py", "C.sizes", old="[128]", new="sizes([128])")
    SetValue("pkg/a.py", "", target="LIMIT", old="1", new="2")
    AddClassAttribute("pkg/a.py", "C", code="page: int = 64", after="name")
    AddImport("pkg/a.py", code="from pkg.b import f", after="pkg.c")
    InsertAfter("pkg/a.py", "C.run", anchor=Assigns("x"), code="check(x)")
    InsertBefore(...)
    ReplaceMethod("pkg/a.py", "C.run", digest="…", code="def run(self): …")
"""

import hashlib
import textwrap
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from enum import StrEnum

import libcst as cst

from fork.source import (
    Definition,
    Source,
    all_nodes,
    definitions,
    dotted,
    own_nodes,
    statements_of,
)


class State(StrEnum):
    """Where one edit stands on one tree."""

    PENDING = "pending"
    APPLIED = "applied"
    DRIFT = "drift"


@dataclass(frozen=True)
class Splice:
    """Bytes ``start`` to ``end`` become ``text``."""

    start: int
    end: int
    text: bytes


@dataclass(frozen=True)
class Found:
    """What an edit found: its state, the splices to the other side, or why not."""

    state: State
    splices: tuple[Splice, ...] = ()
    why: str = ""


class _Drift(Exception):
    pass


@dataclass(frozen=True)
class Edit(ABC):
    """One structural edit.

    Attributes:
        file: path inside the tree.
        scope: dotted path of the class or function the edit is in; "" is the module.
    """

    file: str
    scope: str

    def find(self, source: Source) -> Found:
        """Where the edit stands in the file."""
        try:
            return self._find(source, self._scope(source))
        except _Drift as drift:
            return Found(State.DRIFT, why=str(drift))

    @abstractmethod
    def _find(self, source: Source, scope: cst.CSTNode) -> Found: ...

    def _scope(self, source: Source) -> cst.CSTNode:
        node: cst.CSTNode = source.module
        for name in filter(None, self.scope.split(".")):
            node = _only(
                list(definitions(statements_of(node), name)),
                f"class or function {name!r} (of {self.scope!r})",
            )
        return node

    def describe(self) -> str:
        """The edit in one line, for people."""
        where = f"{self.file}, {self.scope}" if self.scope else self.file
        return " ".join(f"{where}: {self._what()}".split())

    @abstractmethod
    def _what(self) -> str: ...

    def content(self) -> dict[str, object]:
        """The edit as plain data, for the recipe's digest."""
        data: dict[str, object] = {"verb": type(self).__name__}
        for field in fields(self):
            value = getattr(self, field.name)
            data[field.name] = value.content() if isinstance(value, Anchor) else value
        return data


def _only(found: list, what: str):
    if len(found) != 1:
        raise _Drift(f"needs exactly one {what}, found {len(found) or 'none'}")
    return found[0]


def _swap(source: Source, node: cst.CSTNode, old: str, new: str, what: str) -> Found:
    """PENDING where the node is ``old`` as written, APPLIED where it is ``new``."""
    start, end = source.span(node)
    text = source.text_of(node)
    old, new = (x.replace("\n", source.newline) for x in (old, new))
    if text == old:
        return Found(State.PENDING, (Splice(start, end, new.encode()),))
    if text == new:
        return Found(State.APPLIED, (Splice(start, end, old.encode()),))
    shown = text if len(text) < 80 else text[:77] + "…"
    raise _Drift(f"{what} is {shown!r}, expected {old!r}")


@dataclass(frozen=True)
class SetKeyword(Edit):
    """In ``scope``, the only call of ``call`` gets keyword ``keyword`` from old to new."""

    call: str
    keyword: str
    old: str
    new: str

    def _what(self) -> str:
        return f"{self.call}({self.keyword}=…) from {self.old} to {self.new}"

    def _find(self, source: Source, scope: cst.CSTNode) -> Found:
        calls = [
            node
            for node in all_nodes(scope)
            if isinstance(node, cst.Call) and dotted(node.func) == self.call
        ]
        call = _only(calls, f"call of {self.call}")
        given = [a for a in call.args if a.keyword and a.keyword.value == self.keyword]
        argument = _only(given, f"keyword {self.keyword!r} in the call of {self.call}")
        what = f"{self.call}({self.keyword}=…)"
        return _swap(source, argument.value, self.old, self.new, what)


@dataclass(frozen=True)
class SetReturn(Edit):
    """The only return value of function ``scope`` goes from old to new."""

    old: str
    new: str

    def _what(self) -> str:
        return f"return {self.old} becomes return {self.new}"

    def _find(self, source: Source, scope: cst.CSTNode) -> Found:
        returns = [n for n in own_nodes(scope) if isinstance(n, cst.Return)]
        value = _only(returns, f"return in {self.scope}").value
        if value is None:
            raise _Drift(f"{self.scope} returns nothing, expected {self.old!r}")
        return _swap(source, value, self.old, self.new, f"the value {self.scope} returns")


@dataclass(frozen=True)
class SetValue(Edit):
    """The only assignment to ``target`` in ``scope`` goes from old to new."""

    target: str
    old: str
    new: str

    def _what(self) -> str:
        return f"{self.target} = {self.old} becomes {self.new}"

    def _find(self, source: Source, scope: cst.CSTNode) -> Found:
        found = [n for n in own_nodes(scope) if self.target in _targets(n) and n.value]
        value = _only(found, f"assignment to {self.target}").value
        return _swap(source, value, self.old, self.new, self.target)


def _targets(node: cst.CSTNode) -> list[str]:
    if isinstance(node, cst.Assign):
        return [dotted(x.target) for x in node.targets]
    if isinstance(node, cst.AnnAssign):
        return [dotted(node.target)]
    return []


@dataclass(frozen=True)
class Anchor(ABC):
    """Which statement an insertion stands beside."""

    @abstractmethod
    def matches(self, statement: cst.CSTNode) -> bool:
        """Whether this is the statement."""

    @abstractmethod
    def __str__(self) -> str: ...

    def content(self) -> list[object]:
        """The anchor as plain data, for the recipe's digest."""
        return [type(self).__name__, *(getattr(self, f.name) for f in fields(self))]


@dataclass(frozen=True)
class Assigns(Anchor):
    """The assignment to ``target``."""

    target: str

    def matches(self, statement: cst.CSTNode) -> bool:
        if not isinstance(statement, cst.SimpleStatementLine):
            return False
        return any(self.target in _targets(part) for part in statement.body)

    def __str__(self) -> str:
        return f"assignment to {self.target}"


@dataclass(frozen=True)
class Defines(Anchor):
    """The definition of class or function ``name``."""

    name: str

    def matches(self, statement: cst.CSTNode) -> bool:
        return isinstance(statement, Definition) and statement.name.value == self.name

    def __str__(self) -> str:
        return f"definition of {self.name}"


@dataclass(frozen=True)
class Imports(Anchor):
    """The statement that imports from ``module``."""

    module: str

    def matches(self, statement: cst.CSTNode) -> bool:
        if not isinstance(statement, cst.SimpleStatementLine):
            return False
        return any(
            isinstance(part, cst.ImportFrom)
            and part.module is not None
            and not part.relative
            and dotted(part.module) == self.module
            for part in statement.body
        )

    def __str__(self) -> str:
        return f"import from {self.module}"


@dataclass(frozen=True)
class _Insert(Edit):
    """New lines beside the only statement in ``scope`` that ``anchor`` matches.

    ``code`` gets the anchor's indentation in place of its own. One line break at its
    start is dropped, so that it may be written as a block; a second is a blank line.
    """

    anchor: Anchor
    code: str

    def _find(self, source: Source, scope: cst.CSTNode) -> Found:
        statements = [n for n in own_nodes(scope) if self.anchor.matches(n)]
        statement = _only(statements, str(self.anchor))
        indent = source.indent_of(statement)
        if indent.strip() or _shares_line(statement):
            raise _Drift(f"the {self.anchor} shares its line with another statement")
        return self._at(source, scope, statement, indent)

    def _at(self, source: Source, scope, statement, indent: str) -> Found:
        new = self._text(source, indent)
        place = self._place(source, statement)
        if place == len(source.data) and not source.data.endswith(b"\n"):
            raise _Drift(f"the {self.anchor} ends the file without a new line")
        start = place if self._goes_after else place - len(new)
        present = start >= 0 and source.data[start : start + len(new)] == new
        others = self._elsewhere(source, scope, new) - present
        if others:
            raise _Drift(f"{self._first_line()!r} is already there, but not as we add it")
        if present:
            return Found(State.APPLIED, (Splice(start, start + len(new), b""),))
        return Found(State.PENDING, (Splice(place, place, new),))

    _goes_after = True

    def _place(self, source: Source, statement: cst.CSTNode) -> int:
        return source.after_line(statement)

    def _text(self, source: Source, indent: str) -> bytes:
        text = textwrap.indent(_dedented(self.code), indent)
        return text.replace("\n", source.newline).encode("utf-8")

    def _first_line(self) -> str:
        """The first line that names something: no comment, no decorator."""
        lines = _dedented(self.code).strip().splitlines()
        return next((x for x in lines if x and x[0] not in "#@"), lines[0]).strip()

    def _elsewhere(self, source: Source, scope: cst.CSTNode, new: bytes) -> int:
        """How often the first line of the new code stands in the scope."""
        start, end = (0, len(source.data))
        if isinstance(scope, Definition):
            start, end = source.span(scope)
        lines = source.data[start:end].decode("utf-8").splitlines()
        first = self._first_line()
        with_comment = (f"{first} #", f"{first}  #")
        return sum(x.strip() == first or x.strip().startswith(with_comment) for x in lines)


def _shares_line(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and len(statement.body) > 1


def _dedented(code: str) -> str:
    return textwrap.dedent(code.removeprefix("\n")).rstrip() + "\n"


@dataclass(frozen=True)
class InsertAfter(_Insert):
    """New lines after the anchor statement."""

    def _what(self) -> str:
        return f"after the {self.anchor}, add {self._first_line()!r}"


@dataclass(frozen=True)
class InsertBefore(_Insert):
    """New lines before the anchor statement, and before the comment on top of it."""

    _goes_after = False

    def _what(self) -> str:
        return f"before the {self.anchor}, add {self._first_line()!r}"

    def _place(self, source: Source, statement: cst.CSTNode) -> int:
        first = statement
        if isinstance(statement, Definition) and statement.decorators:
            first = statement.decorators[0]
        for line in reversed(statement.leading_lines):
            if line.comment is None:
                break
            first = line.comment
        return source.line_start(first)


@dataclass(frozen=True)
class AddImport(Edit):
    """``code`` (one ``from … import …``) after the only import from module ``after``.

    ``scope`` is the module. Drift where another import already binds one of the names.
    """

    code: str
    after: str

    def _what(self) -> str:
        return f"add {' '.join(self.code.split())!r}"

    def _find(self, source: Source, scope: cst.CSTNode) -> Found:
        insert = InsertAfter(self.file, self.scope, Imports(self.after), self.code)
        anchors = [n for n in own_nodes(scope) if insert.anchor.matches(n)]
        if any(source.indent_of(n) for n in anchors):  # under TYPE_CHECKING, say
            raise _Drift(f"the {insert.anchor} is inside a block")
        found = insert._find(source, scope)
        if found.state is State.PENDING:
            wanted = _imported(cst.parse_module(_dedented(self.code)))
            bound = wanted & _imported(source.module)
            if bound:
                raise _Drift(f"the file already imports {', '.join(sorted(bound))}")
        return found


def _imported(module: cst.Module) -> set[str]:
    names = set()
    for node in own_nodes(module):
        if isinstance(node, cst.ImportFrom | cst.Import) and not isinstance(
            node.names, cst.ImportStar
        ):
            for alias in node.names:
                names.add(alias.evaluated_alias or alias.evaluated_name.split(".")[0])
    return names


@dataclass(frozen=True)
class AddClassAttribute(Edit):
    """Class ``scope`` gets the attribute that ``code`` assigns, after attribute ``after``.

    Comment lines above the assignment in ``code`` are added with it. Drift where
    the class already has a different attribute of that name.
    """

    code: str
    after: str

    def _what(self) -> str:
        return f"add class attribute {self._name()!r}"

    def _name(self) -> str:
        parsed = cst.parse_module(_dedented(self.code))
        return next(t for n in own_nodes(parsed) for t in _targets(n))

    def _find(self, source: Source, scope: cst.CSTNode) -> Found:
        if not isinstance(scope, cst.ClassDef):
            raise _Drift(f"{self.scope} is not a class")
        insert = InsertAfter(self.file, self.scope, Assigns(self.after), self.code)
        direct = statements_of(scope)
        anchor = _only([s for s in direct if insert.anchor.matches(s)], f"attribute {self.after}")
        found = insert._at(source, scope, anchor, source.indent_of(anchor))
        name = self._name()
        own = [s for s in direct if Assigns(name).matches(s) or Defines(name).matches(s)]
        if len(own) != (found.state is State.APPLIED):
            shown = source.text_of(own[0]).splitlines()[0] if own else "nothing"
            raise _Drift(f"{self.scope} already has {name!r}: {shown!r}")
        return found


@dataclass(frozen=True)
class ReplaceMethod(Edit):
    """Function ``scope`` gets a new body; the old one stays beside it under another name.

    ``code`` is the whole new definition, decorators included. ``digest`` is
    ``body_digest`` of the definition it replaces: any change of code, but not of
    comments or blank lines, is drift. The old definition is kept as
    ``_stock_<name>``, so that the new one may call it and ``revert`` needs no copy.
    """

    digest: str
    code: str

    def _what(self) -> str:
        return f"replace the body of {self.scope.rsplit('.', 1)[-1]}"

    def _scope(self, source: Source) -> cst.CSTNode:
        outer, _, _ = self.scope.rpartition(".")
        return InsertAfter(self.file, outer, Defines("_"), "_")._scope(source)

    def _find(self, source: Source, scope: cst.CSTNode) -> Found:
        name = self.scope.rsplit(".", 1)[-1]
        stock = f"_stock_{name}"
        body = statements_of(scope)
        kept = list(definitions(body, stock))
        old = _only(kept or list(definitions(body, name)), f"function {name!r}")
        seen = body_digest(source, old, name)
        if seen != self.digest:
            raise _Drift(f"the body of {self.scope} has digest {seen}, expected {self.digest}")
        indent = source.indent_of(old)
        insert = InsertAfter(self.file, self.scope, Defines(old.name.value), self.code)
        text = insert._text(source, indent)
        if not isinstance(scope, cst.ClassDef):
            text = source.newline.encode() + text
        text = source.newline.encode() + text
        place = source.after_line(old)
        if place == len(source.data) and not source.data.endswith(b"\n"):
            raise _Drift(f"{self.scope} ends the file without a new line")
        start, end = source.span(old.name)
        present = source.data[place : place + len(text)] == text
        if bool(kept) != present or len(list(definitions(body, name))) != 1:
            raise _Drift(f"{self.scope} is replaced in part only")
        if kept:
            undo = (Splice(start, end, name.encode()), Splice(place, place + len(text), b""))
            return Found(State.APPLIED, undo)
        do = (Splice(start, end, stock.encode()), Splice(place, place, text))
        return Found(State.PENDING, do)


def body_digest(source: Source, function: Definition, name: str) -> str:
    """16 hex digits over a definition's code, without comments, blank lines and white
    space at the ends of lines, under the name ``name``."""
    bare = function.with_changes(name=cst.Name(name), leading_lines=()).visit(_Bare())
    text = cst.Module(body=[bare]).code
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


class _Bare(cst.CSTTransformer):
    """Removes comments, blank lines and white space at the ends of lines."""

    def leave_Comment(self, original_node, updated_node):
        return cst.RemoveFromParent()

    def leave_EmptyLine(self, original_node, updated_node):
        return cst.RemoveFromParent()

    def leave_TrailingWhitespace(self, original_node, updated_node):
        return cst.TrailingWhitespace()

    def leave_Newline(self, original_node, updated_node):
        return cst.Newline()


def splice(data: bytes, splices: list[Splice]) -> bytes:
    """``data`` after ``splices``.

    Raises:
        ValueError: two splices overlap.
    """
    out = []
    at = 0
    for part in sorted(splices, key=lambda s: (s.start, s.end)):
        if part.start < at:
            raise ValueError("two edits overlap")
        out += [data[at : part.start], part.text]
        at = part.end
    return b"".join([*out, data[at:]])
