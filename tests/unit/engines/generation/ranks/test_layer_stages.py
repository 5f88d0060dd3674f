"""Which layers each stage of a replica samples with."""

import pytest

from asyncrl.engines.models.model_shape import layers_of_stage
from asyncrl.protocols.distribute_collect import even_parts


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_stage_samples_with_the_layers_of_consecutive_stages_that_train(stages: int) -> None:
    """Six layers train as 2, 2, 1 and 1, so that two stages sample with 4 and 2, and not with 3 each."""
    trained = even_parts([1] * 6, 4)
    each = 4 // stages
    for number in range(stages):
        joined = [layer for part in trained[number * each : (number + 1) * each] for layer in part]
        assert list(layers_of_stage(6, 4, stages, number)) == joined
