"""Find a function in a package's syntax trees, as the installer would find it in the loaded modules."""

from __future__ import annotations

import ast
from typing import Final, NamedTuple

from kvwitness.tracer.contracts.signatures import to_text
from kvwitness.tracer.contracts.source import Source

_DEPTH: Final = 8
"""Aliases, re-exports and decorators followed before giving up: real code needs two or three."""

_NOT_CALLABLE: Final = frozenset({"classmethod", "property", "cached_property", "functools.cached_property"})
"""Decorators whose result ``inspect.signature`` refuses, when it is taken from the class as it stands."""

_Body = list[ast.stmt]


class NotFound(Exception):
    """There is no such function, or its parameters cannot be told; the message says which."""


class _Place(NamedTuple):
    """Where names are looked up: a module, and the class body within it (None: the module itself)."""

    source: Source
    module: str
    body: _Body | None = None

    def tree(self) -> ast.Module:
        tree = self.source.module(self.module)
        if tree is None:
            raise NotFound(f"module {self.module} does not exist")
        return tree


class _Imported(NamedTuple):
    module: str
    name: str | None


_Binding = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr | _Imported


def parameters_of(source: Source, module: str, owner: str, attribute: str) -> str:
    """The parameters of ``module:owner.attribute`` (owner "": of the module) as text. Raises :class:`NotFound`.

    Only the class's own attributes count, as for the installer. Decorators that are not in the package are
    taken to keep the signature, which all those do that wrap with ``functools.wraps``.
    """
    place = _Place(source, module)
    tree = place.tree()
    if not owner:
        return _only(_texts(place, _bound(tree.body, attribute, place), 0), f"{module} has no {attribute}")
    bodies = _classes(place, owner, 0)
    if not bodies:
        raise NotFound(f"module {module} has no class {owner}")
    texts: set[str] = set()
    for inner in bodies:
        assert inner.body is not None
        texts |= _texts(inner, _bound(inner.body, attribute, inner), 0)
    return _only(texts, f"class {owner} has no {attribute} of its own")


def has_class(source: Source, module: str, name: str) -> bool:
    """Whether the module defines or re-exports that class."""
    place = _Place(source, module)
    return source.module(module) is not None and bool(_classes(place, name, 0))


def _only(texts: set[str], missing: str) -> str:
    if not texts:
        raise NotFound(missing)
    if len(texts) > 1:
        raise NotFound(f"defined in several ways: {' or '.join(sorted(texts))}")
    return texts.pop()


# --- which definitions a name can have ---------------------------------------------------------------


def _bound(body: _Body, name: str, place: _Place) -> list[_Binding]:
    """What ``name`` is after ``body`` ran: the last definition, or one for each way through it."""
    found: list[_Binding] = []
    for statement in body:
        found = _after(statement, name, found, place)
    return found


def _after(statement: ast.stmt, name: str, before: list[_Binding], place: _Place) -> list[_Binding]:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if statement.name == name:
            return [statement]
        case ast.Assign(targets=targets, value=value):
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return [value]
        case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value) if target == name:
            return [value]
        case ast.Import(names=names):
            for alias in names:
                if alias.asname == name:
                    return [_Imported(alias.name, None)]
        case ast.ImportFrom(names=names):
            for alias in names:
                if (alias.asname or alias.name) == name:
                    return [_Imported(_absolute(statement, place), alias.name)]
        case ast.Delete(targets=targets):
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return []
        case ast.If(test=test, body=yes, orelse=no):
            if _is_type_checking(test):
                return _bound(no, name, place) or before
            return _either(before, _bound(yes, name, place), _bound(no, name, place))
        case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=final):
            ways = [_bound([*body, *orelse], name, place), *(_bound(h.body, name, place) for h in handlers)]
            return _bound(final, name, place) or _either(before, *ways)
        case ast.With(body=body) | ast.For(body=body) | ast.While(body=body):
            return _bound(body, name, place) or before
    return before


def _either(before: list[_Binding], *ways: list[_Binding]) -> list[_Binding]:
    merged: list[_Binding] = []
    for way in ways:
        merged += [binding for binding in (way or before) if binding not in merged]
    # `X = None` where an import failed is no definition that a hook could meet.
    real = [binding for binding in merged if not isinstance(binding, ast.Constant)]
    return real or merged


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _absolute(statement: ast.ImportFrom, place: _Place) -> str:
    if not statement.level:
        return statement.module or ""
    parts = place.module.split(".")
    keep = len(parts) - statement.level + (1 if place.source.is_package(place.module) else 0)
    return ".".join([*parts[:keep], *([statement.module] if statement.module else [])])


# --- what a definition leads to ----------------------------------------------------------------------


def _imported(place: _Place, binding: _Imported) -> tuple[_Place, list[_Binding]]:
    """The definitions behind ``from module import name``; none where it is not a module of the package."""
    target = _Place(place.source, binding.module)
    tree = place.source.module(binding.module)
    if tree is None or binding.name is None:
        return target, []
    return target, _bound(tree.body, binding.name, target)


