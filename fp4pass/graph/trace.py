"""Regions: modules whose forward is provably a function of one tensor, as FX graphs.

A region is not found by running the module but by reading it. The source of its forward, checked
against its bytecode, must be a straight line of pure torch calls, arithmetic and calls of child
modules (`purity.py` is the list), so there is nothing that a trace could bake in wrongly: no
branch, no mutation, no randomness, no context manager, no closure. What the source reads from
`self` is recorded and compared on every call; a region that does not hold any more is traced
again, and a module that cannot be proved is left in Python.

Child modules that can be proved are read through; others are called as they are, hooks and all.
Those may run any code, so that nothing that such code could change is read after their call.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import keyword
import operator
import textwrap
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..linear import QuantizedLinear
from . import purity
from .guards import Guards, is_hooked, traced_class
from .match import is_linear

_CONSTANTS = (int, float, bool, str, type(None), torch.dtype)


class NotProvable(Exception):
    """The module is not provably a function of one tensor; the message says why."""


@dataclass
class Trace:
    """A graph whose owning module calls the live children of the traced module.

    inlined: the modules that were read through; guards: what the graph depends on.
    """

    module: fx.GraphModule
    inlined: list[nn.Module]
    guards: Guards


def trace(owner: nn.Module) -> Trace:
    """The graph of `owner` as a function of one tensor.

    Raises NotProvable, with the reason, if it is not provably one.
    """
    graph = fx.Graph()
    guards = Guards()
    inlined: list[nn.Module] = []
    x = graph.placeholder("input")
    graph.output(_Reader(owner, "", graph, guards, inlined).call([x], {}))
    module = fx.GraphModule(nn.Module(), fx.Graph())
    for name in (*owner._modules, *owner._parameters, *owner._buffers):
        if hasattr(module, name):
            raise NotProvable(f"graph modules have an attribute {name!r} of their own")
    for node in graph.nodes:
        if any(map(keyword.iskeyword, str(node.target).split("."))):
            raise NotProvable(f"{node.target!r} cannot be written in Python")
    module._modules.update(owner._modules)
    module._parameters.update(owner._parameters)
    module._buffers.update(owner._buffers)
    module.graph = graph
    return Trace(module, inlined, guards)


@functools.lru_cache(maxsize=1024)
def _parse(function: types.FunctionType) -> ast.FunctionDef:
    """The syntax tree of a function, if compiling it gives the very bytecode it runs."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError) as error:
        raise NotProvable(f"its source cannot be read ({error})") from error
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise NotProvable("its forward is not a plain function")
    definition.decorator_list = []
    definition.returns = None
    for argument in definition.args.args:
        argument.annotation = None
    ran = function.__code__
    # Calls of what a module imports compile to other bytecode than calls of what it defines.
    modules = [n for n in ran.co_names if isinstance(function.__globals__.get(n), types.ModuleType)]
    imports = [ast.Import([ast.alias(name)], lineno=1, col_offset=0) for name in modules]
    if _code_parts(ran) not in (_compiled([definition]), _compiled([*imports, definition])):
        raise NotProvable("its source is not what runs (a decorator, or an edited file)")
    if ran.co_freevars:
        raise NotProvable("its forward is a closure")
    return definition


def _compiled(body: list[Any]) -> tuple[Any, ...] | None:
    """The code of the one function that these statements define."""
    tree = ast.fix_missing_locations(ast.Module(body, type_ignores=[]))
    constants = compile(tree, "<forward>", "exec", dont_inherit=True).co_consts
    codes = [_code_parts(c) for c in constants if isinstance(c, types.CodeType)]
    return codes[0] if len(codes) == 1 else None


def _code_parts(code: types.CodeType) -> tuple[Any, ...]:
    # By repr, for 1 and 1.0 and True are equal.
    constants = repr(code.co_consts)
    return code.co_code, code.co_names, constants, code.co_varnames, code.co_freevars


