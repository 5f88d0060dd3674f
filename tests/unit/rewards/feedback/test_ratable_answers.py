"""What identifies an answer that a person may rate."""

from asyncrl.rewards.feedback.pairs import RatableAnswer


def test_an_answer_is_named_by_all_that_a_person_reads() -> None:
    said = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "and then?"}]
    same = [RatableAnswer(3, 0, "hi", "hello", list(said)) for _ in range(2)]
    others = [
        RatableAnswer(3, 0, "hi", "hello"),
        RatableAnswer(3, 0, "hi", "bye"),
        RatableAnswer(3, 0, "hi!", "hello"),
        RatableAnswer(3, 1, "hi", "hello"),
        RatableAnswer(4, 0, "hi", "hello"),
        RatableAnswer(3, 0, "hi", "hello", said[:1]),
        same[0],
    ]
    assert same[0].id == same[1].id
    assert len({each.id for each in others}) == len(others)
