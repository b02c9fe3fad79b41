"""The body of a rule as a kernel: each thread updates one element, as numba's loop does.

The text for CUDA is made of the Python code of the body, so that a rule has its formulas once.
Every operation of the body becomes one of `mpishard.base.kernels`, which rounds as NumPy's does.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Sequence

import numpy as np

from mpishard.base import Array, Kernel

_OPERATORS: dict[type, str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}
_FUNCTIONS = {"sqrt": "root", "maximum": "maximum", "minimum": "minimum", "sign": "sign"}
# Arguments of the kernel's own; names of a body get an underscore at their end.
_COUNT, _LIMIT, _SCALE = "count", "limit", "before_clipping"


class _NoKernelError(Exception):
    """A body has something that only Python can run."""


def launch(
    function: Callable[..., None],
    arrays: Sequence[Array | None],
    factors: Sequence[float],
    clip: tuple[float, float] | None,
) -> bool:
    """Begin the update of arrays on a GPU by one kernel; return False if there is none.

    Parameters
    ----------
    function : callable
        Of a `Body`.
    arrays : sequence of Array
        p, g and the state, 1-D and equally long, with None for the state that is not needed.
    factors : sequence of float
        Numbers of the body.
    clip : (float, float), optional
        Scale and limit of the gradient.
    """
    p = arrays[0]
    assert p is not None
    # A kernel computes in one dtype on dense arrays; CuPy takes all others.
    if p.dtype not in (np.float32, np.float64) or not all(
        array is None or (array.dtype == p.dtype and array.flags.c_contiguous) for array in arrays
    ):
        return False
    kernel = _kernel(function, tuple(array is None for array in arrays), clip is not None)
    if kernel is None:
        return False
    count = int(p.size)
    numbers = [float(number) for number in (*factors, *(clip or ()))]
    given = [array for array in arrays if array is not None]
    kernel.launch_for(count, p.dtype, *given, *numbers, count)
    return True


# Reading and translating the source takes longer than the kernel runs.
@functools.cache
def _kernel(function: Callable[..., None], missing: tuple[bool, ...], clips: bool) -> Kernel | None:
    """Return the kernel of a body, or None if the body cannot be one.

    ``missing``: whether each array is None. ``clips``: whether the gradient is clipped.
    """
    try:
        return _Translation(function, missing, clips).kernel()
    except (_NoKernelError, OSError, TypeError):  # Python has no source of some functions
        return None


class _Translation:
    """The text of one body."""

    def __init__(
        self, function: Callable[..., None], missing: tuple[bool, ...], clips: bool
    ) -> None:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        # The values of a closure may change, and a kernel would keep the first ones.
        if not isinstance(tree, ast.FunctionDef) or inspect.getclosurevars(function).nonlocals:
            raise _NoKernelError
        names = [argument.arg for argument in tree.args.args]
        self._globals = inspect.getclosurevars(function).globals
        self._name = f"update{function.__name__}"
        self._arrays = dict(zip(names, missing, strict=False))  # name -> whether it is None
        self._g = names[1]
        self._factors = names[len(missing) :]
        self._clips = clips
        self._locals: list[str] = []
        statements = [node for node in tree.body if not _is_text(node)]
        # Code outside of the loop runs once for an array, and has no place in a kernel.
        if len(statements) != 1 or not isinstance(statements[0], ast.For):
            raise _NoKernelError
        self._loop = statements[0]
        if not isinstance(self._loop.target, ast.Name) or self._loop.orelse:
            raise _NoKernelError
        self._index = self._loop.target.id

    def kernel(self) -> Kernel:
        lines = self._block(self._loop.body, "    ")
        pointers = [
            f"{'const ' * (name == self._g)}T* {name}_"
            for name, is_missing in self._arrays.items()
            if not is_missing
        ]
        numbers = [f"{name}_" for name in self._factors]
        if self._clips:
            numbers += [_SCALE, _LIMIT]
            value = f"mul({self._g}_[i], {_SCALE})"
            # The lower limit first, as NumPy clips.
            value = f"minimum(maximum({value}, mul(T(-1), {_LIMIT})), {_LIMIT})"
            lines.insert(0, f"    T clipped = {value};")
        parameters = ", ".join([*pointers, *(f"T {number}" for number in numbers)])
        declared = ", ".join(f"{name}_" for name in self._locals)
        text = [
            f'extern "C" __global__ void {self._name}({parameters}, long long {_COUNT})',
            "{",
            "    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;",
            f"    if (i >= {_COUNT}) return;",
            f"    T {declared};",
            *lines,
            "}",
        ]
        return Kernel(self._name, "\n".join(text))

    # ----------------------------------------------------------------------------------- statements

    def _block(self, body: Sequence[ast.stmt], indent: str) -> list[str]:
        lines = []
        for node in body:
            lines += [indent + line for line in self._statement(node)]
        return lines

    def _statement(self, node: ast.stmt) -> list[str]:
        match node:
            case ast.Assign(targets=[target], value=value):
                return self._assign(target, value)
            case ast.AugAssign(target=target, op=operator, value=value):
                changed = ast.BinOp(target, operator, value)
                return [f"{self._target(target)} = {self._value(changed)};"]
            case ast.If(test=test, body=body, orelse=otherwise):
                known = self._is_none(test)
                if known is not None:
                    return self._block(body if known else otherwise, "")
                lines = [f"if ({self._test(test)}) {{", *self._block(body, "    ")]
                if otherwise:
                    lines += ["} else {", *self._block(otherwise, "    ")]
                return [*lines, "}"]
        raise _NoKernelError

    def _assign(self, target: ast.expr, value: ast.expr) -> list[str]:
        if not isinstance(target, ast.Tuple):
            return [f"{self._target(target)} = {self._value(value)};"]
        if not isinstance(value, ast.Tuple) or len(target.elts) != len(value.elts):
            raise _NoKernelError
        read = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        written = {node.id for node in target.elts if isinstance(node, ast.Name)}
        # Python reads all values first, and a kernel assigns one after the other.
        if read & written:
            raise _NoKernelError
        pairs = zip(target.elts, value.elts, strict=True)
        return [line for pair in pairs for line in self._assign(*pair)]

    def _target(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name) if name not in self._arrays and name not in self._factors:
                if name not in self._locals:
                    self._locals.append(name)
                return f"{name}_"
            case ast.Subscript(value=ast.Name(id=name)) if name != self._g:
                return self._value(node)
        raise _NoKernelError

    # ---------------------------------------------------------------------------------- expressions

    def _is_none(self, test: ast.expr) -> bool | None:
        """The answer of a test of an array against None; None for other tests."""
        match test:
            case ast.Compare(
                left=ast.Name(id=name),
                ops=[ast.Is() | ast.IsNot() as kind],
                comparators=[ast.Constant(value=None)],
            ) if name in self._arrays:
                return self._arrays[name] == isinstance(kind, ast.Is)
        return None

    def _test(self, test: ast.expr) -> str:
        match test:
            case ast.Compare(left=left, ops=[kind], comparators=[right]):
                a, b = self._value(left), self._value(right)
                match kind:
                    case ast.NotEq():
                        return f"differs({a}, {b})"
                    case ast.Lt():
                        return f"less({a}, {b})"
                    case ast.Gt():
                        return f"less({b}, {a})"
        raise _NoKernelError

    def _value(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name) if name in self._locals or name in self._factors:
                return f"{name}_"
            case ast.Constant(value=number) if type(number) in (int, float):
                return f"T({number!r})"
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Name(id=self._index)):
                if self._arrays.get(name, True):
                    raise _NoKernelError
                return "clipped" if self._clips and name == self._g else f"{name}_[i]"
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
                name = _OPERATORS[type(operator)]
                return f"{name}({self._value(left)}, {self._value(right)})"
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=module), attr=name),
                args=arguments,
                keywords=[],
            ) if self._globals.get(module) is np and name in _FUNCTIONS:
                return f"{_FUNCTIONS[name]}({', '.join(map(self._value, arguments))})"
        raise _NoKernelError


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
