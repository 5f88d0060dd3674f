from asyncrl.fleet.stall_watchdog import UnansweredCall, WorkerStatus, describe
from asyncrl.protocols.messages import Health

BUSY = Health("generation", 0, 0, "generation0.0-0-a", ("generate (group 3) for 130 s",), 2, {"busy": 9.6}, 140.0)
IDLE = Health("training", 0, 0, "training0.0-0-b", (), 0, {"starved": 139.0, "sync": 0.1}, 140.0)
DEAD = "reward0.0 does not answer: was killed by SIGKILL"
SLOW = "critic0.0 did not answer health within 2 s"


def test_the_description_names_every_worker_its_activity_and_its_unanswered_calls() -> None:
    text = describe(
        [
            WorkerStatus(
                "generation0.0", "generation0.0-0-a", BUSY, 0.0, "", 1.0, (UnansweredCall("generate", 130.0),)
            ),
            WorkerStatus("training0.0", "training0.0-0-b", IDLE, 0.0, "", 3.0, ()),
            WorkerStatus("reward0.0", "", None, 0.0, DEAD, 44.0, (UnansweredCall("score", 9.0),)),
            WorkerStatus("critic0.0", "critic0.0-0-c", IDLE, 31.0, SLOW, 31.0, ()),
        ],
        120.0,
    )
    assert text.splitlines() == [
        "Nothing has moved for 120 s. What every worker does, and which calls it has not answered:",
        "  generation0.0 (generation0.0-0-a): runs generate (group 3) for 130 s; 2 queued; its time so far: busy 10 s",
        "    has not answered generate for 130 s",
        "  training0.0 (training0.0-0-b): waits for calls; 0 queued; its time so far: starved 139 s",
        "  reward0.0 (no instance): reward0.0 does not answer: was killed by SIGKILL; its last answer came 44 s ago",
        "    has not answered score for 9 s",
        "  critic0.0 (critic0.0-0-c): critic0.0 did not answer health within 2 s; its last answer came 31 s ago; 31 s "
        "ago it reported: waits for calls; 0 queued; its time so far: starved 139 s",
        "  The call outstanding for longest is generate: generation0.0 has had it for 130 s.",
    ]


def test_without_an_outstanding_call_the_description_points_at_the_algorithm() -> None:
    assert "No call is outstanding" in describe([WorkerStatus("training0.0", "b", IDLE, 0.0, "", 3.0, ())], 120.0)
