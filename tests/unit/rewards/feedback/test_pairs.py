"""Pairs of answers out of the lines of ratings.jsonl."""

from typing import Any

from asyncrl.rewards.feedback.pairs import MOST_ANSWERS, ComparedPrompt, RatableAnswer, compared_prompts, split

SEEN = {"sample": "n", "finish": "stop", "tokens": [1, 2]}


def rating(prompt: str, text: str, value: float, **more: Any) -> dict[str, Any]:
    return {"kind": "rating", "prompt": prompt, "answers": [{**SEEN, "text": text, "value": value, **more}]}


def pick(prompt: str, first: str, second: str, values: tuple[float, float] = (1.0, 0.0)) -> dict[str, Any]:
    answers = [{**SEEN, "text": text, "value": value} for text, value in zip((first, second), values, strict=True)]
    return {"kind": "pick", "prompt": prompt, "answers": answers}


def texts(found: ComparedPrompt) -> list[tuple[str, str, float]]:
    return [(found.answers[pair.first].text, found.answers[pair.second].text, pair.wins) for pair in found.pairs]


def test_picks_and_ratings_of_one_prompt_make_pairs() -> None:
    said = [rating("p", "a", 0.0), rating("p", "b", 1.0), rating("p", "c", 1.0), {"kind": "late", "sample": "x"}]
    (found,) = compared_prompts([*said, pick("p", "d", "a"), pick("p", "b", "c", (0.5, 0.5))])
    assert sorted(texts(found)) == [("b", "a", 1.0), ("b", "c", 0.5), ("c", "a", 1.0), ("d", "a", 1.0)]
    assert found.decided == 3


def test_what_compares_nothing_makes_no_pair() -> None:
    equal = [rating("p", "a", 1.0), rating("p", "b", 1.0), rating("q", "a", 0.0), pick("r", "a", "a")]
    without_tokens = rating("s", "a", 1.0, tokens=[])
    assert compared_prompts([*equal, without_tokens, rating("s", "b", 0.0)]) == []


def test_episodes_that_end_with_the_same_answer_are_two() -> None:
    polite = [{"role": "assistant", "content": "please"}, {"role": "user", "content": "?"}]
    rude = [{"role": "assistant", "content": "now"}, *polite[1:]]
    said = [rating("p", "yes", 1.0, turns=polite, tokens=[5, 6]), rating("p", "yes", 0.0, turns=rude, tokens=[7, 6])]
    (found,) = compared_prompts(said)
    (pair,) = found.pairs
    assert [found.answers[number].tokens for number in (pair.first, pair.second)] == [(5, 6), (7, 6)]


def test_the_answers_of_one_prompt_are_bounded() -> None:
    (found,) = compared_prompts([rating("p", str(number), number / 1000) for number in range(1000)])
    assert len(found.answers) == MOST_ANSWERS
    assert len(found.pairs) == MOST_ANSWERS * (MOST_ANSWERS - 1) / 2


def test_prompts_are_divided_and_held_out_ones_decide_something() -> None:
    said = [pick(f"p{number}", "a", "b") for number in range(10)] + [pick("even", "a", "b", (0.5, 0.5))]
    prompts = compared_prompts(said)
    learnt, held_out = split(prompts, 0.2, 1)
    assert (len(learnt), len(held_out)) == (9, 2)
    assert all(each.decided for each in held_out)
    assert {each.prompt for each in learnt}.isdisjoint(each.prompt for each in held_out)
    assert split(prompts, 0.2, 1) == (learnt, held_out) != split(prompts, 0.2, 2)


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
