"""Rules about several keys: refuse what would train wrongly, or lacks a key, and warn of a value that nothing reads."""

from collections.abc import Callable, Iterator
from math import isclose

from asyncrl.config.experiment import Experiment, RewardConfig
from asyncrl.config.placement import colocation_problems, joining_problems, layout_problems, pool_problems
from asyncrl.config.problems import Problem, wrong
from asyncrl.config.section_rules import (
    acting_problems,
    feedback_problems,
    held_out_problems,
    lockstep_problems,
    model_problems,
    optimizer_problems,
    replay_problems,
    stored_sample_problems,
    telemetry_problems,
    unread_devices,
    weights_problems,
)
from asyncrl.config.sections.algorithm_config import (
    DEFAULT_BOUNDS,
    DUAL_CLIP,
    PRESETS,
    STANDARDIZING,
    WITHOUT_BOUNDS,
    AlgorithmConfig,
    has_dual_clip,
)
from asyncrl.config.toml_writer import value_text
from asyncrl.protocols.staleness import POLICIES

ROW_RATIOS = ("gspo", "gmpo")
"""Losses with one ratio a sequence, the mean over its tokens."""
TRIED_REJECTIONS = {("rejection_low", "geometric"): 0.9, ("rejection_high", "geometric"): 1.11}
TRIED_DIVERGENCE = 0.05
"""Bounds of the rejections in docs/learning.md; those on a divergence are in nats."""


def rule_problems(config: Experiment) -> Iterator[Problem]:
    """Yields every contradiction, every key that a chosen part needs and lacks, and warnings about unread values."""
    a = config.algorithm
    if not config.name or "/" in config.name:
        yield wrong("name", f"it names directories of runs, and {config.name!r} cannot: write a word without slashes")
    yield from (*_group_rules(config), *_weight_rules(a), *_advantage_rules(a), *_cost_rules(config))
    yield from (*_pretraining_rules(config), *_loss_rules(a), *_step_rules(config), *feedback_problems(config))
    for name, section in config.scorers.items():
        yield from (*_scored_weight_rules(config, name, section), *_term_rules(config, name, section))
    yield from (*_deadline_rules(config), *_unread_values(config), *_optional_keys(a), *_removed_parts(a))
    yield from (*_unread_bounds(config), *_inherited_bounds(a), *_unread_sections(config))
    yield from (*_environment_rules(config), *model_problems(config), *optimizer_problems(config))
    yield from (*weights_problems(config), *joining_problems(config), *unread_devices(config))
    yield from (*pool_problems(config), *telemetry_problems(config), *stored_sample_problems(config))
    yield from (*held_out_problems(config), *acting_problems(config), *replay_problems(config))
    yield from (*colocation_problems(config), *lockstep_problems(config))


def _group_rules(config: Experiment) -> Iterator[Problem]:
    members = config.task.samples_per_prompt
    cut_at = config.staleness.cut_at
    a = config.algorithm
    if members == 1 and a.advantage not in ("batch", "gae", "greedy"):
        text = """a group of one has no baseline: every advantage would be 0; write 2 or more, or advantage = "batch",
            "greedy" or "gae" """
        yield wrong("task.samples_per_prompt algorithm.advantage", text)
    if a.shuffle_advantages and a.turn_discount is not None:
        text = "only advantages of whole samples are shuffled, so that the run would learn: remove turn_discount"
        yield wrong("algorithm.shuffle_advantages algorithm.turn_discount", text)
    if members == 1 and a.dynamic_sampling and a.advantage != "greedy":
        text = "the rewards of a group of one are always equal, so every group would be dropped; write 2 or more"
        yield wrong("task.samples_per_prompt algorithm.dynamic_sampling", text)
    if isinstance(cut_at, int) and not 2 <= cut_at <= members:
        text = f'a part of a group of {members} has 2 to {members} members; write one of these or "never"'
        yield wrong("staleness.cut_at task.samples_per_prompt", text)


