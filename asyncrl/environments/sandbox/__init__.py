"""Runs programs that nobody has checked, most of all those that a model wrote, in sandboxes of bubblewrap."""

from asyncrl.environments.sandbox.pool import SandboxPool as SandboxPool
from asyncrl.environments.sandbox.programs import CaseResult as CaseResult
from asyncrl.environments.sandbox.programs import Limits as Limits
from asyncrl.environments.sandbox.programs import Program as Program
from asyncrl.environments.sandbox.programs import SandboxError as SandboxError
from asyncrl.environments.sandbox.programs import TestCase as TestCase
