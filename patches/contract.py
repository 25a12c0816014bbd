"""Hooks: what they target, what they must find there, which links of the chain rest on them.

A hook is installed only when its target exists and its signature begins with the parameters that the hook
knows (more parameters after them must be optional). Otherwise it is not installed and says so.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from kvwitness.patches.witness import Witness

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

MARK: Final = "__kvwitness_hook__"
"""Attribute of a wrapper that names its hook; its ``__wrapped__`` is the original."""


COMMON: Final = "common"
UNIFIED: Final = "unified"
"""UnifiedRadixCache with node ids (SGLang 0.5.17 and newer)."""
UNIFIED_OBJ: Final = "unified_obj"
"""UnifiedRadixCache with node objects (SGLang 0.5.12 to 0.5.16)."""
HIRADIX: Final = "hiradix"
"""HiRadixCache (the default tree up to SGLang 0.5.18)."""
HIMAMBA: Final = "himamba"
"""HiMambaRadixCache (the tree of models with a recurrent state in SGLang 0.5.10 to 0.5.12)."""


@dataclass(frozen=True, slots=True)
class Hook:
    """One observed function. The observers run around the original, which always runs unchanged.

    ``enter`` runs before and returns a token; ``seen`` runs after a normal return with that token and the
    result; ``leave`` runs in any case, to undo what ``enter`` set. Each may be absent, but there is no ``leave``
    without an ``enter``.
    """

    name: str
    module: str
    owner: str
    """Class that defines the attribute; "" for a module-level function."""
    attribute: str
    parameters: tuple[str, ...]
    """Leading parameter names that the hook relies on, ``self`` included."""
    links: tuple[str, ...]
    """Links of the chain of evidence that rest on it."""
    enter: Callable[[Witness, Args, Kwargs], Any] | None = None
    seen: Callable[[Witness, Any, Any, Args, Kwargs], None] | None = None
    leave: Callable[[Witness, Any], None] | None = None
    always: bool = False
    """Observers run even while nothing is recorded (context, opening the journal)."""
    family: str = COMMON
    """Which kind of cache it belongs to. Only the family of the tree that the server really builds counts
    for coverage; which one that is is found at run time, not guessed from the version.

    Several hooks may share a name (one per signature of the same observation): one of them is enough."""
    beside: str = ""
    """Another attribute that the class must define, too: it tells apart what one name and one signature mean in
    different generations."""
    bound: bool = False
    """The scheduler binds the function when it is constructed and calls what it bound: whoever comes later has to
    replace that, too."""

    @property
    def target(self) -> str:
        return ".".join(filter(None, (self.module, self.owner, self.attribute)))


@dataclass(slots=True)
class Installed:
    """State of one hook in this process."""

    hook: Hook
    status: str = "pending"
    """``installed``, ``pending`` (module not imported), ``missing`` or ``unknown_signature``."""
    detail: str = ""
    original: Any = field(default=None, repr=False)

    def find(self, module: types.ModuleType) -> tuple[Any, Any] | None:
        """The class (or module) that defines the function, and the function; None, and why, where there is none."""
        hook = self.hook
        try:
            owner: Any = getattr(module, hook.owner) if hook.owner else module
            original = vars(owner)[hook.attribute]
        except (AttributeError, KeyError):
            self.status, self.detail = "missing", f"{hook.target} does not exist"
            return None
        if hook.beside and hook.beside not in vars(owner):
            self.status, self.detail = "missing", f"{hook.owner} of this release has no {hook.beside}"
            return None
        return owner, original

    def as_facts(self) -> dict[str, Any]:
        """For the journal's coverage facts."""
        return {
            "name": self.hook.name,
            "target": self.hook.target,
            "status": self.status,
            "links": list(self.hook.links),
            "family": self.hook.family,
            "detail": self.detail,
        }


