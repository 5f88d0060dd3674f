"""One entry of `reward.functions`, `cost.functions` or the functions of a held-out set."""

from typing import Any

from pydantic import Field, model_validator

from asyncrl.config.sections.algorithm_config import Section
from asyncrl.config.sections.secret import Options


class RewardFunction(Section):
    """One reward or cost function."""

    use: str
    """Template (`exact_match`, `numeric`, ...), `FILE.py:function` or `module:function`; `trl:` or `verl:` before a
    function adapts theirs."""
    name: str = ""
    """Name of the function in metrics and samples; default: the last part of `use`."""
    weight: float = 1.0
    """Factor of the function's value in the reward."""
    group: bool = False
    """The function takes a group's samples and returns one reward for each."""
    by_token: bool = False
    """The function returns a reward for each sampled token of a sample."""
    options: Options = Field(default={})
    """Keyword arguments of a template."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_short_for_use(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value

    @property
    def term(self) -> str:
        """Returns the name of the function's term in metrics and samples."""
        return self.name or self.use.rpartition(":")[2]
