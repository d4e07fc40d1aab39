"""Finds out from the source of a module whether a direct parameter is an operand of a matrix product.

The type of a module with bare parameters does not say that. Its source does: ``x @ self.proj`` multiplies by a matrix
that is stored as input x output, ``F.linear(x, self.proj)`` by one stored as output x input, and
``x + self.scale_shift_table`` by none. Only simple patterns are followed; any other use counts as unknown.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Literal

Use = Literal["input x output", "output x input", "product", "no product", "unknown"]

# Methods and functions by their result: the same values, those of the transpose, the same values in another shape, or
# other values computed elementwise.
_SAME = frozenset(
    (
        *("to", "type", "type_as", "float", "half", "bfloat16", "double", "cuda", "cpu"),
        *("contiguous", "clone", "detach", "data", "requires_grad_"),
    )
)
_TRANSPOSES = frozenset(("T", "mT", "t", "transpose", "swapaxes"))
_JOINS = frozenset(("cat", "concat", "concatenate", "stack"))
_RESHAPES = _JOINS | frozenset(
    (
        *("view", "reshape", "view_as", "unsqueeze", "squeeze", "flatten", "permute", "rearrange"),
        *("expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "tile"),  # copies
        *("chunk", "split", "unbind", "narrow", "index_select"),  # slices
        *("flip", "roll"),
    )
)
_ELEMENTWISE = frozenset(
    (
        *("add", "sub", "mul", "div", "lerp", "addcmul", "where", "masked_fill", "clamp"),
        *("abs", "neg", "square", "sqrt", "rsqrt", "pow", "exp", "log", "cos", "sin"),
        *("sigmoid", "logsigmoid", "tanh", "softplus", "softmax", "relu", "silu", "gelu"),
    )
)
# Functions that read a parameter as a gain, a bias or a table, and never as a matrix.
_GAINS = frozenset(
    (
        *("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "normalize"),
        "interpolate",  # of tables of position embeddings
    )
)
_MATMULS = frozenset(("matmul", "mm", "bmm"))
# Attributes and methods that read no values.
_METADATA = frozenset(
    (
        *("shape", "size", "numel", "ndim", "dim", "dtype", "element_size"),
        *("device", "is_cuda", "is_meta", "requires_grad", "grad"),
    )
)


@dataclass(slots=True)
class _Reference:
    """An expression whose value is a parameter, or is computed from one.

    Attributes:
        node: The expression.
        transposed: Whether it is the transpose.
        reshaped: Whether it has another shape.
        derived: Whether its values differ from the parameter's.
        depth: The number of assignments between the parameter and the expression.
    """

    node: ast.AST
    transposed: bool = False
    reshaped: bool = False
    derived: bool = False
    depth: int = 0


def uses_of(kind: type) -> dict[str, set[Use]]:
    """Return the uses of each attribute that the methods of a module's class read.

    Methods of ``torch.nn`` and methods without source are ignored, as are those that initialise parameters.
    """
    uses: dict[str, set[Use]] = {}
    seen: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith("torch.nn.modules"):
            continue
        for name, function in vars(base).items():
            # A method that a subclass overrides is not called.
            if name in seen or not isinstance(function, FunctionType):
                continue
            seen.add(name)
            if name == "__init__" or "init" in name or name.startswith(("reset", "extra_repr")):
                continue
            for attribute, use in _Method(function, kind).uses():
                uses.setdefault(attribute, set()).add(use)
    return uses


@dataclass
class _Method:
    """One method of a module, whose references to parameters are followed outwards through its syntax tree."""

    function: Callable[..., object]
    kind: type
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    # name of a variable to the expressions that read it
    loads: dict[str, list[ast.Name]] = field(default_factory=dict)
    # names of the arguments, and of the variables that are computed from them
    activations: set[str] = field(default_factory=set)

    def uses(self) -> Iterator[tuple[str, Use]]:
        """Yield each attribute of ``self`` that the method reads, and how it uses it."""
        # 1. the tree with links to parents, and where each variable is read
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(self.function)))
        except (OSError, TypeError, SyntaxError, ValueError):
            return
        for parent in ast.walk(tree):
            for child in ast.iter_child_nodes(parent):
                self.parents[child] = parent
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self.loads.setdefault(node.id, []).append(node)
        # 2. which names are activations: arguments, and what is computed from them
        self._find_activations(tree)
        # 3. every read of self.attribute, followed outwards
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_self(node.value):
                for use in self.follow(_Reference(node)):
                    yield node.attr, use

    def follow(self, reference: _Reference) -> Iterator[Use]:
        """Yield the uses of one reference, also of the variables to which it is assigned."""
        # Example: in x @ self.weight.to(x.dtype).T the node moves from self.weight to the call of to, to .T and to the
        # product. There it is the right operand and transposed once: "output x input".
        while True:
            node = reference.node
            parent = self.parents.get(node)
            # A condition reads no values: "if self.bias is not None".
            if parent is None or isinstance(parent, (ast.Expr, ast.Compare, ast.BoolOp, ast.If)):
                return
            # An attribute or method of the value: weight.T, weight.view(...), weight.matmul(x).
            if isinstance(parent, ast.Attribute):
                if parent.attr in _METADATA:
                    return
                if parent.attr in _TRANSPOSES:
                    reference.transposed = not reference.transposed
                elif parent.attr in _RESHAPES:
                    reference.reshaped = True
                elif parent.attr in _ELEMENTWISE:
                    reference.derived = True
                elif parent.attr in _MATMULS:
                    yield _product(reference, left=True)
                    return
                elif parent.attr not in _SAME:
                    yield "unknown"
                    return
                # The value is that of the call, weight.view(...), or of the attribute itself, weight.T.
                call = self.parents.get(parent)
                reference.node = call if isinstance(call, ast.Call) and call.func is parent else parent
            # x @ weight, or weight @ x
            elif isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.MatMult):
                yield _product(reference, left=node is parent.left)
                return
            # x * weight is elementwise. weight * self.scale computes another weight, whose use decides.
            elif isinstance(parent, (ast.BinOp, ast.UnaryOp, ast.AugAssign)):
                reference.derived = True
                if isinstance(parent, ast.AugAssign) or self._reads_activations(parent, but=node):
                    yield "no product"
                    return
                reference.node = parent
            elif isinstance(parent, ast.Subscript):
                if node is not parent.value:
                    return  # the parameter is an index
                reference.reshaped = True
                reference.node = parent
            elif isinstance(parent, (ast.Tuple, ast.List, ast.Starred, ast.IfExp)):
                reference.node = parent
            elif isinstance(parent, ast.Call):
                use = self._argument(reference, parent)
                if use is not None:
                    yield use
                    return
                reference.node = parent
            elif isinstance(parent, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
                yield from self._assigned(reference, parent)
                return
            # Returned as it is, the caller may multiply by it; a value that was computed elementwise is a result.
            elif isinstance(parent, ast.Return) and reference.derived:
                yield "no product"
                return
            else:
                yield "unknown"
                return

    def _reads_activations(self, expression: ast.AST, *, but: ast.AST) -> bool:
        """Return whether an expression reads an activation outside the subexpression ``but``."""
        remaining = [expression]
        while remaining:
            node = remaining.pop()
            if node is but or (isinstance(node, ast.Attribute) and node.attr in _METADATA):
                continue
            if isinstance(node, ast.Name) and node.id in self.activations:
                return True
            remaining.extend(ast.iter_child_nodes(node))
        return False

    def _find_activations(self, tree: ast.AST) -> None:
        """Fill :attr:`activations`."""
        for node in ast.walk(tree):
            if isinstance(node, ast.arguments):
                arguments = [*node.posonlyargs, *node.args, *node.kwonlyargs]
                self.activations |= {argument.arg for argument in arguments} - {"self", "cls"}
        assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
        # Repeated, because a variable may be computed from one that is assigned further down, in a loop.
        for _ in range(3):
            for statement in assignments:
                # In self.weight.to(x.device) or self.weight.type_as(x) the activation decides only dtype and device.
                value = statement.value
                while (
                    isinstance(value, ast.Call)
                    and isinstance(value.func, ast.Attribute)
                    and value.func.attr in _SAME
                ):
                    value = value.func.value
                if self._reads_activations(value, but=tree):
                    names = {n.id for t in statement.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
                    self.activations |= names - {"self"}

    def _argument(self, reference: _Reference, call: ast.Call) -> Use | None:
        """Return the use of an argument in a call; ``None`` if the result is made from the argument's elements."""
        node = reference.node
        function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        # A function (torch.matmul) gets both operands as arguments; a method (x.matmul) gets the second one.
        is_method = isinstance(call.func, ast.Attribute) and not _is_namespace(call.func.value)
        position = call.args.index(node) if node in call.args else None
        if function in _MATMULS and position is not None:
            return _product(reference, left=position == 0 and not is_method)
        if function in ("addmm", "baddbmm") and position is not None:
            # addmm(bias, left, right)
            return _product(reference, left=position == 1) if position else "no product"
        if function == "linear":
            # linear(x, weight) is x @ weight.T
            flipped = _Reference(node, not reference.transposed, reference.reshaped, reference.derived)
            return _product(flipped, left=False) if position == 1 else "unknown"
        if function == "einsum" and position and isinstance(call.args[0], ast.Constant):
            return _einsum(reference, str(call.args[0].value), position - 1)
        if function == "embedding" or function in _GAINS:
            return "no product"
        if function in _RESHAPES:
            if function in _JOINS and self._reads_activations(call, but=node):
                return "no product"
            reference.reshaped = True
            return None
        if function in _ELEMENTWISE:
            reference.derived = True
            return None
        if isinstance(call.func, ast.Attribute) and _is_self(call.func.value):
            # The parameter is the input of a child module; a method of the class may do anything with it.
            return "unknown" if hasattr(self.kind, function) else "no product"
        return "unknown"

    def _assigned(self, reference: _Reference, statement: ast.AST) -> Iterator[Use]:
        """Yield the uses of the variables to which a statement assigns a reference."""
        targets = (
            statement.targets if isinstance(statement, ast.Assign) else [statement.target]  # type: ignore[attr-defined]
        )
        names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        # Written into elements of another tensor it is a table; the depth bounds recursion through "w = f(w)".
        if reference.depth > 3 or any(isinstance(target, ast.Subscript) for target in targets):
            yield "unknown" if reference.depth > 3 else "no product"
            return
        for name in names:
            for load in self.loads.get(name.id, ()):
                # A read above the assignment is of an earlier value (or of the last turn of a loop, which is missed).
                if load.lineno >= statement.lineno:  # type: ignore[attr-defined]
                    yield from self.follow(
                        _Reference(
                            load,
                            reference.transposed,
                            reference.reshaped,
                            reference.derived,
                            reference.depth + 1,
                        )
                    )
        if reference.derived and not any(self.loads.get(name.id) for name in names):
            yield "no product"


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_namespace(node: ast.AST) -> bool:
    """Return whether an expression is a Python module, by its usual name: ``torch``, ``F``, ``nn.functional``."""
    return (isinstance(node, ast.Name) and node.id in ("torch", "F", "functional", "einops", "TF")) or (
        isinstance(node, ast.Attribute) and node.attr in ("functional", "linalg")
    )


def _product(reference: _Reference, *, left: bool) -> Use:
    """Return how an operand of a product is stored: input x output in ``x @ W``, output x input in ``W @ x``."""
    if reference.derived:
        return "unknown"
    if reference.reshaped:
        return "product"
    return "output x input" if left != reference.transposed else "input x output"


def _einsum(reference: _Reference, equation: str, operand: int) -> Use:
    """Return the use of operand number ``operand`` of an einsum: a weight sums over inputs and produces outputs."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if not arrow or operand >= len(operands) or "..." in operands[operand]:
        return "unknown"
    letters = operands[operand]
    shared = {letter for position, text in enumerate(operands) if position != operand for letter in text}
    # In "bi,oi->bo" the weight (second operand) sums over i, which it shares with the input, and produces o.
    summed = [letter for letter in letters if letter not in output and letter in shared]
    produced = [letter for letter in letters if letter in output and letter not in shared]
    if not summed or not produced:
        return "no product"
    if reference.derived:
        return "unknown"
    # More letters are a stack of matrices ("ebi,eoi->ebo"), whose order of storage is not decided here.
    if len(letters) != 2 or reference.reshaped:
        return "product"
    return "output x input" if (letters[0] in produced) != reference.transposed else "input x output"
