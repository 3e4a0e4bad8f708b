"""How well an engine's constants are known: a normal distribution of eight of them.

Owns `PARAMETERS` (what is estimated of an `EngineModel`), the distribution's form in a file, and
where it comes from: the table `[posterior]` of a learned engine (`emu learn`), else the prior in
`prior.toml`, which measured runs have given for their GPUs (`emu fidelity DIR --prior FILE`). A
GPU without measured runs has the generic prior: centered on the constants as they are, and as
wide as the shift that measured runs showed and their spread together.
"""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from emu.config.tomlfile import read_toml
from emu.errors import InputError
from emu.latency.engine import EngineModel, bounds_of
from emu.process.annotated import Annotated
from emu.process.prepared import prepared

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Floats: TypeAlias = "NDArray[np.float64]"


class Parameter(msgspec.Struct, frozen=True):
    """One constant that is estimated. It lies between `least` and `most`, in its own unit."""

    name: str
    step: float
    """Of finite differences."""
    scale: float
    """As far as a constant may reasonably lie from the shipped one: the unit of estimation."""
    least: float
    most: float
    is_whole: bool = True

    def bounded(self, value: float) -> float:
        """The nearest value that a constant may have."""
        kept = min(self.most, max(self.least, value))
        return round(kept) if self.is_whole else kept


_MS: Final = 1e6
PARAMETERS: Final = (
    Parameter("weights_time", 0.04, 0.1, *bounds_of("weights_time"), is_whole=False),
    Parameter("context_time", 0.15, 0.3, *bounds_of("context_time"), is_whole=False),
    Parameter("prompt_time", 0.3, 0.3, *bounds_of("prompt_time"), is_whole=False),
    Parameter("added_step_ns", 0.2 * _MS, 0.5 * _MS, *bounds_of("added_step_ns")),
    Parameter("added_sequence_ns", 0.005 * _MS, 0.015 * _MS, *bounds_of("added_sequence_ns")),
    Parameter("added_prompt_ns", 1 * _MS, 2 * _MS, *bounds_of("added_prompt_ns")),
    Parameter("intake_ns", 1 * _MS, 2 * _MS, *bounds_of("intake_ns")),
    Parameter("output_event_ns", 0.03 * _MS, 0.06 * _MS, *bounds_of("output_event_ns")),
)
"""Kernel efficiency by class, host time by step, sequence and prompt, front end."""
NAMES: Final = tuple(parameter.name for parameter in PARAMETERS)
METRICS: Final = ("ttft", "tpot")
"""What a server's behavior is described by; relative errors of both are normal."""


