# SPDX-License-Identifier: Apache-2.0
"""One Python file, parsed without loss, with every node's place in bytes."""

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper


class NotUnderstood(Exception):
    """The file's syntax is newer than the parser, or broken."""


class Source:
    """A parsed file. ``text_of(node)`` is the node as written, byte for byte."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        try:
            self.module = cst.parse_module(data)
        except (cst.ParserSyntaxError, SyntaxError, ValueError, RecursionError) as error:
            reason = str(error).strip().splitlines()
            raise NotUnderstood(reason[0] if reason else type(error).__name__) from None
        if self.module.encoding != "utf-8" or data.startswith(b"\xef\xbb\xbf"):
            raise NotUnderstood(f"its encoding is {self.module.encoding}, not plain UTF-8")
        if self.module.bytes != data:
            raise NotUnderstood("the parser does not give back the same bytes")
        self.newline = self.module.default_newline

    @cached_property
    def _spans(self):
        wrapper = MetadataWrapper(self.module, unsafe_skip_copy=True)
        return wrapper.resolve(ByteSpanPositionProvider)

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """The node's first byte and the byte after its last, without white space around,
        with its own parentheses."""
        first = last = self._spans[node]
        if isinstance(node, cst.BaseExpression) and node.lpar:
            first, last = self._spans[node.lpar[0]], self._spans[node.rpar[-1]]
        return first.start, last.start + last.length

    def text_of(self, node: cst.CSTNode) -> str:
        start, end = self.span(node)
        return self.data[start:end].decode("utf-8")

    def line_start(self, node: cst.CSTNode) -> int:
        """Where the line begins that the node begins on."""
        return self.data.rfind(b"\n", 0, self.span(node)[0]) + 1

    def after_line(self, node: cst.CSTNode) -> int:
        """Where the line begins that follows the node's last line."""
        end = self.data.find(b"\n", max(self.span(node)[1] - 1, 0))
        return len(self.data) if end < 0 else end + 1

    def indent_of(self, node: cst.CSTNode) -> str:
        """The white space before the node on its line."""
        start = self.line_start(node)
        return self.data[start : self.span(node)[0]].decode("utf-8")


def dotted(node: cst.CSTNode) -> str:
    """``a.b.c`` for a chain of names, else an empty string."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        left = dotted(node.value)
        return f"{left}.{node.attr.value}" if left else ""
    return ""


@lru_cache(maxsize=16)
def parsed(data: bytes) -> Source:
    """The file parsed; the last few are kept, since a patch edits a file several times.

    Raises:
        NotUnderstood: see ``Source``.
    """
    return Source(data)


Definition = cst.ClassDef | cst.FunctionDef


def definitions(body: Sequence[cst.CSTNode], name: str) -> Iterator[Definition]:
    """Classes and functions of that name in a body, also under its if and try."""
    for statement in body:
        if isinstance(statement, Definition):
            if statement.name.value == name:
                yield statement
        elif isinstance(statement, cst.If | cst.Try | cst.With | cst.Else):
            yield from definitions(statements_of(statement), name)
            if isinstance(statement, cst.If) and statement.orelse:
                yield from definitions([statement.orelse], name)
            if isinstance(statement, cst.Try):
                for part in [*statement.handlers, statement.orelse, statement.finalbody]:
                    if part is not None:
                        yield from definitions(statements_of(part), name)


def statements_of(node: cst.CSTNode) -> Sequence[cst.CSTNode]:
    """The statements directly in a module, class, function or block."""
    body = getattr(node, "body", node)
    if isinstance(body, cst.IndentedBlock):
        return body.body
    return body if isinstance(body, list | tuple) else ()


def own_nodes(scope: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Every node inside ``scope``, not entering nested functions and classes."""
    return _walk(scope, Definition | cst.Lambda)


def all_nodes(scope: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Every node inside ``scope``."""
    return _walk(scope, ())


def _walk(scope: cst.CSTNode, closed) -> Iterator[cst.CSTNode]:
    waiting = list(reversed(scope.children))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, closed):
            waiting.extend(reversed(node.children))
