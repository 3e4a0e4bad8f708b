"""What pyproject.toml cannot say: a wheel knows its revision, and may be compiled.

EMU_COMPILE=1 compiles the modules below with mypyc into one extension; a build that cannot is an
error. EMU_COMPILE=auto compiles where mypyc and a C compiler are, and else says why not. Without
it, and in editable installs, the package is pure Python. The same files are the source of both.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# The hot path. One group: calls between these modules are C calls. No msgspec.Struct may stand in
# them (mypyc drops the keywords of a class statement): tests/speed/test_compiled_modules.py.
COMPILED = """
kernel/clock kernel/natives
request units
scheduling/base scheduling/cohort scheduling/ledger scheduling/parts scheduling/running
scheduling/looking scheduling/vllm scheduling/simple
scheduling/sglang/admission scheduling/sglang/orders scheduling/sglang/retraction
scheduling/sglang/scheduler
kv/blocks kv/counting kv/free_list kv/keys kv/prefix_tree kv/radix kv/tiers kv/tree_pool
migration/ports migration/destinations migration/watcher migration/outbound migration/transfer
network/carrier network/flows network/links network/max_min
latency/base latency/ends latency/packing
latency/engine_steps latency/sampling latency/front_end latency/jitter
latency/roofline latency/layer_costs
latency/kernels/products latency/kernels/experts latency/kernels/machine
latency/kernels/attention latency/kernels/operations
replica/actor replica/books replica/counters replica/crash replica/inbound replica/pace
replica/ports replica/prerequisites replica/replica replica/serving replica/table replica/view
replica/watch replica/mailbox replica/weights replica/gate
replica/flight/base replica/flight/step replica/flight/run replica/flight/staged
replica/flight/member replica/flight/awaiting replica/flight/measured replica/flight/starters
replica/flight/layered replica/flight/relay
routing/policies routing/order routing/signal
cluster/cluster cluster/dispatch cluster/gateway cluster/recorder
report/sums report/records report/itl report/csvtext report/timeseries
""".split()  # noqa: SIM905


def revision_of_checkout() -> str:
    """The revision of this checkout, as `emu --version` finds it; empty outside of one."""
    names: dict[str, object] = {"__file__": str(ROOT / "emu" / "process" / "version.py")}
    exec((ROOT / "emu" / "process" / "version.py").read_text(encoding="utf-8"), names)
    found = names["checkout_revision"]
    assert callable(found)
    return str(found(ROOT))


def extensions() -> list[Extension]:
    """Of the hot path, as EMU_COMPILE wants it."""
    wanted = os.environ.get("EMU_COMPILE", "0")
    if wanted not in ("0", "1", "auto"):
        raise SystemExit(f"EMU_COMPILE is 0, 1 or auto, not {wanted!r}")
    if wanted == "0" or "editable_wheel" in sys.argv or "develop" in sys.argv:
        return []
    problem = why_not()
    if not problem:
        return compiled_modules()
    if wanted == "1":
        raise SystemExit(f"EMU_COMPILE=1, but {problem}")
    print(f"emu: a pure Python build, because {problem}", file=sys.stderr)
    return []


def why_not() -> str:
    """Empty, or what is missing to compile."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if os.name != "nt" and shutil.which(compiler) is None:
        return f"there is no C compiler ({compiler})"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "the headers of Python (Python.h) are not installed"
    try:
        import mypyc.build  # noqa: F401
    except ImportError:
        return "mypy is not installed"
    return ""


def compiled_modules() -> list[Extension]:
    """The modules as C, one group."""
    from mypyc.build import mypycify

    return mypycify(
        [
            f"--config-file={ROOT / 'pyproject.toml'}",
            f"--cache-dir={ROOT / 'build' / 'mypy'}",
            *(f"emu/{name}.py" for name in COMPILED),
        ],
        opt_level="1",
        debug_level="0",
        multi_file=True,
        target_dir=str(ROOT / "build" / "mypyc"),
        group_name="emu",
    )


class BuildOnAllCores(build_ext):
    """Files of C are compiled side by side, those of one extension too."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extensions(self) -> None:
        one_by_one = self.compiler.compile

        def side_by_side(sources: list[str], **how: object) -> list[str]:
            with ThreadPoolExecutor(self.parallel) as pool:
                made = pool.map(lambda source: one_by_one([source], **how), sources)
                return [name for names in made for name in names]

        self.compiler.compile = side_by_side
        super().build_extensions()


class BuildWithRevision(build_py):
    """Leaves emu/build.json beside the modules."""

    def run(self) -> None:
        super().run()
        revision = revision_of_checkout()
        if revision and not self.editable_mode:
            path = Path(self.build_lib) / "emu" / "build.json"
            path.write_text(json.dumps({"revision": revision}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.chdir(ROOT)
    setup(
        cmdclass={"build_py": BuildWithRevision, "build_ext": BuildOnAllCores},
        ext_modules=extensions(),
    )
