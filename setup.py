"""What pyproject.toml cannot say: a wheel knows its revision, and the hot path is compiled.

Where mypyc and a C compiler are, every installation compiles the modules below into one extension:
a wheel has it beside the package, an editable installation in `build/compiled`. Elsewhere it is
pure Python, which a line says. EMU_COMPILE=0 does without, EMU_COMPILE=1 fails where it cannot be
compiled. The same files are the source of both.

    python setup.py compile     # the build of a checkout, if there is anything new
"""

from __future__ import annotations

import compileall
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build"
# The hot path. One group: calls between these modules are C calls. No msgspec.Struct may stand in
# them (mypyc drops the keywords of a class statement): tests/speed/test_compiled_modules.py.
COMPILED = """
kernel/clock kernel/digest kernel/lock kernel/natives kernel/priorities
request units
scheduling/base scheduling/cohort scheduling/ledger scheduling/parts scheduling/running
scheduling/looking scheduling/vllm scheduling/simple scheduling/pipeline scheduling/queues
scheduling/verifying scheduling/fcfs scheduling/layer_batches
scheduling/vidur/orca scheduling/vidur/paged scheduling/vidur/sarathi scheduling/vidur/vllm_v0
scheduling/vidur/lightllm scheduling/vidur/faster_transformer
features/speculation/acceptance features/speculation/passes features/lora/slots
scheduling/sglang/admission scheduling/sglang/orders scheduling/sglang/retraction
scheduling/sglang/scheduler
scheduling/tensorrt_llm/capacity scheduling/tensorrt_llm/chunks scheduling/tensorrt_llm/scheduler
kv/blocks kv/counting kv/free_list kv/keys kv/prefix_tree kv/radix kv/tiers kv/tree_pool
migration/ports migration/destinations migration/watcher migration/outbound migration/transfer
migration/live
network/carrier network/flows network/links network/max_min
network/collectives network/congestion network/direct network/tree
autoscale/blitz_plan autoscale/detours autoscale/draft autoscale/host_cache autoscale/hpa
autoscale/local_plans autoscale/planner autoscale/scaler autoscale/sight autoscale/under_way
autoscale/views
backends/astra/calculator backends/astra/chain backends/astra/collective_run backends/astra/counts
backends/astra/executor backends/astra/layer_times backends/astra/roofline_times
latency/base latency/ends latency/packing latency/added latency/linear
latency/profile/attention latency/profile/backend latency/profile/skew latency/profile/tables
latency/engine_steps latency/sampling latency/front_end latency/known_intake latency/jitter
latency/roofline latency/layer_costs
latency/kernels/products latency/kernels/experts latency/kernels/machine
latency/kernels/attention latency/kernels/factors latency/kernels/operations
replica/actor replica/effects replica/books replica/counters replica/crash replica/inbound
replica/orders replica/posted replica/pace replica/ports replica/prerequisites replica/replica
replica/serving replica/table replica/tier_traffic replica/view replica/watch replica/mailbox
replica/weights replica/gate replica/flight/base replica/flight/step replica/flight/run
replica/flight/staged replica/flight/member replica/flight/awaiting replica/flight/measured
replica/flight/starters replica/flight/launchers replica/flight/onto_stages
replica/flight/layered replica/flight/relay replica/wave
routing/policies routing/order routing/signal
cluster/cluster cluster/dispatch cluster/gateway cluster/recorder
report/sums report/records report/itl report/csvtext report/timeseries
report/perfetto report/trace_sink
apps/serve/choices apps/serve/deliveries apps/serve/lines apps/serve/statistics
""".split()  # noqa: SIM905


def part(name: str) -> ModuleType:
    """A module of emu that imports nothing of it, without the package around it."""
    path = ROOT / "emu" / "process" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"emu_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def wanted() -> bool:
    """Whether to compile; says in a line why not if that was not asked for."""
    asked = os.environ.get("EMU_COMPILE") or "auto"
    if asked not in ("0", "1", "auto"):
        raise SystemExit(f"EMU_COMPILE is 0, 1 or auto, not {asked!r}")
    if asked == "0":
        return False
    problem = why_not()
    if problem and asked == "1":
        raise SystemExit(f"EMU_COMPILE=1, but {problem}")
    if problem:
        print(f"emu runs as pure Python, because {problem}", file=sys.stderr)
    return not problem


