"""Each definition gives what a small case gives by hand."""

import math

import pytest

from asyncrl.bench.overlap import definitions


def test_efficiencies_divide_what_explains_a_step_by_the_step() -> None:
    assert definitions.overlap_efficiency([2.0, 4.0, 1.0], 5.0) == 0.8
    assert definitions.bound([2.0, 4.0], 9.0, 2) == 4.0
    assert definitions.bound([2.0, 4.0], 15.0, 2) == 5.0
    assert definitions.bound_efficiency([2.0, 4.0], 9.0, 2, 5.0) == 0.8
    assert definitions.bound_efficiency([2.0, 4.0], 15.1, 2, 5.0) == 1.0


def test_bubbles_are_weighted_by_devices() -> None:
    assert definitions.bubble_ratio(3.0, 4.0) == 0.25
    busy, devices = {"generation": 4.0, "training": 2.0}, {"generation": 3.0, "training": 1.0}
    assert definitions.cluster_bubble(busy, devices, 4.0) == 0.125


def test_the_overlap_fraction_is_the_common_time_over_the_rarer() -> None:
    generation = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]
    assert definitions.overlap_fraction(generation, [(2.5, 5.5)]) == pytest.approx(1.0 / 3.0)
    assert definitions.overlap_fraction(generation, [(0.5, 1.5)]) == 1.0
    assert definitions.overlap_fraction(generation, [(3.0, 5.0)]) == 0.0
    assert definitions.overlap_fraction(generation, []) is None


def test_gains_are_ratios_to_a_named_baseline() -> None:
    assert definitions.speedup(6.0, 4.0) == 1.5
    assert definitions.contention(1.2, 1.0) == 1.2
    assert definitions.overlap_yield(6.0, 4.0, 3.5) == 0.8
    assert math.isnan(definitions.overlap_yield(3.0, 3.0, 3.0)), "one stage alone takes as long as a synchronous step"


def test_rates_count_all_devices() -> None:
    assert definitions.goodput(1000.0, 2.0, 5) == 100.0
    assert definitions.forward_flops(10.0, 3.0) == 60.0
    assert definitions.forward_flops(10.0, 3.0, attention=2.0, context=5.0) == 180.0
    assert definitions.loop_mfu(60.0, 30.0, 2.0, 5, 30.0) == 0.5
