"""Observations of several messages are cut at one size for all of them."""

from asyncrl.environments.transcript import CUT_OFF, cut_messages


def test_messages_share_the_bytes_of_an_observation() -> None:
    first, second, third = ({"role": "user", "content": letter * 100} for letter in "abc")
    assert cut_messages([first, second], 200) == [first, second]
    assert cut_messages([first, second, third], 150) == [first, {**second, "content": "b" * 50 + CUT_OFF.format(150)}]


def test_empty_messages_are_bounded_too() -> None:
    empty = {"role": "user", "content": ""}
    assert cut_messages([empty] * 1000, 130) == [empty, empty, empty, {**empty, "content": CUT_OFF.format(130)}]