def _weight_rules(a: AlgorithmConfig) -> Iterator[Problem]:
    """Refuses weights, masks and rejections that count the staleness twice, or leave out fresh tokens."""
    if a.old_logprobs == "engine" and (a.correction != "none" or a.weight_cap is not None):
        is_of_preset = "correction" in PRESETS[a.preset].parts
        advice = 'write correction = "none"' if is_of_preset else "remove correction and weight_cap"
        text = f"""with "engine" the ratio in the loss is current / behaviour already; a weight beside it would count
            the staleness twice: {advice}, or write old_logprobs = "recomputed" """
        yield wrong("algorithm.correction algorithm.weight_cap algorithm.old_logprobs", text)
    if a.loss == "m2po" and a.old_logprobs != "engine":
        text = """m2po bounds the ratio current / behaviour itself; another correction would count the staleness twice:
            write old_logprobs = "engine" """
        yield wrong("algorithm.loss algorithm.old_logprobs", text)
    if a.loss == "m2po" and a.rejection != "none":
        text = "both leave out what is furthest from the sampler, so it would be counted twice: remove the rejection"
        yield wrong("algorithm.loss algorithm.rejection", text)
    rejected = "token" if a.rejection.startswith("token") else "sequence"
    if a.correction == "mask" and a.rejection != "none" and a.correction_level == rejected:
        text = f"""both leave out each {rejected} whose proximal / behaviour is extreme, so it would be counted twice:
            write correction = "cap" or rejection = "none" """
        yield wrong("algorithm.correction algorithm.rejection", text)
    if (a.weight_cap or 1) < 1 and a.correction != "none":
        text = """the weight is 1 for a fresh token, so a cap under 1 scales or leaves out all tokens alike and corrects
            nothing; write 1 or more"""
        yield wrong("algorithm.weight_cap algorithm.correction", text)
    if (a.weight_floor or 0) > 1:
        text = "the weight is 1 for a fresh token, which would be left out; write 1 or less"
        yield wrong("algorithm.weight_floor", text)
    if a.rejection == "geometric" and not (a.rejection_low or 0) < 1 < (a.rejection_high or 2):
        text = "the ratio is 1 for a fresh answer, which would be left out; write one under and one over 1"
        yield wrong("algorithm.rejection_low algorithm.rejection_high", text)


def _advantage_rules(a: AlgorithmConfig) -> Iterator[Problem]:
    if a.dynamic_sampling and a.advantage in ("batch", "gae"):
        text = f"""advantage = "{a.advantage}" compares with more than the group, so equal rewards are a signal too, and
            dropping them would take away what is learnt from groups that are all right or all wrong: remove
            dynamic_sampling"""
        yield wrong("algorithm.dynamic_sampling algorithm.advantage", text)
    if a.advantage == "gae" and a.loss == "gmpo":
        text = """gmpo bounds a row by the sign of its advantage, and a critic gives each token an advantage of its own:
            write loss = "clip" or "gspo" """
        yield wrong("algorithm.loss algorithm.advantage", text)
    if a.turn_discount is not None and a.loss == "gmpo":
        text = """gmpo bounds a row by the sign of its advantage, and turn_discount gives each turn of a row one of its
            own: write loss = "clip" or "gspo", or remove turn_discount"""
        yield wrong("algorithm.loss algorithm.turn_discount", text)
    if a.advantage == "gae" and a.kl_target is not None and a.kl_in == "reward":
        text = """the KL is part of the rewards that policy and critic both learn from, so its coefficient is fixed:
            remove kl_target, or write kl_in = "loss" with kl_estimator = "k2" """
        yield wrong("algorithm.kl_target algorithm.kl_in algorithm.advantage", text)


