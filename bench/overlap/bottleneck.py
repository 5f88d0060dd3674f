"""Names in one sentence what holds a run up, and the key to change."""

from asyncrl.bench.overlap.accounting import Overlap

NEARLY_ALWAYS = 0.9
"""Share of the time from which a stage counts as never waiting."""
NOTICEABLE = 0.1
"""Share of the time from which a state is worth a change."""

KNOBS = {
    "generation": "more workers (generation.replicas), more samples at a time (generation.slots) or a second device",
    "training": "a device of its own, more ranks (training.layout) or larger micro-batches",
    "reward": "more workers or processes (reward.replicas, reward.workers)",
    "cost": "more workers or processes (cost.replicas, cost.workers)",
    "reference": "more workers (reference.replicas), or algorithm.kl = 0",
    "environment": "more workers or processes (environment.replicas)",
}
"""Keys that shorten each stage."""


def bottleneck(overlap: Overlap) -> str:
    """Returns what holds the run up: a stage that never waits, or else what the stages wait for most."""
    slowest = overlap.slowest
    shares = overlap.shares[overlap.slowest]
    busy = f"{slowest} is busy {shares['busy']:.0%} of the time"
    if shares["busy"] >= NEARLY_ALWAYS:
        return f"{busy} and hardly waits: it is the bottleneck. {_knob(slowest)}"
    state = max(("starved", "blocked", "sync", "overhead"), key=shares.__getitem__)
    if shares[state] < NOTICEABLE:
        return f"{busy}; no single wait takes a tenth of its time. {_knob(slowest)}"
    match state:
        case "blocked":
            return f"{busy} and the staleness gate holds it back for {shares[state]:.0%}: raise staleness.limit"
        case "sync":
            return f"{busy} and exchanges weights or gradients for {shares[state]:.0%}: see weights.transport and codec"
        case "overhead":
            return f"{busy} and the runtime takes {shares[state]:.0%}: larger steps or longer answers make that smaller"
    second = _second(overlap)
    return (
        f"{busy} and waits for input for {shares[state]:.0%}: the stages take turns, as {second} is busy only "
        f"{overlap.stages[second]:.0%}; raise staleness.limit or task.prompts_per_step so that more is on its way"
    )


def _knob(service: str) -> str:
    return f"It gets shorter by {KNOBS.get(service, 'a device of its own')}"


def _second(overlap: Overlap) -> str:
    others = {name: share for name, share in overlap.stages.items() if name != overlap.slowest}
    return max(others, key=others.__getitem__) if others else overlap.slowest
