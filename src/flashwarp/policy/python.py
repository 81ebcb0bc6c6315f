"""A policy's three functions, from Python to C++: the few statements and expressions they need.

The result runs on GPUs and on the CPU device like any other policy. Translated code means the same
as in Python, with the exceptions in `docs/caches.md`: numbers are unsigned and have 64 bits.
Everything else is refused, with its line.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator

from flashwarp.errors import CompileError

_STRUCT = """\
struct {name} {{
  // Where C++ leaves the result open.
  FW_DEVICE static uint64_t left(uint64_t a, uint64_t b) {{ return b < 64 ? a << b : 0; }}
  FW_DEVICE static uint64_t right(uint64_t a, uint64_t b) {{ return b < 64 ? a >> b : 0; }}
  FW_DEVICE static uint64_t quotient(uint64_t a, uint64_t b) {{ return b != 0 ? a / b : 0; }}
  FW_DEVICE static uint64_t remainder(uint64_t a, uint64_t b) {{ return b != 0 ? a % b : 0; }}
  FW_DEVICE static uint64_t lowest_bit(uint64_t a) {{
    const uint32_t low = uint32_t(a), high = uint32_t(a >> 32);
    if (low != 0) return fw::base::lowest_bit(low);
    return high != 0 ? 32 + fw::base::lowest_bit(high) : fw::cache::kNoWay;
  }}
  FW_DEVICE static uint64_t popcount(uint64_t a) {{
    return fw::base::popcount(uint32_t(a)) + fw::base::popcount(uint32_t(a >> 32));
  }}
  // A number beyond 32 bits is no way, not the way that its lower half names.
  FW_DEVICE static uint32_t way_of(uint64_t a) {{
    return a < fw::cache::kNoWay ? uint32_t(a) : fw::cache::kNoWay;
  }}
  // How many rounds a range has. Its bounds have signs: range(n - 1) has none where n is 0.
  FW_DEVICE static uint64_t rounds(uint64_t first, uint64_t end, uint64_t step) {{
    return int64_t(first) < int64_t(end) ? (end - first - 1) / step + 1 : 0;
  }}