def _cost_rules(config: Experiment) -> Iterator[Problem]:
    a = config.algorithm
    cost = config.cost
    if a.constraint == "none":
        return
    if a.advantage != "gae":
        text = f"""costs are held under their limit with values of critics, and advantage = "{a.advantage}" has no
            critic: write preset = "safe_rlhf" """
        yield wrong("algorithm.constraint algorithm.advantage", text)
        return
    if not cost.functions and not cost.model:
        text = "there is no cost of an answer: write cost.functions, cost.model or both"
        yield wrong("cost.functions cost.model algorithm.constraint", text)
    if cost.limit is None:
        text = "costs are held under it: write the largest mean cost of an answer"
        yield wrong("cost.limit algorithm.constraint", text)
    if cost.multiplier > cost.multiplier_max:
        text = f"""the multiplier would begin above its bound, cost.multiplier_max = {cost.multiplier_max:g}; begin
            lower, or write a higher bound"""
        yield wrong("cost.multiplier cost.multiplier_max", text)
    if a.shuffle_advantages:
        text = "only rewards are shuffled, and costs would be learnt: remove one"
        yield wrong("algorithm.shuffle_advantages algorithm.constraint", text)


def _pretraining_rules(config: Experiment) -> Iterator[Problem]:
    task = config.task
    updates = config.training.updates
    is_learnt = config.algorithm.pretrain_coefficient > 0
    if is_learnt != bool(task.pretrain):
        without_texts = "there are no texts for it: write task.pretrain, a source of rows with a `text`"
        unread = "these texts would not be learnt: write pretrain_coefficient, or remove task.pretrain"
        yield wrong("algorithm.pretrain_coefficient task.pretrain", without_texts if is_learnt else unread)
    if is_learnt and task.pretrain_per_step < updates:
        text = f"each of {updates} updates takes a share of the texts of a step; write as many or more"
        yield wrong("task.pretrain_per_step training.updates", text)


def _loss_rules(a: AlgorithmConfig) -> Iterator[Problem]:
    if a.loss == "gmpo" and a.kl > 0 and a.kl_in == "reward":
        text = """gmpo bounds a row by the sign of its advantage, and a KL in the reward gives each token an advantage
            of its own: write kl_in = "loss" with kl_estimator = "k2" """
        yield wrong("algorithm.loss algorithm.kl_in", text)
    if a.dual_clip is not None and a.dual_clip <= 1 + a.clip_high:
        text = "the second bound must lie beyond the first one; write more than 1 + clip_high (usually 3)"
        yield wrong("algorithm.dual_clip algorithm.clip_high", text)
    if a.loss in ROW_RATIOS and a.aggregation != "sequence_mean_token_mean":
        text = f"""{a.loss} has one term a sequence, of which every token carries a part; write
            aggregation = "sequence_mean_token_mean" """
        yield wrong("algorithm.loss algorithm.aggregation", text)
    if a.kl > 0 and a.kl_in == "loss" and a.kl_estimator == "k1":
        text = """k1 as a loss has zero expected gradient, and k3 as a loss is a biased approximation; right are k2 in
            the loss and k1 with kl_in = "reward" """
        yield wrong("algorithm.kl_estimator algorithm.kl_in", text)
    if a.kl > 0 and a.kl_in == "reward" and a.kl_estimator != "k1":
        text = f"""in the reward only k1 has the gradient of the KL, {a.kl_estimator} has another one: write
            kl_estimator = "k1", or kl_in = "loss" with k2"""
        yield wrong("algorithm.kl_in algorithm.kl_estimator", text)


def _step_rules(config: Experiment) -> Iterator[Problem]:
    training = config.training
    batch = config.task.prompts_per_step * config.task.samples_per_prompt
    if batch == 1 and config.algorithm.advantage == "batch":
        text = """a step has one sample, whose reward is the mean of its batch, so every advantage would be exactly 0:
            write more prompts or samples a step, or advantage = "greedy" or "gae" """
        yield wrong("task.prompts_per_step task.samples_per_prompt algorithm.advantage", text)
    if training.updates > batch:
        text = f"a step has {batch} samples, which cannot be split over {training.updates} updates"
        yield wrong("training.updates task.prompts_per_step task.samples_per_prompt", text)
    if training.schedule != "constant" and training.warmup_steps >= config.steps:
        text = f"the learning rate falls after the warm-up, which takes all of the {config.steps} steps; write fewer"
        yield wrong("training.warmup_steps steps", text)
    yield from layout_problems(config, batch)


