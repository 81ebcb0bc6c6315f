"""Lines of user code, counted in the source: all of them, and those that mention flashwarp."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

__all__ = ["code_lines", "lines_that_mention"]


def code_lines(*things: Callable[..., Any] | type) -> int:
    """Count lines of code, without docstrings, comments and empty lines."""
    return sum(len(_numbers(_tree(thing))) for thing in things)


def lines_that_mention(thing: Callable[..., Any]) -> int:
    """Count lines with `fw` or `flashwarp`, or with a name that was made by a call of them.

    Rows and ids that such an object hands out are data, and do not count.
    """
    tree = _tree(thing)
    names = {"fw", "flashwarp"}
    for node in ast.walk(tree):
        if isinstance(node, ast.withitem) and _mentions(node.context_expr, names):
            names |= _names_of(node.optional_vars)
        elif isinstance(node, ast.Assign) and _calls(node.value, {"fw", "flashwarp"}):
            names |= set().union(*(_names_of(target) for target in node.targets))
    arguments = {each.arg for each in ast.walk(tree) if isinstance(each, ast.arg)}
    names |= arguments & {"pipeline", "sampler", "array", "features"}
    return len(
        {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in names}
    )


def _tree(thing: Callable[..., Any] | type) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(thing)))


def _numbers(tree: ast.AST) -> set[int]:
    documented = (ast.FunctionDef, ast.ClassDef, ast.Module)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node) is not None
        and isinstance(node.body[0], ast.Expr)
    }  # fmt: skip
    return {
        number or 0
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt | ast.expr) and id(node) not in docstrings
        and not (isinstance(node, ast.Expr) and id(node.value) in docstrings)
        for number in (node.lineno, node.lineno if _has_body(node) else node.end_lineno)
    }  # fmt: skip


def _has_body(node: ast.AST) -> bool:
    return any(isinstance(child, ast.stmt) for child in ast.iter_child_nodes(node))


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node))


def _calls(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and _mentions(node.func, names)


def _names_of(node: ast.AST | None) -> set[str]:
    if node is None:
        return set()
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
