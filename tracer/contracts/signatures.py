"""Parameter lists as text, e.g. ``(self, key, value=..., *, chunked=...)``: names and order, nothing else."""

from __future__ import annotations

import ast
import inspect
from typing import Any, Final

_DEFAULT: Final = "=..."


def to_text(arguments: ast.arguments) -> str:
    """The parameters of a parsed function; annotations and the values of defaults are left out."""
    parts: list[str] = []
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    for index, argument in enumerate(positional):
        parts.append(argument.arg + (_DEFAULT if index >= required else ""))
        if index + 1 == len(arguments.posonlyargs):
            parts.append("/")
    if arguments.vararg is not None:
        parts.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [
        argument.arg + ("" if default is None else _DEFAULT)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        parts.append(f"**{arguments.kwarg.arg}")
    return f"({', '.join(parts)})"


def to_signature(text: str) -> inspect.Signature:
    """The signature that Python itself would report for a function with these parameters."""
    (function,) = ast.parse(f"def f{text}: ...").body
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    parameters = [
        *_parameters(arguments.posonlyargs, inspect.Parameter.POSITIONAL_ONLY),
        *_parameters(arguments.args, inspect.Parameter.POSITIONAL_OR_KEYWORD),
    ]
    if arguments.defaults:
        first = len(parameters) - len(arguments.defaults)
        parameters[first:] = [parameter.replace(default=...) for parameter in parameters[first:]]
    if arguments.vararg is not None:
        parameters += _parameters([arguments.vararg], inspect.Parameter.VAR_POSITIONAL)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        (parameter,) = _parameters([argument], inspect.Parameter.KEYWORD_ONLY)
        parameters.append(parameter if default is None else parameter.replace(default=...))
    if arguments.kwarg is not None:
        parameters += _parameters([arguments.kwarg], inspect.Parameter.VAR_KEYWORD)
    return inspect.Signature(parameters)


def _parameters(arguments: list[ast.arg], kind: Any) -> list[inspect.Parameter]:
    return [inspect.Parameter(argument.arg, kind) for argument in arguments]


class StandIn:
    """A callable that has nothing but a signature: what is checked at run time can be asked about it too."""

    def __init__(self, text: str) -> None:
        self.__signature__ = to_signature(text)

    def __call__(self) -> None:
        raise NotImplementedError("it only stands in for a function of SGLang")
