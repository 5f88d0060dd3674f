"""Keeps a search in its directory, from which it goes on: the request, the candidates and their runs.

DIR/search.json       the request
DIR/candidates.log    Optuna's journal: the values of each candidate, and how much better they were
DIR/own/seed-0        the run of the experiment's own values with seed 0
DIR/candidate-3/seed-0, candidate-3/seed-0.log    a run and what it printed
"""

import fcntl
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from asyncrl.config.install_hints import install_extra
from asyncrl.deploy.commands.tuning.halving import PairedDifference
from asyncrl.deploy.commands.tuning.search_space import Dimension, Values
from asyncrl.errors import ConfigError
from asyncrl.telemetry.run_directory import replace_text

OWN = 0
"""Number of the candidate with the experiment's own values."""
ROUND = "round"
TRIES = 20
"""Proposals for one candidate, before so few different values are taken to be left that the round goes on without."""


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """A search as requested. seeds: each candidate's runs. steps: of the last rung. keep: one in so many goes on."""

    experiment: str
    search: Sequence[str]
    flags: Sequence[str] = ()
    candidates: int = 9
    keep: int = 3
    rounds: int = 1
    seeds: Sequence[int] = (0, 1)
    steps: int = 0
    metric: str = "reward/mean"
    minimize: bool = False

    @property
    def sign(self) -> int:
        return -1 if self.minimize else 1


def open_request(folder: Path, request: SearchRequest | None) -> SearchRequest:
    """Writes the request of a new search, or reads that of one that goes on. Raises ConfigError for a folder that
    holds something else, and for another request than that of the search in it."""
    path = folder / "search.json"
    if not path.exists():
        if request is None:
            raise ConfigError(f"{folder} holds no search: name an experiment and what to search")
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"--to: {folder} is not empty, and holds no search")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(path, json.dumps(asdict(request), indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"--to: {folder} cannot be used: {error.strerror}; name another folder") from error
        return request
    try:
        kept = SearchRequest(**json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}): begin the search again in another folder") from None
    for name, value in asdict(request).items() if request is not None else ():
        if (
            list(value) != list(getattr(kept, name))
            if isinstance(value, list | tuple)
            else value != getattr(kept, name)
        ):
            raise ConfigError(
                f"--to: {folder} holds a search with {name} = {getattr(kept, name)!r}, not {value!r}; "
                "leave out everything but --to to go on, or name another folder"
            )
    return kept


@contextmanager
def search_lock(folder: Path) -> Iterator[None]:
    """Holds `search.lock`, so that one process works on a search. Raises ConfigError when another one does."""
    with open(folder / "search.lock", "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--to: another process works on the search in {folder}: wait for it, or end it"
            ) from None
        yield


@dataclass(eq=False)
class Study:
    """The candidates of a search, in an optuna.Study that is stored in its directory. is_valid: returns whether the
    config takes these values together; others become no candidates."""

    folder: Path
    space: Sequence[Dimension]
    is_valid: Callable[[Values], bool] = lambda values: True
    _study: Any = field(init=False)

    def __post_init__(self) -> None:
        optuna = _optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        backend = optuna.storages.journal.JournalFileBackend(str(self.folder / "candidates.log"))
        storage = optuna.storages.JournalStorage(backend)
        self._study = optuna.create_study(
            study_name="search", storage=storage, load_if_exists=True, direction="maximize"
        )
        self._study.sampler = optuna.samplers.TPESampler(seed=len(self._study.trials), constant_liar=True)

    def candidates(self, number: int, count: int) -> dict[int, Values]:
        """Returns the values of up to `count` candidates of a round, by their number from 1: those that were proposed
        before, and new ones, which the results of earlier rounds guide. No two have the same values."""
        found = {trial.number + 1: self._values(trial) for trial in self._of_round(number)}
        for _ in range(TRIES * count):
            if len(found) >= count:
                break
            trial = self._study.ask()
            values = {each.key: each.suggest(trial) for each in self.space}
            if values in (self._values(each) for each in self._whole()) or not self.is_valid(values):
                self._study.tell(trial, state=_optuna().trial.TrialState.FAIL)
                continue
            trial.set_user_attr(ROUND, number)
            found[trial.number + 1] = values
        return found

    def tell(self, candidate: int, difference: PairedDifference | None) -> None:
        """Notes by how much a candidate was better than the experiment's own values at the end of its last rung. One
        that failed has none (None), and is tried again when the search goes on."""
        if difference is not None:
            self._study.tell(candidate - 1, difference.mean, skip_if_finished=True)

    def _of_round(self, number: int) -> Iterator[Any]:
        yield from (trial for trial in self._whole() if trial.user_attrs[ROUND] == number)

    def _whole(self) -> Iterator[Any]:
        """Yields trials that became candidates."""
        yield from (trial for trial in self._study.trials if ROUND in trial.user_attrs)

    def _values(self, trial: Any) -> Values:
        return {each.key: each.of(trial.params[each.key]) for each in self.space}


def run_path(folder: Path, candidate: int, seed: int) -> Path:
    name = "own" if candidate == OWN else f"candidate-{candidate}"
    return folder / name / f"seed-{seed}"


def shown_values(values: Mapping[str, Any]) -> str:
    """Returns values as text for a line: `training.learning_rate=0.00031 staleness.limit=2`."""
    return " ".join(f"{key}={shown_value(value)}" for key, value in values.items()) or "own values"


def shown_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _optuna() -> Any:
    try:
        return import_module("optuna")
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise ConfigError(f"Optuna is not installed; run: {install_extra('tune')}") from None
