import random

from asyncrl.environments.adapters.packages import OwnRandomness, after_prompt, package
from asyncrl.environments.loading import EnvironmentSpec, load
from asyncrl.errors import ConfigError
from tests import golden


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    with golden.raises(ConfigError, match=r"no_such_package.*\[environments\]"):
        package("no_such_package.envs")


def test_episodes_do_not_change_the_draws_of_each_other() -> None:
    def draws(randomness: OwnRandomness) -> float:
        with randomness.used():
            return random.random()

    random.seed(5)
    outside = random.getstate()
    alone = OwnRandomness(1)
    expected = [draws(alone), draws(alone)]
    first = OwnRandomness(1)
    second = OwnRandomness(2)
    assert [draws(first), draws(second), draws(first)] == [expected[0], draws(OwnRandomness(2)), expected[1]]
    assert random.getstate() == outside


def test_a_first_observation_stands_behind_the_prompt() -> None:
    assert after_prompt("", "board") == "board"
    assert after_prompt("Play.", "board") == "Play.\nboard"
    system = {"role": "system", "content": "Play."}
    assert after_prompt([system], "board") == [system, {"role": "user", "content": "board"}]


def test_an_environment_of_a_package_takes_its_id_and_options() -> None:
    assert type(load(EnvironmentSpec("gymnasium:module:Game-v0", {"rendered": True}))()).__name__ == "GymnasiumText"
    with golden.raises(ConfigError, match="'renderd'"):
        load(EnvironmentSpec("gymnasium:Game-v0", {"renderd": True}))