def _scored_weight_rules(config: Experiment, name: str, section: RewardConfig) -> Iterator[Problem]:
    """Checks the weights of a section's functions and model. A cost may have negative weights only."""
    parts = {"functions": section.functions, "weight": section.model}
    keys = " ".join(f"{name}.{part}" for part, given in parts.items() if given)
    weights = [function.weight for function in section.functions] + ([section.weight] if section.model else [])
    weights += [config.feedback.weight] if config.feedback.asks and name == "reward" else []
    if weights and isclose(sum(weights), 0, abs_tol=1e-9):  # rounded
        text = f"""the weights, {" and ".join(f"{weight:g}" for weight in weights)}, sum to 0: what all functions agree
            on is worth nothing; write weights of another sum (a function of weight 0 is only reported)"""
        yield wrong(keys, text)
    elif weights and max(weights) <= 0 and name == "reward":
        text = """no weight is over 0, so the run would train for low values of every function; write a positive weight,
            and let a function that counts what is bad return it with a minus"""
        yield wrong(keys, text)


def _term_rules(config: Experiment, name: str, section: RewardConfig) -> Iterator[Problem]:
    names = [*section.terms, *(["overlong"] if config.algorithm.overlong and name == "reward" else [])]
    for twice in sorted({each for each in names if names.count(each) > 1}):
        text = f"two functions are called {twice!r}; give each its own `name`, because metrics carry it"
        yield wrong(f"{name}.functions", text)
    grouped = [function.name or function.use for function in section.functions if function.group]
    if grouped and name == "reward" and config.algorithm.advantage == "greedy":
        text = f"""{grouped[0]} scores the members of a group together, and a greedy answer is scored alone: write a
            function that takes a single sample, or another advantage"""
        yield wrong(f"{name}.functions algorithm.advantage", text)


def _deadline_rules(config: Experiment) -> Iterator[Problem]:
    limit = config.fleet.call_deadline
    deadlines = {f"{name}.deadline": section.deadline for name, section in config.scorers.items()}
    if config.environment.use:
        deadlines["environment.deadline"] = config.environment.deadline
    for key, seconds in deadlines.items():
        if seconds > limit:
            text = f"a call is given up after {limit:g} s, so {seconds:g} s are never reached; write {limit:g} or less"
            yield wrong(f"{key} fleet.call_deadline", text)


LARGEST_FULL_LIMIT = 2
"""Limit up to which runs lose nothing by samples that are drawn as far ahead as it allows."""


def _environment_rules(config: Experiment) -> Iterator[Problem]:
    section = config.environment
    turn = config.generation.max_new_tokens
    if not section.use:
        if given := _given(config, "environment"):
            text = "nothing reads it without an environment: remove it, or write environment.use"
            yield wrong(f"{given} environment.use", text, is_warning=True)
        if any(function.use == "environment" for function in config.reward.functions):
            text = "the function `environment` sums the rewards of an environment, and there is none: write its name"
            yield wrong("environment.use reward.functions", text)
    elif turn > section.max_tokens:
        text = f"""an episode ends after {section.max_tokens} tokens, and its first answer may have {turn}: write more
            tokens, or a smaller generation.max_new_tokens"""
        yield wrong("environment.max_tokens generation.max_new_tokens", text)


def _unread_values(config: Experiment) -> Iterator[Problem]:
    staleness = config.staleness
    mismatch = config.mismatch
    a = config.algorithm
    if isinstance(staleness.cut_at, int) and not staleness.rule.by_token:
        cutting = " and ".join(f'"{name}"' for name, rule in POLICIES.items() if rule.by_token)
        text = f'nothing reads it with policy = "{staleness.policy}", because only {cutting} cuts groups: remove it'
        yield wrong("staleness.cut_at staleness.policy", text, is_warning=True)
    if staleness.limit > LARGEST_FULL_LIMIT and "admission" not in staleness.model_fields_set:
        text = f"""samples are drawn as far ahead as the limit allows, so that most train some {staleness.limit}
            versions old: write "adaptive", which draws as far as keeps the trainer busy, or "full" if that is wanted"""
        yield wrong("staleness.admission staleness.limit", text, is_warning=True)
    if a.correction == "none" and a.correction_level != "token":
        text = """nothing reads it with correction = "none": remove it, or write correction = "cap" or "mask" and
            old_logprobs = "recomputed" """
        yield wrong("algorithm.correction_level algorithm.correction", text, is_warning=True)
    if "warn_kl" in mismatch.model_fields_set and (mismatch.warn_kl or 0) >= (mismatch.stop_kl or float("inf")):
        text = "the run would end before it warns; write a smaller warn_kl"
        yield wrong("mismatch.warn_kl mismatch.stop_kl", text, is_warning=True)
    if (mismatch.warn_ess or 1) <= (mismatch.stop_ess or 0):
        text = "the run would end before it warns; write a larger warn_ess"
        yield wrong("mismatch.warn_ess mismatch.stop_ess", text, is_warning=True)


