"""Rewards: functions of samples, one's own or from templates, run in children that can be killed."""

from asyncrl.rewards.sample import Sample, Value
from asyncrl.rewards.trl_verl_adapters import from_trl, from_verl

__all__ = ["Sample", "Value", "from_trl", "from_verl"]
