"""Tasks on a Ray cluster (extra `ray`).

`address` is that of a running cluster ("auto", "10.0.0.1:6379", "ray://..."), or "local" for a
cluster of this machine alone with as many workers as jobs. emu travels to the workers with the
job; the packages it needs and the files that a config names must be there already.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from emu.documents import Document
from emu.errors import InputError, RunError, needs_extra


class RayPool:
    """Results in the order in which Ray has them."""

    def __init__(self, address: str, jobs: int, call: Callable[[Any], Any]) -> None:
        """`call`: what is done with each task, a function of a module."""
        with needs_extra("ray", "--ray"):
            import ray
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._ray: Any = ray
        options: Document = {"num_cpus": jobs} if address == "local" else {}
        package = str(Path(__file__).resolve().parents[1])
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                include_dashboard=False if address == "local" else None,
                runtime_env={"py_modules": [package]},
                logging_level="ERROR",
                **options,
            )
        except Exception as error:  # a node that does not start is a bare Exception of Ray's
            problem = " ".join(str(error).split()) or type(error).__name__
            raise InputError("--ray", None, address, f"Ray: {problem}") from None
        self.workers = int(ray.cluster_resources().get("CPU", 1))

        self._remote = ray.remote(num_cpus=1, max_retries=3)(call)

    def results(self, tasks: Sequence[Any]) -> Iterator[Any]:
        """Run all tasks. A task whose machine is lost is tried again by Ray."""
        waiting = [self._remote.remote(task) for task in tasks]
        while waiting:
            ready, waiting = self._ray.wait(waiting, num_returns=1)
            try:
                yield self._ray.get(ready[0])
            except self._ray.exceptions.RayError as error:
                raise RunError(f"Ray: {str(error).splitlines()[0]}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ray.shutdown()
