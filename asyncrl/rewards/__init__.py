"""Rewards: functions of samples, one's own or from templates, run in children that can be killed."""

from asyncrl.rewards.foreign_functions import from_trl, from_verl
from asyncrl.rewards.sample import Sample, Value

__all__ = ["Sample", "Value", "from_trl", "from_verl"]