def _classes(place: _Place, name: str, depth: int) -> list[_Place]:
    """The bodies of the classes that ``name`` can be in the module."""
    return _class_bodies(place, _bound(place.tree().body, name, place), depth)


def _class_bodies(place: _Place, bindings: list[_Binding], depth: int) -> list[_Place]:
    if depth > _DEPTH:
        return []
    found: list[_Place] = []
    for binding in bindings:
        match binding:
            case ast.ClassDef(body=body):
                found.append(_Place(place.source, place.module, body))
            case ast.Name(id=other):
                found += _classes(_Place(place.source, place.module), other, depth + 1)
            case _Imported():
                found += _class_bodies(*_imported(place, binding), depth + 1)
    return found


def _texts(place: _Place, bindings: list[_Binding], depth: int) -> set[str]:
    """The parameter lists of the functions that the definitions lead to."""
    if depth > _DEPTH:
        raise NotFound("its definition goes round in a circle")
    texts: set[str] = set()
    for binding in bindings:
        match binding:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                texts.add(_decorated(place, binding, depth))
            case ast.Lambda(args=arguments):
                texts.add(to_text(arguments))
            case ast.Name() | ast.Attribute():
                texts |= _behind(place, binding, depth)
            case ast.Call(func=ast.Name(id="staticmethod"), args=[inner]):
                texts |= _texts(place, [inner], depth + 1)
            case _Imported():
                target, further = _imported(place, binding)
                texts |= _texts(target, further, depth + 1)
            case ast.expr():
                raise NotFound(f"it is made by an expression ({ast.unparse(binding)[:60]})")
            case ast.ClassDef():
                raise NotFound("it is a class, not a function")
    return texts


def _behind(place: _Place, expression: ast.Name | ast.Attribute, depth: int) -> set[str]:
    """The function behind ``other`` (class body first, then module) or ``Class.method``."""
    module = _Place(place.source, place.module)
    if isinstance(expression, ast.Name):
        own = _bound(place.body, expression.id, place) if place.body is not None else []
        if own:
            return _texts(place, own, depth + 1)
        further = _bound(module.tree().body, expression.id, module)
        texts = _texts(module, further, depth + 1)
    else:
        texts = set()
        if isinstance(expression.value, ast.Name):
            for inner in _classes(module, expression.value.id, depth + 1):
                assert inner.body is not None
                texts |= _texts(inner, _bound(inner.body, expression.attr, inner), depth + 1)
    if not texts:
        raise NotFound(f"it is {ast.unparse(expression)}, which is not in the package")
    return texts


# --- decorators --------------------------------------------------------------------------------------


def _decorated(place: _Place, function: ast.FunctionDef | ast.AsyncFunctionDef, depth: int) -> str:
    """The parameters that a caller sees: those of the outermost decorator that does not keep the signature."""
    for decorator in function.decorator_list:
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = ast.unparse(call)
        if name in _NOT_CALLABLE or name.endswith(".setter"):
            raise NotFound(f"it is a {name}, not a plain function")
        changed = _replacement(place, call, isinstance(decorator, ast.Call), depth)
        if changed is not None:
            return changed
    return to_text(function.args)


def _replacement(place: _Place, decorator: ast.expr, with_arguments: bool, depth: int) -> str | None:
    """The parameters of what a decorator of this package puts in a function's place, if it hides them."""
    if not isinstance(decorator, ast.Name):
        return None
    module = _Place(place.source, place.module)
    for definition in _functions(module, _bound(module.tree().body, decorator.id, module), depth):
        if _keeps_signature(definition):
            continue
        # `def decorator(function=None, *, option=...)`: one level more also where it stands without arguments.
        deep = with_arguments or bool(definition.args.defaults)
        inner: ast.FunctionDef | ast.AsyncFunctionDef | None = definition
        for _ in range(2 if deep else 1):
            inner = _returned(inner) if inner is not None else None
        if inner is not None:
            return to_text(inner.args)
    return None


def _keeps_signature(decorator: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether what it makes is wrapped in a way that ``inspect.signature`` sees through."""
    names = {node.id for node in ast.walk(decorator) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(decorator) if isinstance(node, ast.Attribute)}
    return bool(names & {"wraps", "update_wrapper", "__wrapped__", "__signature__"})


def _functions(place: _Place, bindings: list[_Binding], depth: int) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    found: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
    for binding in bindings if depth <= _DEPTH else ():
        if isinstance(binding, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(binding)
        elif isinstance(binding, _Imported):
            found += _functions(*_imported(place, binding), depth + 1)
    return found


def _returned(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The inner function that a decorator returns; None where it returns something else."""
    names = {
        node.value.id
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name)
    }
    for statement in function.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.name in names:
            return statement
    return None
