"""A user's own classes, loaded and checked."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Final

from emu.errors import EmuError, InputError

if TYPE_CHECKING:
    pass
from emu.plugins.blame import FILES, lacks, place_of, told, what_it_is
from emu.plugins.named import KINDS, OBJECTS, SUFFIX, are_forbidden, look_in
from emu.plugins.sources import digest, forbidden_error, sources

_MODULES: Final[dict[str, tuple[str, ModuleType]]] = {}
"""Loaded files: path -> digest of the sources and the module."""


def load_plugin(path: str, key: str, source: str = "config") -> type:
    """The class of that name. Raises InputError (at the config key) if there is none."""
    if are_forbidden():
        raise forbidden_error(path, key, source)
    if path in OBJECTS:
        return OBJECTS[path]
    module_name, colon, name = path.rpartition(":")
    if not colon:
        hint = "or give package.module:Class or ./file.py:Class"
        raise InputError(source, None, key, f"unknown name {path!r}; {hint}")
    FILES.update(str(file) for file in sources(path))
    if module_name.endswith(SUFFIX):
        module, where = _load_file(Path(module_name), key, source), module_name
    else:
        module, where = _load_module(module_name, key, source), f"module {module_name!r}"
    if not hasattr(module, name):
        classes = [n for n, v in vars(module).items() if isinstance(v, type)]
        own = [n for n in classes if vars(module)[n].__module__ == module.__name__]
        hint = f"; it has {', '.join(sorted(own)[:5])}" if own else ""
        raise InputError(source, None, key, f"{where} has no {name!r}{hint}")
    found = getattr(module, name)
    if not isinstance(found, type):
        problem = f"{path}{place_of(found)} is {what_it_is(found)}, expected a class"
        raise InputError(source, None, key, problem)
    return found


def _load_module(name: str, key: str, source: str) -> ModuleType:
    def load() -> ModuleType:
        return importlib.import_module(name)

    return _imported(load, repr(name), key, source)


def _load_file(file: Path, key: str, source: str) -> ModuleType:
    """A module from a file; read again if it, or what it imports from beside it, has changed."""
    if not file.is_file():
        raise InputError(source, None, key, f"no such file: {file}")
    resolved = file.resolve()
    place = str(resolved)
    now = digest(f"{place}:_")
    known = _MODULES.get(place)
    if known is not None and known[0] == now:
        return known[1]
    look_in(resolved.parent)
    beside = {str(other) for other in sources(f"{place}:_")} - {place}
    for name, other in list(sys.modules.items()):
        if known is not None and getattr(other, "__file__", None) in beside:
            del sys.modules[name]
    import hashlib

    name = f"emu_plugin_{hashlib.sha256(place.encode()).hexdigest()[:8]}_{resolved.stem}"
    module = ModuleType(name)
    module.__file__ = place

    def load() -> ModuleType:
        # Not by importlib: a file that hangs would do so where no signal may strike.
        sys.modules[name] = module
        exec(compile(resolved.read_bytes(), place, "exec"), vars(module))
        return module

    try:
        _imported(load, str(file), key, source)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    _MODULES[place] = (now, module)
    return module


def _imported(load: Callable[[], ModuleType], what: str, key: str, source: str) -> ModuleType:
    """Run the code of a module; whatever it raises is one line."""
    try:
        return load()
    except KeyboardInterrupt:
        raise
    except EmuError:
        raise
    except BaseException as error:
        problem = f"cannot import {what}: {told(error)}"
        raise InputError(source, None, key, problem) from None


def check_plugin(path: str, key: str, source: str = "config") -> type:
    """Load a class and look at what it has, without making an object of it. Raises InputError."""
    found = load_plugin(path, key, source)
    kind = KINDS.get(key)
    if kind is None:
        return found
    needs = [*kind.methods, *kind.attributes]
    hint = ""
    has = set(dir(found)) | _set_by(found)
    if kind.base:
        module, _, name = kind.base.partition(":")
        base = getattr(importlib.import_module(module), name)
        needs = [*base.must_have]
        if issubclass(found, base):
            has = {n for n in needs if _definer(found, n) is not base}
        else:
            hint = f"; derive it from {module}.{name}"
            if set(needs) <= has:
                problem = f"{path}{place_of(found)} does not derive from {module}.{name}"
                raise InputError(source, None, key, problem)
    missing = sorted(getattr(found, "__abstractmethods__", ())) or [
        n for n in needs if n not in has
    ]
    if missing:
        raise InputError(source, None, key, lacks(path, found, missing) + hint)
    for name, count in kind.methods.items():
        problem = _problem_of_method(found, name, count)
        if problem:
            raise InputError(source, None, key, f"{path}{place_of(found)}: {problem}")
    return found


def _definer(found: type, name: str) -> type | None:
    """The class, of a class and its bases, whose member of that name counts."""
    return next((one for one in found.__mro__ if name in vars(one)), None)


def _set_by(found: type) -> set[str]:
    """Attributes that the constructor of a class may set: names that its code stores."""
    names: set[str] = set()
    for one in found.__mro__:
        maker = vars(one).get("__init__")
        if isinstance(maker, FunctionType):
            names.update(maker.__code__.co_names)
    return names


def _problem_of_method(found: type, name: str, count: int) -> str:
    """Why a method cannot be called with so many arguments; empty if it can."""
    import inspect  # 10 ms that only a user's own class needs

    method = getattr(found, name, None)
    if method is None:
        return ""  # set by the constructor: looked at when there is an object
    if not callable(method):
        return f"{name} is {what_it_is(method)}, expected a method"
    if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
        return f"{name} must return its answer: it may be neither async nor a generator"
    static = isinstance(inspect.getattr_static(found, name, None), (staticmethod, classmethod))
    try:
        inspect.signature(method).bind(*range(count if static else count + 1))
    except TypeError as error:
        return f"{name} cannot be called with {count} arguments: {error}"
    except ValueError:
        return ""  # of C: it has no signature
    return ""
