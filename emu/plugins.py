"""Classes of a user's own: named by a configuration, or given as objects from Python.

    package.module:Class        from a module beside the configuration, or on the path
    ./file.py:Class             from a file, relative to the configuration
    named(Class)                a class as an object, under a name that a configuration can hold

Importing such a class runs its code. `forbid` refuses all of them. Whatever is wrong with one is an
InputError before the run, or a PluginError during it: one line that names the key, the class, the
file and the line.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from emu.errors import EmuError, InputError, PluginError

if TYPE_CHECKING:
    import ast

_FILES: Final[set[str]] = set()
"""Source files of classes that were loaded, and of what they import from their own folders."""
_OBJECTS: Final[dict[str, type]] = {}
_MODULES: Final[dict[str, tuple[str, ModuleType]]] = {}
"""Loaded files: path -> digest of the sources and the module."""
_settings: Final = {"forbidden": False}
_SUFFIX: Final = ".py"


class NamedClass(NamedTuple):
    """A class of a user's own, as a configuration names it."""

    key: str
    path: str
    own: Mapping[str, object]
    """The keys of its table."""


class Kind(NamedTuple):
    """What a class must have to be named at a key."""

    key: str
    methods: Mapping[str, int]
    """Methods and with how many arguments they are called."""
    attributes: tuple[str, ...] = ()
    base: str = ""
    """The class that it derives from, as module:Class; any of its public members counts then."""


KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        kind.key: kind
        for kind in (
            Kind("router.policy", {"choose": 2}),
            Kind("router.decode_policy", {"choose": 2}),
            Kind("router.admission", {"admit": 1}),
            Kind("scheduler.eviction", {"choose": 2}),
            Kind("migration.policy", {"choose": 1}),
            Kind("autoscale.planner", {"decide": 1, "wake_ns": 1}, ("needs_ticks",)),
            Kind("scheduler.policy", {}, base="emu.scheduling.base:Scheduler"),
            Kind(
                "latency.backend",
                {"iteration_ns": 1, "stage_ns": 1, "decode_run_ns": 2, "components_ns": 1},
                ("foreign",),
            ),
            Kind("latency.expert_routing", {"route": 2}, ("draws",)),
        )
    }
)
"""Keys that take a class of one's own."""
KEYS: Final = frozenset(key.rpartition(".")[2] for key in KINDS)
"""Their last parts: a replica group may have them too."""


# --- names ----------------------------------------------------------------------------------------
def forbid() -> None:
    """From now on no configuration of this process may name a class."""
    _settings["forbidden"] = True


def allow() -> None:
    """The end of `forbid`."""
    _settings["forbidden"] = False


def are_forbidden() -> bool:
    """Whether `forbid` was called."""
    return _settings["forbidden"]


def named(found: type) -> str:
    """The name under which a class that is given as an object stands in a configuration."""
    if not isinstance(found, type):
        raise InputError("config", None, "", f"{found!r} is {_what(found)}, expected a class")
    module = found.__module__ if _is_dotted(found.__module__) else "object"
    base = f"{module}:{found.__name__}"
    name, number = base, 1
    while name in _OBJECTS and _OBJECTS[name] is not found:
        number += 1
        name = f"{base}_{number}"
    _OBJECTS[name] = found
    file = getattr(sys.modules.get(found.__module__), "__file__", None)
    _FILES.add(file or _code_file(found))
    return name


def is_object(path: str) -> bool:
    """Whether a name stands for a class given as an object: other processes may not find it."""
    return path in _OBJECTS


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _code_file(found: type) -> str:
    """Where the methods of a class were written (a cell of a notebook has no file)."""
    for member in vars(found).values():
        if isinstance(member, FunctionType):
            return member.__code__.co_filename
    return f"<{found.__name__}>"


def look_in(folder: Path) -> None:
    """Modules in this folder can be imported from now on, after all that could be before."""
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.append(place)


