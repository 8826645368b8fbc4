"""Conditions on document measures: `where: "classifier.score >= 0.7 and language == 'en'"`.

    where = Where.parse("0.3 <= classifier.score < 0.7 and language in ['en', 'de']")
    where.columns                     # ("classifier.score", "language")
    where.holds(table)                # (documents,) bool

Comparisons (`<  <=  >  >=  ==  !=  in  not in`) of columns, numbers and texts, joined by `and`, `or`, `not` and
brackets. Nothing is ever evaluated as Python: the text is parsed to a tree, and a tree that holds anything else is
refused. A comparison with a value that is missing (null or NaN) does not hold, `!=` neither.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MAX_CHARS = 1_000  # so that no condition is nested too deep for the parser

_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
}


@dataclass(frozen=True)
class Where:
    """A condition. See the top of this module."""

    text: str  # in one form: what differs in spaces and brackets only is the same
    tree: ast.expr

    @classmethod
    def parse(cls, text: str) -> Where:
        """Raises ValueError that quotes what is not understood."""
        if len(text) > MAX_CHARS:
            raise ValueError(f"a condition has at most {MAX_CHARS:,} characters, this one {len(text):,}")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            raise ValueError(f"{text!r} is not a condition ({reason}); write one as {_EXAMPLE}") from None
        _check(tree)
        return cls(ast.unparse(tree), tree)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it asks for, in the order of the text."""
        return tuple(dict.fromkeys(_columns(self.tree)))

    def holds(self, table: pa.Table) -> np.ndarray:
        """For which rows it holds: (rows,) bool. Raises ValueError where a column cannot be compared so."""
        return _holds(self.tree, table)


_EXAMPLE = "\"classifier.score >= 0.7 and language == 'en'\""


def _check(node: ast.expr) -> None:
    """Raises ValueError for a tree with anything but conditions in it."""
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            _check(value)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        _check(node.operand)
    elif isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        for op, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, ast.In | ast.NotIn):
                if not _is_list(right):
                    raise ValueError(f"`{ast.unparse(right)}` is not a list of values, as in ['en', 'de']")
                sides.remove(right)
            elif type(op) not in _COMPARED:
                raise ValueError(f"`{ast.unparse(node)}` compares in a way that conditions do not have")
        for side in sides:
            if _column(side) is None and not _is_constant(side):
                raise ValueError(f"`{ast.unparse(side)}` is neither a column, a number nor a text in quotes")
        if all(_column(side) is None for side in sides):
            raise ValueError(f"`{ast.unparse(node)}` asks for no column")
    elif _column(node) is None:
        raise ValueError(f"`{ast.unparse(node)}` is not a condition; write one as {_EXAMPLE}")


def _column(node: ast.expr) -> str | None:
    """`classifier.score`, if the node is such a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _column(node.value)
        return None if before is None else f"{before}.{node.attr}"
    return None


def _is_constant(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return isinstance(node.operand, ast.Constant) and type(node.operand.value) in (int, float)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float, str, bool)


def _is_list(node: ast.expr) -> bool:
    return isinstance(node, ast.List | ast.Tuple) and bool(node.elts) and all(map(_is_constant, node.elts))


def _columns(tree: ast.expr) -> Iterator[str]:
    name = _column(tree)
    if name is not None:
        yield name
        return
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.expr):
            yield from _columns(child)


def _holds(node: ast.expr, table: pa.Table) -> np.ndarray:
    if isinstance(node, ast.BoolOp):
        join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
        return np.asarray(join.reduce([_holds(value, table) for value in node.values]))
    if isinstance(node, ast.UnaryOp):
        return ~_holds(node.operand, table)
    try:
        if not isinstance(node, ast.Compare):
            return _as_mask(_value(node, table).cast(pa.bool_()), table.num_rows)
        out, left = np.ones(table.num_rows, bool), node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            out &= _compared(op, left, right, table)
            left = right
    except (pa.ArrowException, NotImplementedError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"`{ast.unparse(node)}` cannot be decided: {reason}") from None
    return out


def _compared(op: ast.cmpop, left: ast.expr, right: ast.expr, table: pa.Table) -> np.ndarray:
    if isinstance(op, ast.In | ast.NotIn):
        column = _value(left, table)
        values = pa.array(ast.literal_eval(right))
        if _is_text(values.type) != _is_text(column.type):
            raise TypeError(f"the column is {column.type}, the list {values.type}")
        values = values.cast(column.type)
        found = pc.is_in(column, value_set=values)
        found = pc.invert(found) if isinstance(op, ast.NotIn) else found
        return _as_mask(pc.and_(found, pc.is_valid(column)), table.num_rows)
    return _as_mask(_COMPARED[type(op)](_value(left, table), _value(right, table)), table.num_rows)


def _value(node: ast.expr, table: pa.Table) -> Any:
    """A column, with NaN as null, or a constant as a scalar."""
    name = _column(node)
    if name is None:
        return pa.scalar(ast.literal_eval(node))
    column = table[name]
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return pc.if_else(pc.is_nan(column), None, column) if pa.types.is_floating(column.type) else column


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _as_mask(found: Any, rows: int) -> np.ndarray:
    mask = np.asarray(pc.fill_null(found, False))
    return np.broadcast_to(mask, rows).astype(bool)