OPTIONAL_KEYS: dict[str, tuple[str, Callable[[AlgorithmConfig], bool]]] = {
    "normalize_std": ("advantage", lambda a: a.advantage in STANDARDIZING),
    "second_moment": ("loss", lambda a: a.loss == "m2po"),
    "gate_temperatures": ("loss", lambda a: a.loss == "sapo"),
    "gamma": ("advantage", lambda a: a.advantage == "gae"),
    "gae_lambda": ("advantage", lambda a: a.advantage == "gae"),
    "turn_discount": ("advantage", lambda a: a.advantage in ("group_mean", "leave_one_out")),
    "dual_clip": ("loss", lambda a: a.loss == "clip"),
    "divisor": ("aggregation", lambda a: a.aggregation == "constant"),
    "kl_target": ("kl", lambda a: a.kl > 0),
    "weight_cap": ("correction", lambda a: a.correction != "none"),
    "weight_floor": ("correction", lambda a: a.correction == "mask"),
    "rejection_low": ("rejection", lambda a: a.rejection == "geometric"),
    "rejection_high": ("rejection", lambda a: a.rejection != "none"),
}
"""Keys without a default that one part of an algorithm reads: the key that chooses the part, whether it is chosen."""
NOT_REQUIRED = ("dual_clip", "divisor", "kl_target", "turn_discount")


def _optional_keys(a: AlgorithmConfig) -> Iterator[Problem]:
    for key, (other, used) in OPTIONAL_KEYS.items():
        value = getattr(a, key)
        part = f"{other} = {value_text(getattr(a, other))}"
        if value is not None and not used(a):
            yield _unread(a.preset, key, value, other, part)
        if value is None and used(a) and key not in NOT_REQUIRED:
            yield wrong(f"algorithm.{key} algorithm.{other}", f"{part} needs it: {_example(key, getattr(a, other))}")


def _example(key: str, chosen: str) -> str:
    """Returns what to write for a required key. chosen: the value that needs the key."""
    if key in ("rejection_low", "rejection_high"):
        tried = TRIED_REJECTIONS.get((key, chosen), TRIED_DIVERGENCE)
        return f"write for example {key} = {tried}; docs/corrections.md explains the bounds"
    if key == "normalize_std":
        return "write true or false"
    if key in DEFAULT_BOUNDS.get(chosen, {}):
        off = "; 0 is no floor" if key == "weight_floor" else ""
        return f"remove the line, for {DEFAULT_BOUNDS[chosen][key]:g}, or write a number{off}"
    preset, value = next((name, each.parts[key]) for name, each in PRESETS.items() if key in each.parts)
    return f'write {key} = {value_text(value)}, or preset = "{preset}", which brings it'


def _removed_parts(a: AlgorithmConfig) -> Iterator[Problem]:
    """Finds parts of the preset that are none: a written config leaves them out, and the preset brings them again."""
    for key, value in PRESETS[a.preset].parts.items():
        if getattr(a, key) is None:
            text = f"""preset = "{a.preset}" is {key} = {value_text(value)}, which cannot be taken back: write another
                preset under your values, or remove the line"""
            yield wrong(f"algorithm.{key} algorithm.preset", text)
    if a.dual_clip is None and has_dual_clip(a.preset, a.loss, a.clip_high):
        text = f"""preset = "{a.preset}" is dual_clip = {DUAL_CLIP:g}, which cannot be taken back: write
            dual_clip = 1e9, which bounds nothing"""
        yield wrong("algorithm.dual_clip algorithm.preset", text)


