"""The latency backends of one run: replicas of the same kind share one, with its tables.

Also ends the programs that backends have started.
"""

from __future__ import annotations

from emu.errors import RunError
from emu.latency.base import LatencyBackend
from emu.latency.registry import LatencyContext, make_latency


class SharedBackends:
    """Backends by what they were built from."""

    def __init__(self) -> None:
        self._known: list[tuple[LatencyContext, LatencyBackend]] = []

    def of(self, context: LatencyContext) -> LatencyBackend:
        """The backend of this context, made when it is first asked for."""
        for known, backend in self._known:
            if known == context:
                return backend
        backend = make_latency(context)
        self._known.append((context, backend))
        return backend

    async def aclose(self) -> RunError | None:
        """End all programs, whatever else is being cancelled; the first that ended badly."""
        backends = [getattr(backend, "inner", backend) for _, backend in self._known]
        closing = [backend for backend in backends if hasattr(backend, "aclose")]
        if not closing:
            return None
        import anyio

        problem: RunError | None = None
        with anyio.CancelScope(shield=True):
            for backend in closing:
                try:
                    await backend.aclose()
                except RunError as raised:
                    problem = problem or raised
        return problem
