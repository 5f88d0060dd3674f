"""Runs programs that nobody has checked, most of all those that a model wrote, in sandboxes of bubblewrap."""

from asyncrl.children.sandbox.pool import SandboxPool as SandboxPool
from asyncrl.children.sandbox.program_requests import CaseResult as CaseResult
from asyncrl.children.sandbox.program_requests import Limits as Limits
from asyncrl.children.sandbox.program_requests import Program as Program
from asyncrl.children.sandbox.program_requests import SandboxError as SandboxError
from asyncrl.children.sandbox.program_requests import TestCase as TestCase
