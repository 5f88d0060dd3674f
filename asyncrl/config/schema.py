"""The config of an experiment: all its keys, held to the rules between them. Sources: command line > environment >
file > default."""

from pydantic import model_validator

from asyncrl.config.experiment import IN_MEMORY as IN_MEMORY
from asyncrl.config.experiment import MODEL_TERM as MODEL_TERM
from asyncrl.config.experiment import AlgorithmConfig as AlgorithmConfig
from asyncrl.config.experiment import CriticConfig as CriticConfig
from asyncrl.config.experiment import Experiment
from asyncrl.config.experiment import FleetConfig as FleetConfig
from asyncrl.config.experiment import GenerationConfig as GenerationConfig
from asyncrl.config.experiment import GuardsConfig as GuardsConfig
from asyncrl.config.experiment import MismatchConfig as MismatchConfig
from asyncrl.config.experiment import ModelConfig as ModelConfig
from asyncrl.config.experiment import RewardConfig as RewardConfig
from asyncrl.config.experiment import RewardFunction as RewardFunction
from asyncrl.config.experiment import Scorer as Scorer
from asyncrl.config.experiment import StalenessConfig as StalenessConfig
from asyncrl.config.experiment import TaskConfig as TaskConfig
from asyncrl.config.experiment import TrainingConfig as TrainingConfig
from asyncrl.config.placement import place_services
from asyncrl.config.problems import Incoherent, Problem
from asyncrl.config.rules_between_keys import rule_problems


class Config(Experiment):
    """One experiment."""

    @model_validator(mode="after")
    def _values_fit_together(self) -> "Config":
        place_services(self)
        if problems := [problem for problem in rule_problems(self) if not problem.is_warning]:
            raise Incoherent(problems)
        return self

    @property
    def warnings(self) -> list[Problem]:
        """Returns a problem for each value that nothing reads."""
        return [problem for problem in rule_problems(self) if problem.is_warning]