  FW_DEVICE static void on_hit(const fw::cache::geometry& g, uint64_t way, uint64_t seen) {{
    [[maybe_unused]] const fw::cache::hit_view p_cache = {{g}};
    [[maybe_unused]] uint64_t p_way = way;
    [[maybe_unused]] uint64_t p_seen = seen;
{on_hit}  }}
  FW_DEVICE static void on_fill(fw::cache::set_view& p_lines, uint32_t way) {{
    [[maybe_unused]] uint64_t p_way = way;
    [[maybe_unused]] fw::cache::set_view& p_same = p_lines;
{on_fill}  }}
  FW_DEVICE static uint32_t choose_victim(fw::cache::set_view& p_lines) {{
{choose_victim}    return fw::cache::kNoWay;
  }}
}};
"""

# What objects have: attributes, and whether they may be set; methods, and how many arguments.
_ATTRIBUTES: dict[str, dict[str, bool]] = {
    "p_cache": {},
    "p_lines": {
        "line": False,
        "resident": False,
        "candidates": False,
        "referenced": False,
        "dirty": False,
        "prefetched": False,
        "hand": True,
        "next": True,
    },
}
_METHODS: dict[str, dict[str, int]] = {
    "p_cache": {"ways": 0, "word": 1, "set_word": 3, "mark": 1},
    "p_lines": {"ways": 0, "word": 1, "set_word": 3, "line_at": 1, "clear_mark": 1, "has": 2},
}
_FUNCTIONS = {"lowest_bit": 1, "popcount": 1}

_INFIX: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_CALLED: dict[type[ast.AST], str] = {
    ast.FloorDiv: "quotient",
    ast.Mod: "remainder",
    ast.LShift: "left",
    ast.RShift: "right",
}


def policy_source(
    name: str,
    on_hit: Callable[..., object] | None,
    on_fill: Callable[..., object] | None,
    choose_victim: Callable[..., object],
    keeps_words: bool = True,
) -> str:
    """Write the C++ struct of a policy from its Python functions.

    Without `keeps_words` there are no words that they could use.

    Raises
    ------
    CompileError
        For what has no translation, with file and line.
    """
    hit = ("p_cache", "p_way", "p_seen")
    parts = {
        "on_hit": on_hit and _Function(on_hit, *hit, words=keeps_words).text(),
        "on_fill": on_fill and _Function(on_fill, "p_lines", "p_way", words=keeps_words).text(),
        "choose_victim": _Function(
            choose_victim, "p_lines", returns=True, words=keeps_words
        ).text(),
    }
    return _STRUCT.format(name=name, **{part: text or "" for part, text in parts.items()})


class _Function:
    """One function's body as C++."""

    def __init__(
        self,
        function: Callable[..., object],
        *parameters: str,
        words: bool,
        returns: bool = False,
    ) -> None:
        self._function = function
        self._owner = parameters[0]
        self._words = words
        self._returns = returns
        self._loops = 0
        try:
            lines, self._first = inspect.getsourcelines(function)
            tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
        except (OSError, TypeError, SyntaxError) as error:
            raise CompileError(f"the source of {function!r} cannot be read: {error}") from error
        if not isinstance(tree, ast.FunctionDef):
            raise CompileError(f"{function!r} is no function defined with def")
        self._tree = tree
        given = [argument.arg for argument in tree.args.args]
        if len(given) != len(parameters) or ast.unparse(tree.args) != _plain(tree.args):
            wanted = ", ".join(each.removeprefix("p_") for each in parameters)
            raise CompileError(f"{tree.name} takes {len(parameters)} parameters: ({wanted})")
        self._names = dict(zip(given, parameters, strict=True))
        scope = inspect.getclosurevars(function)
        self._constants = {**scope.globals, **scope.nonlocals}

    def text(self) -> str:
        body = self._tree.body
        if ast.get_docstring(self._tree) is not None:
            body = body[1:]
        for node in ast.walk(self._tree):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            if stored and isinstance(node, ast.Name) and node.id not in self._names:
                self._names[node.id] = f"v_{node.id}"
        variables = [name for name in self._names.values() if name.startswith("v_")]
        declared = [f"[[maybe_unused]] uint64_t {name} = 0;" for name in variables]
        lines = list(self._block(body))
        if self._loops:
            declared.append("uint32_t steps = 0;")
        return "".join(f"    {line}\n" for line in (*declared, *lines))

    def _fail(self, node: ast.AST, why: str) -> CompileError:
        line = self._first + getattr(node, "lineno", 1) - 1
        where = f"{self._function.__code__.co_filename}:{line}"
        return CompileError(f"{where}: a policy cannot have {why}")

    # Statements.

    def _block(self, body: list[ast.stmt]) -> Iterator[str]:
        for node in body:
            yield from self._statement(node)

    def _statement(self, node: ast.stmt) -> Iterator[str]:
        match node:
            case ast.Pass():
                pass
            case ast.Break():
                yield "break;"
            case ast.Continue():
                yield "continue;"
            case ast.Return(value):
                yield self._return(node, value)
            case ast.Expr(ast.Call() as call):
                yield f"{self._call(call)};"
            case ast.Assign([target], value):
                yield self._stored(target, self._number(value))
            case ast.AnnAssign(target, _, ast.expr() as value):
                yield self._stored(target, self._number(value))
            case ast.AugAssign(target, operator, value):
                changed = self._operation(node, operator, _loaded(target), value)
                yield self._stored(target, changed)
            case ast.If(test, body, orelse):
                yield f"if ({self._condition(test)}) {{"
                yield from self._block(body)
                if orelse:
                    yield "} else {"
                    yield from self._block(orelse)
                yield "}"
            case ast.While(test, body, []):
                yield f"while ({self._condition(test)}) {{"
                yield from self._rounds(body)
                yield "}"
            case ast.For(ast.Name(name), ast.Call(ast.Name("range"), bounds, []), body, []):
                yield from self._for(node, name, bounds, body)
            case _:
                raise self._fail(node, f"this statement: {ast.unparse(node).splitlines()[0]}")

    def _return(self, node: ast.Return, value: ast.expr | None) -> str:
        if (value is not None) != self._returns:
            raise self._fail(
                node, "a return without a way" if self._returns else "a result from this function"
            )
        return "return;" if value is None else f"return way_of({self._number(value)});"

    def _for(
        self, node: ast.AST, name: str, bounds: list[ast.expr], body: list[ast.stmt]
    ) -> Iterator[str]:
        if not 1 <= len(bounds) <= 3:
            raise self._fail(node, "a range of no bounds, or of more than two and a step")
        step: ast.expr = bounds[2] if len(bounds) == 3 else ast.Constant(1)
        by = step.value if isinstance(step, ast.Constant) else None
        if not isinstance(by, int) or not 1 <= by < 1 << 63:
            raise self._fail(node, "a range whose step is no positive constant")
        numbers = [self._number(bound) for bound in bounds]
        first, end = (["0", *numbers] if len(numbers) == 1 else numbers)[:2]
        # As in Python: the body may change its variable, and the loop goes on as it was to. Counted
        # down, so that the step after the last one may pass the largest number.
        at, left = f"i_{self._loops}", f"n_{self._loops}"
        yield (
            f"for (uint64_t {at} = {first}, {left} = rounds({at}, {end}, {by}u); "
            f"{left} != 0; {left}--, {at} += {by}u) {{"
        )
        yield f"{self._names[name]} = {at};"
        yield from self._rounds(body)
        yield "}"

    def _rounds(self, body: list[ast.stmt]) -> Iterator[str]:
        """Translate the body of a loop, which ends the call when it has made too many rounds."""
        self._loops += 1
        ended = "return fw::cache::kNoWay;" if self._returns else "return;"
        yield "if (++steps > fw::cache::kPolicySteps) {"
        yield f"fw::cache::refuse({self._owner}.geometry);"
        yield ended
        yield "}"
        yield from self._block(body)

    def _stored(self, target: ast.expr, number: str) -> str:
        where = self._target(target)
        if where == "p_lines.hand":
            number = f"uint32_t({number}) & fw::cache::kHandBits"
        elif where == "p_lines.next":
            number = f"way_of({number})"
        return f"{where} = {number};"

    def _target(self, node: ast.expr) -> str:
        match node:
            case ast.Name(name) if self._names.get(name) not in _METHODS:
                return self._names[name]
            case ast.Attribute(ast.Name(name), attribute):
                owner = self._names.get(name, "")
                if _ATTRIBUTES.get(owner, {}).get(attribute):
                    return f"{owner}.{attribute}"
        raise self._fail(node, f"an assignment to {ast.unparse(node)}")

    # Expressions.

    def _condition(self, node: ast.expr) -> str:
        match node:
            case ast.BoolOp(operator, values):
                joint = " && " if isinstance(operator, ast.And) else " || "
                return f"({joint.join(self._condition(value) for value in values)})"
            case ast.UnaryOp(ast.Not(), operand):
                return f"!{self._condition(operand)}"
            case _:
                return f"({self._number(node)} != 0)"

    def _number(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(bool() | int() as value):
                return self._constant(node, value)
            case ast.Name(name):
                return self._name(node, name)
            case ast.Attribute(ast.Name(name), attribute):
                owner = self._names.get(name, "")
                if attribute in _ATTRIBUTES.get(owner, {}):
                    return f"uint64_t({owner}.{attribute})"
            case ast.BinOp(left, operator, right):
                return self._operation(node, operator, left, right)
            case ast.UnaryOp(ast.Invert(), operand):
                return f"(~{self._number(operand)})"
            case ast.Compare(left, operators, others):
                return self._comparison(node, [left, *others], operators)
            case ast.IfExp(test, body, orelse):
                chosen = f"{self._number(body)} : {self._number(orelse)}"
                return f"({self._condition(test)} ? {chosen})"
            case ast.Call():
                return f"uint64_t({self._call(node)})"
        raise self._fail(node, f"this expression: {ast.unparse(node)}")

    def _name(self, node: ast.expr, name: str) -> str:
        known = self._names.get(name)
        if known is not None and known not in _METHODS:
            return known
        value = self._constants.get(name)
        if isinstance(value, int):
            return self._constant(node, value)
        raise self._fail(node, f"{name}, which is neither a variable nor a constant number")

    def _constant(self, node: ast.AST, value: int) -> str:
        if not 0 <= value < 1 << 64:
            raise self._fail(node, f"{value}, which does not fit 64 bits without a sign")
        return f"uint64_t({int(value)}u)"

    def _operation(
        self, node: ast.AST, operator: ast.operator, left: ast.expr, right: ast.expr
    ) -> str:
        a, b = self._number(left), self._number(right)
        if type(operator) in _CALLED:
            return f"{_CALLED[type(operator)]}({a}, {b})"
        if type(operator) in _INFIX:
            return f"({a} {_INFIX[type(operator)]} {b})"
        raise self._fail(node, f"this operator: {ast.unparse(node)}")

    def _comparison(
        self, node: ast.expr, operands: list[ast.expr], operators: list[ast.cmpop]
    ) -> str:
        if any(type(operator) not in _INFIX for operator in operators):
            raise self._fail(node, f"this comparison: {ast.unparse(node)}")
        numbers = [self._number(operand) for operand in operands]
        parts = [
            f"{a} {_INFIX[type(operator)]} {b}"
            for a, operator, b in zip(numbers, operators, numbers[1:], strict=False)
        ]
        return f"uint64_t({' && '.join(parts)})"

    def _call(self, node: ast.Call) -> str:
        arguments = [self._number(argument) for argument in node.args]
        count, called = -1, ""
        match node.func:
            case ast.Name(name) if name not in self._names:
                count, called = _FUNCTIONS.get(name, -1), name
            case ast.Attribute(ast.Name(name), method):
                owner = self._names.get(name, "")
                count, called = _METHODS.get(owner, {}).get(method, -1), f"{owner}.{method}"
                if count >= 0 and method in ("word", "set_word") and not self._words:
                    raise self._fail(node, f"{method}: it was made with keeps_words=False")
        if count != len(arguments) or node.keywords:
            raise self._fail(node, f"this call: {ast.unparse(node)}")
        return f"{called}({', '.join(arguments)})"


def _plain(arguments: ast.arguments) -> str:
    """Spell parameters as they are when none has a default, a star or a keyword."""
    return ", ".join(ast.unparse(argument) for argument in arguments.args)


def _loaded(target: ast.expr) -> ast.expr:
    """Return what an augmented assignment reads: its target, as an expression."""
    read = ast.parse(ast.unparse(target), mode="eval").body
    return ast.copy_location(read, target)
