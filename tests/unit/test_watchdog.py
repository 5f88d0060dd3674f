from asyncrl.protocols.messages import Health
from asyncrl.watchdog import Sighting, Waiting, render

BUSY = Health("generation", 0, 0, "generation0.0-0-a", ("generate (group 3) for 130 s",), 2, {"busy": 9.6}, 140.0)
IDLE = Health("training", 0, 0, "training0.0-0-b", (), 0, {"starved": 139.0, "sync": 0.1}, 140.0)


def test_the_dump_names_every_worker_what_it_does_and_who_holds_a_call() -> None:
    text = render(
        [
            Sighting("generation0.0", "generation0.0-0-a", BUSY, 1.0, (Waiting("generate", 130.0),)),
            Sighting("training0.0", "training0.0-0-b", IDLE, 3.0, ()),
            Sighting(
                "reward0.0", "", "reward0.0 does not answer: was killed by SIGKILL", 44.0, (Waiting("score", 9.0),)
            ),
        ],
        120.0,
    )
    assert text.splitlines() == [
        "Nothing has moved for 120 s. What every worker does, and who waits for it:",
        "  generation0.0 (generation0.0-0-a): does generate (group 3) for 130 s; 2 queued; its time so far: busy 10 s",
        "    owes the controller generate since 130 s",
        "  training0.0 (training0.0-0-b): does nothing, it waits for calls; 0 queued; its time so far: starved 139 s",
        "  reward0.0 (no instance): reward0.0 does not answer: was killed by SIGKILL; last heard of 44 s ago",
        "    owes the controller score since 9 s",
        "  Longest outstanding: generate, held by generation0.0 for 130 s.",
    ]


def test_where_nobody_owes_an_answer_the_dump_points_at_the_controller() -> None:
    assert "No call is outstanding" in render([Sighting("training0.0", "b", IDLE, 3.0, ())], 120.0)