@dataclass
class _Reader:
    """Reads the forward of one module into a graph, as a call with given arguments."""

    module: nn.Module
    path: str
    graph: fx.Graph
    guards: Guards
    inlined: list[nn.Module]
    called_unknown: bool = False

    def call(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The value that the module returns for `args`."""
        cls = traced_class(self.module)
        forward = cls.forward
        if not isinstance(forward, types.FunctionType):
            raise NotProvable(f"the forward of {cls.__name__} is not a plain function")
        if (
            cls.__getattr__ is not nn.Module.__getattr__
            or cls.__getattribute__ is not object.__getattribute__
        ):
            raise NotProvable(f"{cls.__name__} looks up its attributes in a way of its own")
        self.inlined.append(self.module)
        self.guards.forwards.append((cls, cls.forward))
        if forward is nn.Sequential.forward:
            return self._chain(args, kwargs)
        definition = _parse(forward)
        parameters = definition.args
        if (
            len(parameters.args) != 2
            or parameters.posonlyargs
            or parameters.kwonlyargs
            or parameters.vararg
            or parameters.kwarg
            or parameters.defaults
            or len(args) != 1
            or kwargs
        ):
            raise NotProvable(f"{cls.__name__}.forward takes more than one argument")
        scope = forward.__globals__
        body = _Body(self, scope, parameters.args[0].arg, {parameters.args[1].arg: args[0]})
        return body.run(definition.body)

    def _chain(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """nn.Sequential: one child after the other."""
        if len(args) != 1 or kwargs or not self.module._modules:
            raise NotProvable("nn.Sequential is empty or called with more than one argument")
        if getattr(type(self.module), "__iter__", None) is not nn.Sequential.__iter__:
            raise NotProvable("it iterates in a way of its own")
        value = args[0]
        for child in self.members(self.module, self.path):
            value = self.call_child(child, [value], {})
        return value

    def members(self, container: nn.Module, path: str) -> list[_Module]:
        """The children of a container, which are guarded to stay the same, in their order."""
        self.require_unchanged("the children of a container")
        self.guards.containers.append((container, tuple(container._modules.values())))
        members = []
        for name, child in container._modules.items():
            if child is None:
                raise NotProvable("a container holds None")
            members.append(_Module(child, f"{path}.{name}" if path else name, container))
        return members

    def require_unchanged(self, what: str) -> None:
        """What is about to be read must not have been in reach of a module that is unknown."""
        if self.called_unknown:
            raise NotProvable(f"it reads {what} after calling a module that might change it")

    def call_child(self, child: _Module, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a child: read through it if that can be proved, else as it is."""
        if child.parent is None:
            raise NotProvable("it calls itself")
        self.require_unchanged("what a child does")
        module = child.module
        name = child.target.rpartition(".")[2]
        self.guards.children.append((child.parent, name, module, type(module)))
        known = not is_hooked(module)
        if known:
            self.guards.plain.append(module)
        if known and not _is_leaf(module):
            last = next(iter(reversed(self.graph.nodes)))
            guards = Guards()
            inlined: list[nn.Module] = []
            reader = _Reader(module, child.target, self.graph, guards, inlined)
            try:
                value = reader.call(list(args), dict(kwargs))
            except NotProvable:
                added = itertools.takewhile(lambda n: n is not last, reversed(self.graph.nodes))
                for node in list(added):
                    self.graph.erase_node(node)
                known = False
            else:
                self.called_unknown = reader.called_unknown
                self.guards.extend(guards)
                self.inlined.extend(inlined)
                return value
        self.called_unknown = not known
        return self.graph.call_module(child.target, tuple(args), kwargs)


def _is_leaf(module: nn.Module) -> bool:
    """Linears and modules of torch.nn without children stay calls; all that they run is known."""
    known = type(module).__module__.startswith("torch.nn.modules.") and not module._modules
    return known or is_linear(module) or isinstance(module, QuantizedLinear)


@dataclass(frozen=True)
class _Module:
    """A module that the source names, at `target` below the owner; `self` has no parent."""

    module: nn.Module
    target: str
    parent: nn.Module | None = None


@dataclass
class _Body:
    """Evaluates the statements and expressions of one forward."""

    reader: _Reader
    scope: dict[str, Any]
    self_name: str
    names: dict[str, Any]

    def run(self, statements: list[ast.stmt]) -> Any:
        """The value of the return that the statements end with."""
        for statement in statements[:-1]:
            self._statement(statement)
        match statements[-1]:
            case ast.Return(value=ast.expr() as value):
                result = self.evaluate(value)
            case last:
                raise _refuse(last)
        parts = result if isinstance(result, tuple) else (result,)
        if not parts or not all(isinstance(part, fx.Node) for part in parts):
            raise NotProvable("it returns something that is not a tensor")
        return result

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.Assign(targets=[target], value=value):
                self._bind(target, self.evaluate(value))
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._bind(target, self.evaluate(value))
            case ast.For(target=ast.Name(id=name), iter=iterated, body=body, orelse=[]):
                self._loop(name, self.evaluate(iterated), body)
            case _:
                raise _refuse(statement)

    def _loop(self, name: str, iterated: Any, body: list[ast.stmt]) -> None:
        """Unroll a loop over a container of modules, which is as long as the container."""
        if not isinstance(iterated, _Module) or not _is_container(iterated.module):
            raise NotProvable("it loops over something that is not a container of modules")
        for member in self.reader.members(iterated.module, iterated.target):
            self.names[name] = member
            for statement in body:
                self._statement(statement)

    def _bind(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name) if name != self.self_name:
                self.names[name] = value
            case ast.Tuple(elts=targets) if isinstance(value, fx.Node):
                parts = self._call(purity.unpack, [value, len(targets)], {})
                for position, part in enumerate(targets):
                    self._bind(part, self._call(operator.getitem, [parts, position], {}))
            case ast.Tuple(elts=targets) if isinstance(value, tuple) and len(value) == len(targets):
                for part, item in zip(targets, value, strict=True):
                    self._bind(part, item)
            case _:
                raise _refuse(target)

    def evaluate(self, expression: ast.expr) -> Any:
        """A node, a constant, a sequence of them, a module or a function."""
        match expression:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in self.names:
                return self.names[name]
            case ast.Name(id=name) if name == self.self_name:
                return _Module(self.reader.module, self.reader.path)
            case ast.Name(id=name):
                return self._global(name)
            case ast.Attribute(value=base, attr=name):
                return self._attribute(self.evaluate(base), name)
            case ast.Tuple(elts=elements):
                return tuple(self.evaluate(element) for element in elements)
            case ast.List(elts=elements):
                return [self.evaluate(element) for element in elements]
            case ast.BinOp(left=left, op=op, right=right) if type(op).__name__ in purity.OPERATORS:
                function = purity.OPERATORS[type(op).__name__]
                return self._call(function, [self.evaluate(left), self.evaluate(right)], {})
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._call(operator.neg, [self.evaluate(operand)], {})
            case ast.Subscript(value=value, slice=index):
                return self._subscript(self.evaluate(value), self._index(index))
            case ast.Call(func=callee, args=args, keywords=keywords):
                return self._evaluate_call(callee, args, keywords)
            case _:
                raise _refuse(expression)

    def _global(self, name: str) -> Any:
        """A global name that stands for a module of torch or one of its functions."""
        self.reader.require_unchanged(name)
        value = self.scope.get(name)
        if not isinstance(value, types.ModuleType) and not _is_pure(value):
            raise NotProvable(f"it reads the global name {name!r}")
        self.reader.guards.names.append((self.scope, name, value))
        return value

    def _attribute(self, base: Any, name: str) -> Any:
        if isinstance(base, _Module):
            return self._member(base.module, base.target, name)
        if isinstance(base, fx.Node) and name in purity.ATTRIBUTES:
            return self._call(getattr, [base, name], {})
        if isinstance(base, types.ModuleType):
            value = vars(base).get(name)
            if isinstance(value, types.ModuleType | torch.dtype) or _is_pure(value):
                self.reader.guards.names.append((vars(base), name, value))
                return value
        raise NotProvable(f"it reads the attribute {name!r} of something unknown")

    def _member(self, module: nn.Module, path: str, name: str) -> Any:
        """What `self.name` is: a child, a tensor to be read on every call, a constant, or a
        function with constant arguments, as activations often are."""
        self.reader.require_unchanged(f"self.{name}")
        guards = self.reader.guards
        target = f"{path}.{name}" if path else name
        value = inspect.getattr_static(module, name, NotProvable)
        if value is not NotProvable:
            if type(value) in _CONSTANTS:
                guards.constants.append((module, name, value))
            elif name in module.__dict__ and isinstance(value, functools.partial):
                guards.constants.append((module, name, value))
            elif name in module.__dict__ and _is_pure(value):
                guards.objects.append((module, name, value))
            else:
                raise NotProvable(f"it reads self.{name}, which is neither a module nor a constant")
            return value
        child = module._modules.get(name)
        if child is not None:
            return _Module(child, target, module)
        tensor: Tensor | None = module._parameters.get(name)
        if tensor is None:
            tensor = module._buffers.get(name)
        if tensor is None:
            raise NotProvable(f"it reads self.{name}, which is not there or None")
        guards.objects.append((module, name, tensor))
        return self.reader.graph.get_attr(target)

    def _subscript(self, value: Any, index: Any) -> Any:
        if isinstance(value, _Module) and _is_container(value.module):
            members = self.reader.members(value.module, value.target)
            if isinstance(index, int) and -len(members) <= index < len(members):
                return members[index]
        if isinstance(value, fx.Node):
            return self._call(operator.getitem, [value, index], {})
        raise NotProvable("it indexes something that is not a tensor")

    def _index(self, expression: ast.expr) -> Any:
        match expression:
            case ast.Slice(lower=lower, upper=upper, step=step):
                return slice(
                    *(None if e is None else self.evaluate(e) for e in (lower, upper, step))
                )
            case ast.Tuple(elts=elements):
                return tuple(self._index(element) for element in elements)
            case _:
                return self.evaluate(expression)

    def _evaluate_call(
        self, callee: ast.expr, args: list[ast.expr], keywords: list[ast.keyword]
    ) -> Any:
        method = None
        if isinstance(callee, ast.Attribute):
            base = self.evaluate(callee.value)
            if isinstance(base, fx.Node):
                method = callee.attr
            else:
                function = self._attribute(base, callee.attr)
        else:
            function = self.evaluate(callee)
        values = [self.evaluate(arg) for arg in args]
        named = {k.arg: self.evaluate(k.value) for k in keywords if k.arg is not None}
        if len(named) != len(keywords):
            raise NotProvable("it calls something with **keywords")
        if method is not None:
            return self._call_method(method, [base, *values], named)
        if isinstance(function, _Module):
            _check_arguments(values, named)
            return self.reader.call_child(function, values, named)
        return self._call(function, values, named)

    def _call_method(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        if name not in purity.FRESH_METHODS | purity.VIEW_METHODS:
            raise NotProvable(f"it calls the tensor method {name!r}")
        _check_arguments(args, kwargs)
        return self.reader.graph.call_method(name, tuple(args), kwargs)

    def _call(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if isinstance(function, functools.partial):
            args, kwargs = [*function.args, *args], {**function.keywords, **kwargs}
            function = function.func
        _check_arguments(args, kwargs)
        if not any(isinstance(a, fx.Node) for a in _flatten([*args, *kwargs.values()])):
            if function not in (operator.neg, *purity.OPERATORS.values()):
                raise NotProvable("it calls a function of no tensor")
            try:
                return function(*args)
            except (TypeError, ArithmeticError) as error:
                raise NotProvable(f"its arithmetic fails: {error}") from error
        if not _is_pure(function):
            raise NotProvable(f"it calls {getattr(function, '__name__', function)!r}")
        if isinstance(function, types.FunctionType):
            try:
                bound = inspect.signature(function).bind(*args, **kwargs).arguments
            except TypeError as error:
                raise NotProvable(f"it calls {function.__name__}: {error}") from error
            if bound.get("inplace") or bound.get("out") is not None:
                raise NotProvable("it writes to a tensor in place")
        elif "out" in kwargs:
            raise NotProvable("it writes to a tensor in place")
        return self.reader.graph.call_function(function, tuple(args), kwargs)


def _is_pure(value: object) -> bool:
    try:
        return value in purity.FRESH_FUNCTIONS or value in purity.VIEW_FUNCTIONS
    except TypeError:
        return False


def _is_container(module: nn.Module) -> bool:
    return type(module) in (nn.ModuleList, nn.Sequential)


def _flatten(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _flatten(value)
        elif isinstance(value, slice):
            yield from (value.start, value.stop, value.step)
        else:
            yield value


def _check_arguments(args: list[Any], kwargs: dict[str, Any]) -> None:
    """Only what a graph can hold may be passed on: nodes and constants."""
    for value in _flatten([*args, *kwargs.values()]):
        if not isinstance(value, fx.Node) and type(value) not in _CONSTANTS:
            raise NotProvable(f"it passes on a {type(value).__name__}")


def _refuse(node: ast.AST) -> NotProvable:
    return NotProvable(f"it holds a {type(node).__name__} in line {getattr(node, 'lineno', '?')}")