def replaced(value: Any) -> Any:
    """Plain tables with the names of classes in place of classes."""
    if isinstance(value, type):
        return named(value)
    if isinstance(value, Mapping):
        return {key: replaced(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [replaced(inner) for inner in value]
    return value


# --- sources, without running them ----------------------------------------------------------------
def sources(path: str) -> list[Path]:
    """Files that a class comes from, with what they import from beside them. Runs nothing.

    Empty for what has no source (a module in C, a class of a notebook).
    """
    module = path.rpartition(":")[0]
    if path in _OBJECTS:
        file = getattr(sys.modules.get(_OBJECTS[path].__module__), "__file__", None)
        first = [Path(file)] if file and file.endswith(_SUFFIX) else []
    elif module.endswith(_SUFFIX):
        first = [Path(module)]
    else:
        first = _files_of(module)
    found: dict[Path, None] = {}
    waiting = [file.resolve() for file in first if file.is_file()]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found[file] = None
            waiting += _imports_beside(file)
    return sorted(found)


def digest(path: str) -> str:
    """Digest of the sources of a class; of its methods' code where there is no file."""
    import hashlib

    whole = hashlib.sha256()
    for file in sources(path):
        whole.update(file.name.encode() + b"\0" + file.read_bytes())
    if path in _OBJECTS:
        for name, member in sorted(vars(_OBJECTS[path]).items()):
            if isinstance(member, FunctionType):
                code = member.__code__
                whole.update(f"{name}\0{code.co_consts!r}{code.co_names!r}".encode())
                whole.update(code.co_code)
            elif not name.startswith("__"):
                whole.update(f"{name}={member!r}".encode())
    return whole.hexdigest()


def _files_of(module: str) -> list[Path]:
    """Files that are run when a module is imported, packages first; those that can be found."""
    files: list[Path] = []
    places: list[str] | None = None
    parts = module.split(".")
    for index in range(len(parts)):
        name = ".".join(parts[: index + 1])
        try:
            spec = importlib.machinery.PathFinder.find_spec(name, places)
        except (ImportError, ValueError):
            break
        if spec is None:
            break
        if spec.origin and spec.origin.endswith(_SUFFIX):
            files.append(Path(spec.origin))
        if spec.submodule_search_locations is None:
            break
        places = list(spec.submodule_search_locations)
    return files


def _imports_beside(file: Path) -> list[Path]:
    """Modules of the file's own folder (and packages there) that it imports."""
    import ast  # runs without classes of a user's own need no parser

    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
            names += [f"{node.module}.{a.name}" if node.module else a.name for a in node.names]
    found = []
    for name in names:
        place = file.parent.joinpath(*name.split("."))
        candidates = (place.with_suffix(_SUFFIX), place / "__init__.py") if name else ()
        found += [candidate.resolve() for candidate in candidates if candidate.is_file()]
    return found


def is_plugin_file(name: str) -> bool:
    """Whether code of this file belongs to a class of a user's own."""
    return name in _FILES


def find_plugin(path: str, key: str, source: str = "config") -> None:
    """Look for a class without running its code: is there a file, can it be read, has it the name?

    Raises InputError.
    """
    if are_forbidden():
        raise _forbidden(path, key, source)
    if path in _OBJECTS:
        return
    module, _, name = path.rpartition(":")
    is_file = module.endswith(_SUFFIX)
    where = module if is_file else f"module {module!r}"
    if is_file and not Path(module).is_file():
        raise InputError(source, None, key, f"no such file: {module}")
    files = [Path(module)] if is_file else _files_of(module)
    if not files:
        if module.partition(".")[0] in {*sys.builtin_module_names, *sys.stdlib_module_names}:
            return  # of C: only an import can tell
        raise InputError(source, None, key, f"cannot import {module!r}: no such module")
    import ast

    try:
        body = ast.parse(files[-1].read_bytes(), str(files[-1])).body
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        problem = f"cannot import {where}: {_told(error)}"
        raise InputError(source, None, key, problem) from None
    defined = _defined(body)
    if defined.get(name) is FunctionType:
        problem = f"{path} ({files[-1]}) is a function, expected a class"
        raise InputError(source, None, key, problem)
    if name not in defined and "*" not in defined:
        raise InputError(source, None, key, f"{where} has no {name!r}")


def _defined(body: Sequence[ast.stmt]) -> dict[str, object]:
    """Names that the statements of a module define, and what functions are."""
    import ast

    names: dict[str, object] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = type
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names[node.name] = FunctionType
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name, None) for alias in node.names)
        else:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    names[inner.id] = None
                elif isinstance(inner, (ast.ClassDef, ast.FunctionDef)):
                    names[inner.name] = None
    return names


def _forbidden(path: str, key: str, source: str) -> InputError:
    return InputError(source, None, key, f"names the class {path}, which --no-plugins refuses")


# --- loading --------------------------------------------------------------------------------------
def load_plugin(path: str, key: str, source: str = "config") -> type:
    """The class of that name. Raises InputError (at the config key) if there is none."""
    if are_forbidden():
        raise _forbidden(path, key, source)
    if path in _OBJECTS:
        return _OBJECTS[path]
    module_name, colon, name = path.rpartition(":")
    if not colon:
        hint = "or give package.module:Class or ./file.py:Class"
        raise InputError(source, None, key, f"unknown name {path!r}; {hint}")
    _FILES.update(str(file) for file in sources(path))
    if module_name.endswith(_SUFFIX):
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
        problem = f"{path}{_place(found)} is {_what(found)}, expected a class"
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
        problem = f"cannot import {what}: {_told(error)}"
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
                problem = f"{path}{_place(found)} does not derive from {module}.{name}"
                raise InputError(source, None, key, problem)
    missing = sorted(getattr(found, "__abstractmethods__", ())) or [
        n for n in needs if n not in has
    ]
    if missing:
        raise InputError(source, None, key, _lacks(path, found, missing) + hint)
    for name, count in kind.methods.items():
        problem = _problem_of_method(found, name, count)
        if problem:
            raise InputError(source, None, key, f"{path}{_place(found)}: {problem}")
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
        return f"{name} is {_what(method)}, expected a method"
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


