from asyncrl.rewards.here import HerePool
from asyncrl.rewards.sample import Sample


def length(sample: Sample) -> float:
    return 1.0


async def test_functions_of_one_name_have_terms_of_their_own() -> None:
    pool = HerePool([lambda sample: 0.0, length, lambda sample: 1.0, length], 1.0)
    assert [spec.name for spec in pool.specs] == ["lambda", "length", "lambda_2", "length_2"]
