from asyncrl.controller.alarms.poisoned_groups import REPORTED, PoisonedGroups
from asyncrl.controller.observers.events import GroupPoisoned


def test_a_group_is_told_of_once_with_its_prompt_why_and_what_to_do() -> None:
    said: list[str] = []
    poisoned = PoisonedGroups(said.append)
    poisoned.observe(GroupPoisoned(17, "spell " + "x" * 500, "reward0.0[0] did not answer score within 12 s"))
    poisoned.observe(GroupPoisoned(18, "another", "it died"))
    first, second = said
    what, prompt, advice = first.splitlines()
    assert what == (
        "group 17 is given up as poison, its open samples will not train: reward0.0[0] did not answer score within 12 s"
    )
    assert prompt.startswith("  prompt: 'spell xxx")
    assert len(prompt) < 300
    assert "take it out of the task" in advice
    assert "fleet.call_deadline" in advice
    assert second.splitlines() == [
        "group 18 is given up as poison, its open samples will not train: it died",
        "  prompt: 'another'",
    ]


def test_many_groups_do_not_flood_the_screen() -> None:
    said: list[str] = []
    poisoned = PoisonedGroups(said.append)
    for group in range(100):
        poisoned.observe(GroupPoisoned(group, "p", "it died"))
    assert len(said) == REPORTED + 1
    assert "data/dropped/poison in metrics.jsonl" in said[-1]
    assert poisoned.poisoned.total == 100