def make_plugin(
    path: str,
    key: str,
    *arguments: object,
    context: object = None,
    options: object = None,
    source: str = "config",
) -> Any:
    """An object of the class of that name, made from `arguments`.

    A constructor with a parameter `context` gets the `context`. `options`: the keys of its table,
    for a class that has `Options`. Raises InputError (at the config key) if it cannot be made so,
    or lacks something.
    """
    import inspect

    found = check_plugin(path, key, source)
    keywords: dict[str, object] = {}
    try:
        signature = inspect.signature(found)
        if "context" in signature.parameters and context is not None:
            keywords["context"] = context
        if options is not None:
            keywords["options"] = options
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        kinds = ", ".join(type(argument).__name__ for argument in arguments)
        problem = f"{path}{_place(found)} cannot be made from ({kinds}): {error}"
        raise InputError(source, None, key, problem) from None
    except ValueError:
        pass  # a constructor in C has no signature: it is tried
    try:
        made = _told_by_its_methods(found)(*arguments, **keywords)
    except (KeyboardInterrupt, EmuError):
        raise
    except BaseException as error:
        problem = f"{path}{_place(found)} cannot be made: {_told(error)}"
        raise InputError(source, None, key, problem) from None
    _check_made(made, found, path, key, source)
    return made


def _check_made(made: object, found: type, path: str, key: str, source: str) -> None:
    """Refuse an object that lacks what its key asks for. Raises InputError."""
    kind = KINDS.get(key)
    if kind is None:
        return
    missing = [n for n in (*kind.methods, *kind.attributes) if not hasattr(made, n)]
    if missing:
        raise InputError(source, None, key, _lacks(path, found, missing))
    for name in kind.methods:
        if not callable(getattr(made, name)):
            problem = f"{name} is {_what(getattr(made, name))}, expected a method"
            raise InputError(source, None, key, f"{path}{_place(found)}: {problem}")


@functools.lru_cache(maxsize=256)
def _told_by_its_methods(found: type) -> type:
    """The class with public methods whose StopIteration or GeneratorExit is a PluginError.

    A coroutine that such an exception passes takes it for an end: Python's own makes a
    RuntimeError of it, a compiled one returns. Methods of emu's own bases stay as they are.
    """
    methods: dict[str, object] = {}
    for one in reversed(found.__mro__):
        if one.__module__.partition(".")[0] == "emu":
            continue
        for name, member in vars(one).items():
            if isinstance(member, FunctionType) and not name.startswith("_"):
                methods[name] = _telling(member)
            elif name in methods:
                del methods[name]  # overridden by something else
    if not methods:
        return found
    same = {"__module__": found.__module__, "__qualname__": found.__qualname__}
    kind: type = type(found)(found.__name__, (found,), {**methods, **same, "__slots__": ()})
    return kind


def _telling(method: FunctionType) -> Callable[..., Any]:
    """A method whose exceptions that no coroutine lets pass are told as a PluginError."""

    @functools.wraps(method)
    def told(*arguments: Any, **keywords: Any) -> Any:
        try:
            return method(*arguments, **keywords)
        except (StopIteration, StopAsyncIteration, GeneratorExit) as error:
            raise PluginError(_told(error)) from error

    return told


# --- blame ----------------------------------------------------------------------------------------
def blamed(error: BaseException) -> BaseException:
    """The error of a run, as a PluginError if it arose in the code of a user's class."""
    if isinstance(error, (EmuError, KeyboardInterrupt)) or not isinstance(
        error, (Exception, SystemExit)
    ):
        return error
    if not _frames(error.__traceback__):
        return error
    problem = PluginError(_told(error))
    problem.__cause__ = error
    return problem


def _frames(trace: TracebackType | None) -> list[tuple[str, int, str]]:
    """File, line and function of the frames of users' classes, the outermost first."""
    found = []
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename in _FILES:
            found.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return found


def _told(error: BaseException) -> str:
    """An exception in one line, with the place in the user's own code."""
    text = " ".join(str(error).split())
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        what = f"{type(error).__name__}: {error.msg}"
        return f"{what} ({error.filename}:{error.lineno})"
    if isinstance(error, SystemExit):
        what = f"it ends the process (SystemExit {error.code!r})"
    frames = _frames(error.__traceback__)
    if frames:
        file, line, function = frames[-1]
        inside = "" if function == "<module>" else f" in {function}"
        what += f" ({file}:{line}{inside})"
    return what


def _what(found: object) -> str:
    """What something is that is no class."""
    if isinstance(found, ModuleType):
        return "a module"
    if callable(found):
        return "a function"
    return f"a value of type {type(found).__name__}"


def _place(found: Any) -> str:
    """Where something stands."""
    module = sys.modules.get(getattr(found, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    return f" ({file})" if file else ""


def _lacks(path: str, found: Any, missing: Sequence[str]) -> str:
    """What a class has not, and where it stands."""
    return f"{path}{_place(found)} lacks {', '.join(missing)}"


def guarded(work: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
    """`fail` gets any exception of `work`, with its traceback.

    It stands here because this module is not compiled: a compiled handler binds an exception
    without the frames that it came through, and those tell whose code is at fault.
    """
    try:
        work()
    except BaseException as error:
        fail(error)
