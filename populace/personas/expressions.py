"""Expressions over whole columns: Python's own syntax, evaluated by numpy, without eval.

``'young' if age < 30 else 'old'``, ``age >= 22 or education != 'phd'``, ``income in ('low',
'none')``, ``round(age / 10) * 10``. Names are columns; there are no attributes, no subscripts, and
no functions but the few below.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shared.errors import InvalidInputError

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: np.logical_and,  # as who knows pandas writes it
    ast.BitOr: np.logical_or,
}
_UNARY: dict[type, Callable[[Any], Any]] = {
    ast.Not: np.logical_not,
    ast.Invert: np.logical_not,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_MANY = 1 << 16
_FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "abs": (np.abs, 1, 1),
    "floor": (np.floor, 1, 1),
    "ceil": (np.ceil, 1, 1),
    "sqrt": (np.sqrt, 1, 1),
    "log": (np.log, 1, 1),
    "exp": (np.exp, 1, 1),
    # Two by two: numpy takes a third argument for the place of the result.
    "min": (lambda *values: functools.reduce(np.minimum, values), 1, _MANY),
    "max": (lambda *values: functools.reduce(np.maximum, values), 1, _MANY),
    "round": (lambda value, digits=0: np.round(value, int(digits)), 1, 2),
}
"""Name to function, and to the least and the greatest number of arguments."""


class Expression:
    """An expression over columns.

    Args:
        text: the expression.
        known: names that it may use.

    Raises:
        InvalidInputError: it can't be read, or uses what it may not.
    """

    def __init__(self, text: str, known: list[str]) -> None:
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise InvalidInputError(f"the expression {text!r} can't be read: {error.msg}") from None
        self.names: list[str] = []
        self._check(self._tree, known)

    def _check(self, node: ast.AST, known: list[str]) -> None:
        if isinstance(node, ast.Name):
            if node.id not in known:
                there = ", ".join(known) or "none so far"
                raise InvalidInputError(
                    f"the expression {self.text!r} uses {node.id!r}, which is no attribute before "
                    f"it (there are: {there})"
                )
            if node.id not in self.names:
                self.names.append(node.id)
            return
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else "?"
            if name not in _FUNCTIONS or node.keywords:
                raise InvalidInputError(
                    f"the expression {self.text!r} calls {name!r}; there are "
                    f"{', '.join(sorted(_FUNCTIONS))}"
                )
            _, least, most = _FUNCTIONS[name]
            starred = any(isinstance(a, ast.Starred) for a in node.args)
            if starred or not least <= len(node.args) <= most:
                wanted = f"{least}" if least == most else f"{least} or more"
                raise InvalidInputError(
                    f"the expression {self.text!r}: {name} takes {wanted} values, "
                    f"not {len(node.args)}"
                )
            for argument in node.args:
                self._check(argument, known)
            return
        self._check_operators(node)
        if not isinstance(node, _ALLOWED):
            raise InvalidInputError(
                f"the expression {self.text!r} holds {type(node).__name__}, which is not allowed"
            )
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.operator, ast.cmpop, ast.boolop, ast.unaryop)):
                self._check(child, known)

    def _check_operators(self, node: ast.AST) -> None:
        operators: list[ast.AST] = []
        known: Mapping[type, Any] = {}
        if isinstance(node, ast.BinOp):
            operators, known = [node.op], _BINARY
        elif isinstance(node, ast.UnaryOp):
            operators, known = [node.op], _UNARY
        elif isinstance(node, ast.Compare):
            operators, known = list(node.ops), {**_COMPARE, ast.In: None, ast.NotIn: None}
        elif isinstance(node, ast.Constant) and not isinstance(node.value, (bool, int, float, str)):
            raise InvalidInputError(
                f"the expression {self.text!r} holds {node.value!r}; values are numbers and texts"
            )
        for one in operators:
            if type(one) not in known:
                raise InvalidInputError(
                    f"the expression {self.text!r} holds the operator {type(one).__name__}, which "
                    "is not allowed"
                )

    def evaluate(self, columns: Mapping[str, Any], size: int) -> Any:
        """The values, an array of ``size``.

        Args:
            columns: arrays by name, of numbers or of texts.
            size: their length.

        Raises:
            InvalidInputError: an operation doesn't fit its values.
        """
        try:
            with np.errstate(all="ignore"):
                return np.broadcast_to(self._value(self._tree, columns), (size,))
        except (TypeError, ValueError, np.exceptions.DTypePromotionError) as error:
            raise InvalidInputError(
                f"the expression {self.text!r} can't be evaluated: {error}"
            ) from None

    def _value(self, node: ast.AST, columns: Mapping[str, Any]) -> Any:
        match node:
            case ast.Constant():
                return np.asarray(node.value)
            case ast.Name():
                return columns[node.id]
            case ast.BinOp():
                left, right = self._value(node.left, columns), self._value(node.right, columns)
                return _BINARY[type(node.op)](left, right)
            case ast.UnaryOp():
                return _UNARY[type(node.op)](self._value(node.operand, columns))
            case ast.BoolOp():
                values = [self._value(value, columns) for value in node.values]
                join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
                found = values[0]
                for value in values[1:]:
                    found = join(found, value)
                return found
            case ast.Compare():
                return self._compare(node, columns)
            case ast.IfExp():
                return np.where(
                    self._value(node.test, columns),
                    self._value(node.body, columns),
                    self._value(node.orelse, columns),
                )
            case ast.Call(func=ast.Name(id=name)):
                return _FUNCTIONS[name][0](*(self._value(a, columns) for a in node.args))
        raise InvalidInputError(f"the expression {self.text!r} can't be evaluated")

    def _compare(self, node: ast.Compare, columns: Mapping[str, Any]) -> Any:
        found: Any = True
        left = self._value(node.left, columns)
        for kind, part in zip(node.ops, node.comparators, strict=True):
            if isinstance(kind, (ast.In, ast.NotIn)):
                if not isinstance(part, (ast.Tuple, ast.List, ast.Set)):
                    raise InvalidInputError(
                        f"the expression {self.text!r}: after 'in' stands a list, such as "
                        "('a', 'b')"
                    )
                listed = np.asarray([self._value(item, columns).item() for item in part.elts])
                one = np.isin(left, listed, invert=isinstance(kind, ast.NotIn))
                right = left
            else:
                right = self._value(part, columns)
                one = _COMPARE[type(kind)](left, right)
            found = np.logical_and(found, one)
            left = right
        return found


_ALLOWED = (
    ast.Constant,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.IfExp,
    ast.Tuple,
    ast.List,
    ast.Set,
    ast.Load,
)
