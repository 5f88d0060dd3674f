"""An agent of smolagents, as anybody would write it: it has a tool, and prints whether its result is right."""

import json
import sys

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool  # type: ignore[untyped-decorator]
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: one factor.
        b: the other factor.
    """
    return a * b


row = json.loads(sys.stdin.read())
model = OpenAIModel("policy")
agent = ToolCallingAgent(tools=[multiply], model=model, max_steps=2, verbosity_level=LogLevel.OFF)
if system := row.get("system"):
    agent.prompt_templates["system_prompt"] = system
found = agent.run(row["prompt"])
sys.stdout.write(f"found {found}"[:200] + f"\n{float(str(found) == row['answer'])}\n")