class Posterior(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A normal distribution of `PARAMETERS`."""

    parameters: list[str]
    mean: list[float]
    """Of a learned engine its values; of a prior their distance from the engine's."""
    covariance: list[list[float]]
    noise: dict[str, Annotated[float, msgspec.Meta(gt=0)]]
    """Relative error (standard deviation) of a mean TTFT and TPOT that is left with any values."""

    def check(self, source: str) -> None:
        """Raises InputError if the numbers are no distribution of `PARAMETERS`."""
        import numpy as np

        size = len(PARAMETERS)
        if tuple(self.parameters) != NAMES:
            problem = f"expected {', '.join(NAMES)}"
            raise InputError(source, None, "posterior.parameters", problem)
        if len(self.mean) != size:
            raise InputError(source, None, "posterior.mean", f"expected {size} numbers")
        rows = [len(row) for row in self.covariance]
        if rows != [size] * size:
            raise InputError(source, None, "posterior.covariance", f"expected {size} x {size}")
        matrix = self.matrix
        largest = float(np.abs(matrix).max())
        if not np.isfinite(matrix).all() or not np.allclose(matrix, matrix.T, atol=1e-6 * largest):
            raise InputError(source, None, "posterior.covariance", "is not symmetric")
        scales = np.array([p.scale for p in PARAMETERS])
        if np.linalg.eigvalsh(matrix / np.outer(scales, scales)).min() < -1e-6:
            raise InputError(source, None, "posterior.covariance", "is no covariance")
        if set(self.noise) != set(METRICS):
            raise InputError(source, None, "posterior.noise", f"expected {' and '.join(METRICS)}")

    @property
    def matrix(self) -> Floats:
        """The covariance."""
        import numpy as np

        return np.array(self.covariance, dtype=np.float64)


class Known(msgspec.Struct, frozen=True):
    """What is known of the engine of one deployment."""

    engine: EngineModel
    posterior: Posterior
    """Its mean is absolute."""
    source: str
    """In words: what the distribution rests on."""


class _PriorOfGpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gpu: str
    runs: int
    models: list[str]
    """Measured on it."""
    posterior: Posterior
    """Of these models."""
    other: Posterior
    """Of models that were not measured on it: as much of the shift as carries over."""


class _PriorFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    runs: int
    generic: Posterior
    gpus: list[_PriorOfGpu] = []


_FILE: Final = Path(__file__).with_name("prior.toml")


@functools.cache
def _priors() -> _PriorFile:
    # A test checks its numbers.
    return msgspec.toml.decode(_FILE.read_bytes(), type=prepared(_PriorFile))


def plain_values_of(engine: EngineModel) -> list[float]:
    """The engine's values of `PARAMETERS`."""
    fields = msgspec.structs.asdict(engine)
    return [float(fields[name]) for name in NAMES]


def values_of(engine: EngineModel) -> Floats:
    """The same as an array."""
    import numpy as np

    return np.array(plain_values_of(engine))


def with_values(engine: EngineModel, values: Iterable[float]) -> EngineModel:
    """The engine with other values of `PARAMETERS`, within bounds."""
    changes = {
        parameter.name: parameter.bounded(float(value))
        for parameter, value in zip(PARAMETERS, values, strict=True)
    }
    return msgspec.structs.replace(engine, **changes)


def prior_of(engine: EngineModel, gpu: str, model: str, backend: str = "roofline") -> Known:
    """What measured runs say of an engine that was not measured here (catalogue names)."""
    priors = _priors()
    mine = next((p for p in priors.gpus if p.gpu == gpu and backend == "roofline"), None)
    if mine is None:
        shift = priors.generic
        words = f"generic prior of {priors.runs} measured runs, none on {gpu} with {backend}"
    elif model in mine.models:
        shift = mine.posterior
        words = f"prior of {mine.runs} measured runs on {gpu}"
    else:
        shift = mine.other
        words = f"prior of {mine.runs} measured runs of other models on {gpu}"
    mean = [here + off for here, off in zip(plain_values_of(engine), shift.mean, strict=True)]
    posterior = msgspec.structs.replace(shift, mean=mean)
    return Known(engine, posterior, words)


def learned_posterior(path: Path) -> Posterior | None:
    """The `[posterior]` of an engine's file; None if it has none. Raises InputError."""
    table = read_toml(path, str(path))[1]
    if "posterior" not in table:
        return None
    try:
        found = msgspec.convert(table["posterior"], prepared(Posterior))
    except msgspec.ValidationError as error:
        raise InputError(str(path), None, "posterior", str(error)) from None
    found.check(str(path))
    return found


def known_engine(engine: EngineModel, learned: str, gpu: str, model: str, backend: str) -> Known:
    """What is known of an engine; `learned`: the file of its constants, empty for those of emu."""
    if learned:
        found = learned_posterior(Path(learned))
        if found is not None:
            return Known(engine, found, f"posterior of {Path(learned).name}")
    return prior_of(engine, gpu, model, backend)


def draws(known: Known, count: int, rng: "np.random.Generator") -> list[EngineModel]:
    """Engines drawn from the distribution; the error that any values leave (`noise`) is drawn
    with them, as a factor of all step times."""
    import numpy as np

    scales = np.array([p.scale for p in PARAMETERS])
    scaled = known.posterior.matrix / np.outer(scales, scales)
    found, axes = np.linalg.eigh(scaled)
    spread = axes * np.sqrt(np.maximum(found, 0.0))
    mean = np.array(known.posterior.mean)
    left = known.posterior.noise["tpot"]
    engines = []
    for _ in range(count):
        values = mean + scales * (spread @ rng.standard_normal(len(scales)))
        factor = 1.0 + left * float(rng.standard_normal())
        values[:3] *= factor
        engines.append(with_values(known.engine, values))
    return engines
