"""Runs programs that nobody has checked, most of all those that a model wrote, in sandboxes of bubblewrap."""

from asyncrl.children.sandbox.pool import SandboxPool as SandboxPool
from asyncrl.children.sandbox.programs import CaseResult as CaseResult
from asyncrl.children.sandbox.programs import Limits as Limits
from asyncrl.children.sandbox.programs import Program as Program
from asyncrl.children.sandbox.programs import SandboxError as SandboxError
from asyncrl.children.sandbox.programs import TestCase as TestCase