def why_not() -> str:
    """Empty, or what is missing to compile."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if os.name != "nt" and shutil.which(compiler) is None:
        return f"there is no C compiler ({compiler})"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "the headers of Python (Python.h) are not installed"
    if importlib.util.find_spec("mypyc") is None:
        return "mypy is not installed"
    return ""


def names() -> list[str]:
    """The modules of the group, as they are imported."""
    return [f"emu.{name.replace('/', '.')}" for name in COMPILED]


class Modules(Distribution):
    """emu, which has extensions if it is compiled."""

    def has_ext_modules(self) -> bool:
        return os.environ.get("EMU_COMPILE") != "0" and not why_not()


class BuildModules(build_ext):
    """The group as C, its files compiled side by side; an object file is made once."""

    command_name = "build_ext"

    def run(self) -> None:
        if self.editable_mode:
            self.run_command("compile")
            return
        if not wanted():
            return
        try:
            self.generate()
        except SystemExit:  # mypy has said why: types of a library that it does not know
            if os.environ.get("EMU_COMPILE") == "1":
                raise
            print("emu runs as pure Python, because mypyc cannot translate it", file=sys.stderr)
            return
        super().run()
        note(Path(self.build_lib), compiled=names())

    def get_outputs(self) -> list[str]:
        return [] if self.editable_mode else super().get_outputs()

    def get_output_mapping(self) -> dict[str, str]:
        return {} if self.editable_mode else super().get_output_mapping()

    def generate(self) -> None:
        """Translate the modules to C. Not before there is something to build: it takes long."""
        from mypyc.build import mypycify

        shared, *_ = mypycify(  # the others only look up an entry of this one
            [
                f"--config-file={ROOT / 'pyproject.toml'}",
                f"--cache-dir={BUILD / 'mypy'}",
                *(f"emu/{name}.py" for name in COMPILED),
            ],
            opt_level="1",
            debug_level="0",
            multi_file=True,
            target_dir=str(BUILD / "mypyc"),
            group_name="emu",
        )
        shared.sources.append(self.entries())
        if sys.platform == "linux":  # its functions call each other without a table between them
            shared.extra_compile_args += ["-fno-semantic-interposition", "-fvisibility=hidden"]
            shared.extra_compile_args += ["-fno-plt", "-freorder-blocks-and-partition"]
            shared.extra_compile_args += ["-include", self.rare()]
            shared.extra_link_args += ["-Wl,-Bsymbolic"]
        self.distribution.ext_modules = [shared]
        self.distribution.reinitialize_command(self)
        self.ensure_finalized()  # looks at the extensions

    @staticmethod
    def entries() -> str:
        """A file of C with an entry for each module, by a name that is unique in the extension."""
        lines = ["#include <Python.h>"]
        for entry in map(part("compiled").entry_of, names()):
            lines.append(f"extern PyObject *CPyInit_{entry}(void);")
            lines.append(f"PyMODINIT_FUNC PyInit_{entry}(void) {{ return CPyInit_{entry}(); }}")
        path = BUILD / "mypyc" / "entries.c"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(path)

    @staticmethod
    def rare() -> str:
        """A header that tells the compiler which calls of mypyc's code only errors make.

        What leads to them then stands apart from what runs, which is half as long.
        """
        never = "__attribute__((cold));"
        lines = [
            "#include <stddef.h>",
            "struct _object;",
            "void CPy_AddTraceback(const char *, const char *, int, struct _object *)" + never,
            "void CPy_TypeError(const char *, struct _object *)" + never,
            "void CPyTagged_IncRef(size_t)" + never,
            "void CPyTagged_DecRef(size_t)" + never,
            "void CPyTagged_XDecRef(size_t)" + never,
        ]
        path = BUILD / "mypyc" / "rare.h"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(path)

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extensions(self) -> None:
        one_by_one = self.compiler.compile
        objects = Objects(self.compiler.compiler_so)

        def side_by_side(sources: list[str], **how: object) -> list[str]:
            def made(source: str) -> str:
                (path,) = self.compiler.object_filenames([source], output_dir=how["output_dir"])
                if not objects.take(source, how, path):
                    one_by_one([source], **how)
                    objects.keep(source, how, path)
                return path

            with ThreadPoolExecutor(self.parallel) as pool:
                return list(pool.map(made, sources))

        self.compiler.compile = side_by_side
        super().build_extensions()
        objects.forget_others()


class Objects:
    """Object files by the digest of what they were made from."""

    def __init__(self, command: list[str]) -> None:
        self._directory = BUILD / "objects"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._used: set[str] = set()
        digest = hashlib.sha256(f"{sys.version} {command}".encode())
        for header in sorted((BUILD / "mypyc").rglob("*.h")):
            digest.update(header.read_bytes())
        self._common = digest.digest()

    def take(self, source: str, how: dict[str, object], path: str) -> bool:
        """Put a known object file where it belongs; False if there is none."""
        known = self._at(source, how)
        if not known.exists():
            return False
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(known, path)
        return True

    def keep(self, source: str, how: dict[str, object], path: str) -> None:
        """Remember the object file of a source."""
        known = self._at(source, how)
        shutil.copyfile(path, known.with_suffix(".part"))
        known.with_suffix(".part").replace(known)

    def forget_others(self) -> None:
        """Remove those that this build did not need."""
        for path in self._directory.iterdir():
            if path.name not in self._used:
                path.unlink()

    def _at(self, source: str, how: dict[str, object]) -> Path:
        options = repr(sorted((key, str(value)) for key, value in how.items()))
        digest = hashlib.sha256(self._common + options.encode() + Path(source).read_bytes())
        name = f"{digest.hexdigest()[:32]}.o"
        self._used.add(name)
        return self._directory / name


class Compile(Command):
    """The compiled build of a checkout, in build/compiled, where `import emu` finds it."""

    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        self.place = Path()

    def finalize_options(self) -> None:
        self.place = Path(part("compiled").beside(str(ROOT)))

    def run(self) -> None:
        if not wanted():
            return
        sources = part("sources")
        modules = {
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
            for path in sorted((ROOT / "emu").rglob("*.py"))
        }
        uses = sources.graph_of(modules, names())
        listed = [self.entry(name, modules[name]) for name in sources.reached_from(names(), uses)]
        recipe = self.recipe()
        text = "".join("\t".join(line) + "\n" for line in listed)
        if self.is_current(listed, recipe):
            touched = self.place / "modules.txt.part"  # the times of what was checked out again
            touched.write_text(text, encoding="utf-8")
            touched.replace(self.place / "modules.txt")
        else:
            print(f"compiling {len(COMPILED)} modules of emu: a minute or two, once", flush=True)
            BUILD.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=BUILD, prefix="compiling-") as made:
                self.extension_into(made)
                Path(made, "graph.json").write_text(json.dumps(uses), encoding="utf-8")
                Path(made, "recipe").write_text(recipe, encoding="utf-8")
                Path(made, "modules.txt").write_text(text, encoding="utf-8")
                shutil.rmtree(self.place, ignore_errors=True)
                self.place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copytree(made, self.place)
            compileall.compile_dir(ROOT / "emu", quiet=1)  # for EMU_COMPILE=0
        python = {name: str(path) for name, path in modules.items() if name not in names()}
        part("archived").write(str(self.place / part("compiled").CODE), str(ROOT), python)
        print(f"emu is compiled ({len(COMPILED)} modules, build/compiled)")

    def extension_into(self, directory: str) -> None:
        """Compile in a process of its own, whose output is of interest only if it fails."""
        log = BUILD / "compile.log"
        command = [sys.executable, "setup.py", "build_ext", "--build-lib", directory]
        environment = {**os.environ, "EMU_COMPILE": "1"}
        with log.open("wb") as sink:
            done = subprocess.run(command, cwd=ROOT, env=environment, stdout=sink, stderr=sink)
        if done.returncode:
            print("\n".join(log.read_text(errors="replace").splitlines()[-15:]), file=sys.stderr)
            how = (
                f"status {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
            )
            raise SystemExit(f"not compiled ({how}, {log}); emu runs as pure Python")

    @staticmethod
    def entry(name: str, path: Path) -> tuple[str, ...]:
        """A line of modules.txt, of a source as it is now."""
        facts = path.stat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        is_compiled = str(int(name in names()))
        where = str(path.relative_to(ROOT))
        return name, where, is_compiled, str(facts.st_mtime_ns), str(facts.st_size), digest

    @staticmethod
    def recipe() -> str:
        """What a build is made with."""
        from mypy.version import __version__ as mypy_version

        digest = hashlib.sha256((ROOT / "setup.py").read_bytes()).hexdigest()
        return f"{sys.version}\nmypy {mypy_version}\n{digest}\n"

    def is_current(self, listed: list[tuple[str, ...]], recipe: str) -> bool:
        """Whether the build there is one of these sources."""
        try:
            if (self.place / "recipe").read_text(encoding="utf-8") != recipe:
                return False
            known = (self.place / "modules.txt").read_text(encoding="utf-8").splitlines()
        except OSError:
            return False
        was = [line.split("\t") for line in known]
        now = {(name, digest) for name, _, _, _, _, digest in listed}
        return {(name, digest) for name, _, _, _, _, digest in was} == now


def note(directory: Path, **facts: object) -> None:
    """Add facts to emu/build.json, which is installed beside the modules."""
    path = directory / "emu" / "build.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**known, **facts}) + "\n", encoding="utf-8")


class BuildWithRevision(build_py):
    """Notes the revision."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        if revision := part("version").checkout_revision(ROOT):
            note(Path(self.build_lib), revision=revision)
        if not self.distribution.has_ext_modules():
            wanted()  # says why not


if __name__ == "__main__":
    os.chdir(ROOT)
    setup(
        distclass=Modules,
        cmdclass={"build_py": BuildWithRevision, "build_ext": BuildModules, "compile": Compile},
    )
