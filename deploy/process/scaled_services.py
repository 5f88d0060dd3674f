"""Keeps the numbers of workers that `asyncrl scale` asked for in RUN_DIR/scaled.json: a resume begins with them.

    asyncrl scale ──> keep ──> {"generation": {"config": 1, "workers": 3}} ──> scaled_specs ──> next start

A number counts until the config has another one than at the time of the command.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from asyncrl.errors import ConfigError, Refused
from asyncrl.fleet.fleet import ServiceSpec, scalable
from asyncrl.telemetry.run_directory import replace_text


@dataclass(frozen=True, slots=True)
class Scaled:
    """The workers of one service. config: replicas of its config. workers: number that was asked for."""

    config: int
    workers: int


def keep(file: Path, service: str, scaled: Scaled) -> None:
    """Keeps the number of one service for the next start. Raises OSError where nothing can be written."""
    kept = {**_read(file), service: scaled}
    differing = {name: asdict(each) for name, each in kept.items() if each.workers != each.config}
    replace_text(file, json.dumps(differing) + "\n")


def scaled_specs(specs: Sequence[ServiceSpec], file: Path, say: Callable[[str], None]) -> Iterator[ServiceSpec]:
    """Yields the specs of a run, with the numbers of workers that the last start of it had in the end. file: of the run
    directory. say: takes what a person should read. Raises ConfigError for a damaged file."""
    kept = _read(file)
    by_name = {spec.name: spec for spec in specs}
    for spec in specs:
        scaled = kept.get(spec.name)
        if scaled is None or scaled.workers == spec.replicas:
            yield spec
        elif scaled.config != spec.replicas:
            say(
                f"{spec.name} begins with {spec.replicas} workers, as its config says since; `asyncrl scale` left it "
                f"with {scaled.workers}"
            )
            yield spec
        else:
            yield _scaled(spec, by_name, scaled, say)


def _scaled(
    spec: ServiceSpec, specs: Mapping[str, ServiceSpec], scaled: Scaled, say: Callable[[str], None]
) -> ServiceSpec:
    try:
        scalable(specs, spec.name, scaled.workers)
    except Refused as refused:
        say(
            f"{spec.name} begins with {spec.replicas} workers; `asyncrl scale` left it with {scaled.workers}: {refused}"
        )
        return spec
    say(
        f"{spec.name} begins with {scaled.workers} workers, as `asyncrl scale` left it; its config says {spec.replicas}"
    )
    return replace(spec, replicas=scaled.workers, joined=min(spec.joined, scaled.workers))


def _read(file: Path) -> dict[str, Scaled]:
    try:
        return {str(name): Scaled(**each) for name, each in json.loads(file.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is damaged ({error}): delete it to begin with the config's workers") from error
