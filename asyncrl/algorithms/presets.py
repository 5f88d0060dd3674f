"""What `algorithm.preset` stands for: a page and an estimator of advantages."""

from asyncrl.algorithms import grpo
from asyncrl.config import Config
from asyncrl.controller import Page
from asyncrl.objectives.advantages import Advantages, GroupBaseline, Shuffled

PAGES: dict[str, Page] = {"grpo": grpo.PAGE}


def page_of(config: Config) -> Page:
    """The page of the preset."""
    return PAGES[config.algorithm.preset]


def advantages_of(config: Config) -> Advantages:
    """The estimator of the preset, or the control that must not learn."""
    estimate: Advantages = GroupBaseline(config.algorithm.normalize_std)
    return Shuffled(estimate, config.seed) if config.algorithm.shuffle_advantages else estimate
