"""Environments: the other side of an episode, which answers the policy turn by turn."""

from asyncrl.environments.observation import Observation as Observation