def _unread_bounds(config: Experiment) -> Iterator[Problem]:
    """Finds bounds without a reader, and bounds of a ratio that is always 1."""
    a = config.algorithm
    fields = type(a).model_fields
    parts = PRESETS[a.preset].parts
    keys = ("clip_low", "clip_high", *(("dual_clip",) if a.loss == "clip" else ()))
    default = {"dual_clip": DUAL_CLIP} if has_dual_clip(a.preset, a.loss, a.clip_high) else {}
    changed = [key for key in keys if getattr(a, key) not in (fields[key].default, parts.get(key), default.get(key))]
    if "clip_low" in a.unread_keys:
        for key in changed:
            yield _unread(a.preset, key, getattr(a, key), "loss", f'loss = "{a.loss}" and no KL in the loss')
    # Another loss than the preset's has to have its own bounds.
    elif a.old_logprobs == "recomputed" and config.training.updates == 1 and a.loss == parts["loss"]:
        text = """the ratio to recomputed log-probs is 1 in the first update of a step, and there is no other, so it
            bounds nothing: write training.updates = 2 or more, or old_logprobs = "engine", or remove it"""
        for key in changed:
            yield wrong(f"algorithm.{key} algorithm.old_logprobs training.updates", text, is_warning=True)


def _inherited_bounds(a: AlgorithmConfig) -> Iterator[Problem]:
    """Finds bounds in the unit of the preset's own loss (of tokens, sequences or logarithms) under another loss."""
    parts = PRESETS[a.preset].parts
    if a.loss in (parts["loss"], *WITHOUT_BOUNDS):
        return
    brought = {key: parts.get(key, type(a).model_fields[key].default) for key in ("clip_low", "clip_high")}
    unwritten = [key for key in brought if key in parts or key not in a.model_fields_set]
    if inherited := [key for key in unwritten if getattr(a, key) == brought[key]]:
        values = " and ".join(f"{key} = {brought[key]:g}" for key in inherited)
        text = f"""preset = "{a.preset}" brings {values}, meant for loss = "{parts["loss"]}"; with loss = "{a.loss}"
            write bounds of your own, or a preset of that loss"""
        yield wrong("algorithm.preset algorithm.loss", text)


def _unread_sections(config: Experiment) -> Iterator[Problem]:
    """Finds keys of critics, costs and models that do not exist. Costs are refused: they say what not to learn."""
    a = config.algorithm
    if a.advantage != "gae" and (given := _given(config, "critic")):
        text = f'nothing reads it: advantage = "{a.advantage}" has no critic; remove it, or write preset = "ppo"'
        yield wrong(f"{given} algorithm.advantage", text, is_warning=True)
    if a.constraint == "none" and (given := f"{_given(config, 'cost')} {_given(config, 'cost_critic')}".strip()):
        text = 'nothing reads it with constraint = "none"; remove it, or write preset = "safe_rlhf"'
        yield wrong(f"{given} algorithm.constraint", text)
    for name, section in config.scorers.items():
        if not section.model and section.weight != type(section).model_fields["weight"].default:
            text = "nothing reads it without a model: remove it; a function has a weight of its own"
            yield wrong(f"{name}.weight {name}.model", text, is_warning=True)


def _given(config: Experiment, section: str) -> str:
    """Returns the keys of a section that are not at their defaults, separated by spaces."""
    return " ".join(f"{section}.{key}" for key in sorted(getattr(config, section).model_dump(exclude_defaults=True)))


def _unread(preset: str, key: str, value: object, other: str, part: str) -> Problem:
    """Returns the warning about a value that nothing reads; a value that the preset brings cannot be removed."""
    text = f"nothing reads it with {part}: remove it"
    if PRESETS[preset].parts.get(key) == value:
        text = f"""preset = "{preset}" brings {key} = {value_text(value)}, which nothing reads with {part}: write
            another preset under it, or leave {other} as the preset has it"""
    return wrong(f"algorithm.{key} algorithm.{other}", text, is_warning=True)