def argument(args: Args, kwargs: Kwargs, index: int, name: str, default: Any = None) -> Any:
    """Argument ``index``/``name`` of a call, however the caller passed it."""
    return args[index] if len(args) > index else kwargs.get(name, default)


def mismatch(function: Any, parameters: tuple[str, ...]) -> str | None:
    """Why ``function`` does not have the signature that a hook knows; None when it does."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        return f"its signature cannot be read: {error}"
    named = [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = tuple(p.name for p in named)
    if names[: len(parameters)] != parameters:
        return f"parameters are ({', '.join(names)}), known are ({', '.join(parameters)})"
    unknown = [p.name for p in named[len(parameters) :] if p.default is p.empty]
    if unknown:
        return f"new required parameters: {', '.join(unknown)}"
    return None


NOTHING: Final[Any] = object()
"""Returned by ``enter`` when there is nothing to see this time: the hook's other observers are not called."""


class _Always:
    """Stands for the witness where observers run even while nothing is recorded."""

    recording = True


def wrap(original: Callable[..., Any], hook: Hook, witness: Witness) -> Callable[..., Any]:
    """``original`` with the hook's observers around it. The wrapper never raises on its own account.

    A plain closure, with no more in it than the hook's observers need: 0.2 microseconds on top of the original
    and the observers. An ``enter`` that finds :data:`NOTHING` saves the call of the others.
    """
    name = hook.name
    enter, seen, leave = hook.enter, hook.seen, hook.leave
    if witness.config.faults.raise_in_hooks:
        enter, seen, leave = (_raising(observer, hook.always) for observer in (enter, seen, leave))
    if witness.times is not None:
        enter, seen, leave = (witness.times.timed(name, observer) for observer in (enter, seen, leave))
    gate = _Always if hook.always else witness
    wrapper: Callable[..., Any]

    if enter is None:
        assert seen is not None and leave is None, f"hook {name} has observers that do not go together"
        observe = seen

        @functools.wraps(original)
        def after(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if gate.recording:
                try:
                    observe(witness, None, result, args, kwargs)
                except Exception as error:
                    witness.failed(name, error)
            return result

        wrapper = after
    elif leave is None:
        begin = enter

        @functools.wraps(original)
        def around(*args: Any, **kwargs: Any) -> Any:
            if not gate.recording:
                return original(*args, **kwargs)
            try:
                token = begin(witness, args, kwargs)
            except Exception as error:
                token = NOTHING
                witness.failed(name, error)
            result = original(*args, **kwargs)
            if seen is not None and token is not NOTHING:
                try:
                    seen(witness, token, result, args, kwargs)
                except Exception as error:
                    witness.failed(name, error)
            return result

        wrapper = around
    else:
        begin, undo = enter, leave

        @functools.wraps(original)
        def around_and_undo(*args: Any, **kwargs: Any) -> Any:
            if not gate.recording:
                return original(*args, **kwargs)
            try:
                token = begin(witness, args, kwargs)
            except Exception as error:
                token = NOTHING
                witness.failed(name, error)
            try:
                result = original(*args, **kwargs)
            finally:
                if token is not NOTHING:
                    try:
                        undo(witness, token)
                    except Exception as error:
                        witness.failed(name, error)
            if seen is not None and token is not NOTHING:
                try:
                    seen(witness, token, result, args, kwargs)
                except Exception as error:
                    witness.failed(name, error)
            return result

        wrapper = around_and_undo

    setattr(wrapper, MARK, name)
    return wrapper


def _raising(observer: Callable[..., Any] | None, run_first: bool) -> Callable[..., Any] | None:
    """An observer that raises (KVWITNESS_FAULT=raise); ``run_first`` where it opens the journal that counts."""
    if observer is None:
        return None
    run = observer

    def raise_instead(*args: Any) -> Any:
        if run_first:
            run(*args)
        raise RuntimeError("raised on purpose (KVWITNESS_FAULT=raise)")

    return raise_instead
