"""Tools: Python functions that the policy calls in its answers, and the environment that runs the calls."""

from asyncrl.environments.tools.call_formats import FORMS as FORMS
from asyncrl.environments.tools.function_tool import Tool as Tool
from asyncrl.environments.tools.parsed_calls import ToolCall as ToolCall
from asyncrl.environments.tools.parsed_calls import ToolCalls as ToolCalls
from asyncrl.environments.tools.tool_environment import ToolEnvironment as ToolEnvironment
