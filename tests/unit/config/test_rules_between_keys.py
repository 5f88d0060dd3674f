"""Values that are valid one by one and make no sense together."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from tests import golden


def config(**sections: Any) -> Config:
    task = {"prompts": "p.jsonl", **sections.pop("task", {})}
    return Config.model_validate({"model": {"name": "m"}, "task": task, **sections})


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"task": {"samples_per_prompt": 1}}, "no baseline"),
        ({"staleness": {"cut_at": 1}}, "2 to 8"),
        ({"algorithm": {"preset": "remax"}, "reward": {"functions": [{"use": "r.py:best", "group": True}]}}, "py:best"),
        ({"staleness": {"cut_at": 9}}, "2 to 8"),
        ({"generation": {"stored_samples": "s.parquet", "engine": "vllm"}}, ""),
        ({"generation": {"stored_samples": "s.parquet"}, "environment": {"use": "e.py:Game"}}, ""),
        ({"generation": {"stored_samples": "s.parquet"}, "algorithm": {"preset": "remax"}}, ""),
        ({"algorithm": {"weight_cap": 2.0}}, ""),
        ({"algorithm": {"weight_cap": 0.5, "old_logprobs": "recomputed"}}, "corrects nothing"),
        ({"task": {"samples_per_prompt": 1}, "algorithm": {"dynamic_sampling": True}}, "always equal"),
        ({"algorithm": {"correction": "cap"}}, ""),
        ({"algorithm": {"old_logprobs": "recomputed", "weight_cap": None}}, "2"),
        ({"algorithm": {"old_logprobs": "recomputed", "correction": "mask", "weight_floor": None}}, "0.*5"),
        ({"algorithm": {"normalize_std": None}}, ""),
        (
            {"algorithm": {"preset": "m2po", "loss": "clip", "second_moment": None}},
            'preset = "m2po".*second_moment = 0',
        ),
        ({"algorithm": {"loss": "m2po", "second_moment": 0.1, "old_logprobs": "recomputed"}}, "write old_logprobs"),
        ({"algorithm": {"preset": "m2po", "rejection": "token_k2", "rejection_high": 1}}, ""),
        (
            {
                "algorithm": {
                    "old_logprobs": "recomputed",
                    "correction": "mask",
                    "rejection": "token_k3",
                    "rejection_high": 0.1,
                }
            },
            'correction = "cap"',
        ),
        ({"algorithm": {"loss": "m2po"}}, 'loss = "m2po".*second_moment = 0'),
        ({"algorithm": {"loss": "sapo"}}, r"gate_temperatures = \[1\.0, 1\.05\]"),
        ({"algorithm": {"rejection": "geometric"}}, '"geometric".*rejection_low = 0'),
        ({"algorithm": {"rejection": "token_k3"}}, "rejection_high = 0.*05; docs/corrections"),
        ({"algorithm": {"rejection": "geometric", "rejection_low": 1.1, "rejection_high": 1.2}}, ""),
        ({"algorithm": {"old_logprobs": "recomputed", "correction": "mask", "weight_floor": 1.5}}, ""),
        ({"algorithm": {"turn_discount": 1.0, "shuffle_advantages": True}}, ""),
        ({"algorithm": {"dual_clip": 1.1}}, r"more than 1 \+ clip_high"),
        ({"algorithm": {"dual_clip": None}}, 'preset = "grpo" is dual_clip = 3, .*: write dual_clip = 1e9'),
        (
            {
                "algorithm": {"preset": "reinforce_plus_plus"},
                "task": {"prompts": "p", "prompts_per_step": 1, "samples_per_prompt": 1},
            },
            "exactly 0",
        ),
        ({"algorithm": {"preset": "gmpo", "kl": 0.1, "kl_in": "reward", "kl_estimator": "k1"}}, ""),
        ({"algorithm": {"preset": "gmpo", "aggregation": "token_mean"}}, ""),
        ({"algorithm": {"preset": "gspo", "aggregation": "token_mean"}}, ""),
        ({"algorithm": {"preset": "gspo", "loss": "clip"}}, "clip_low = 0.*0003"),
        ({"algorithm": {"preset": "dapo", "loss": "gmpo", "aggregation": "sequence_mean_token_mean"}}, ""),
        ({"algorithm": {"preset": "cispo", "loss": "clip", "clip_low": 0.2}}, 'clip_high = 4.*loss = "cispo"'),
        ({"algorithm": {"preset": "ppo", "dynamic_sampling": True}}, ""),
        ({"algorithm": {"preset": "dapo", "advantage": "batch"}}, ""),
        ({"algorithm": {"preset": "grop"}}, "'ppo', 'safe_rlhf', 'grpo'"),
        ({"reward": {"functions": [{"use": "numeric", "weight": 0}]}}, "the weights, 0, sum to 0"),
        (
            {"reward": {"functions": [{"use": "numeric", "weight": 0.3}, {"use": "length", "weight": -0.3}]}},
            "the weights, 0.3 and -0.3, sum to 0",
        ),
        (
            {
                "reward": {
                    "functions": [
                        {"use": f"f.py:{name}", "weight": w} for name, w in (("a", 0.1), ("b", 0.2), ("c", -0.3))
                    ]
                }
            },
            "sum to 0",
        ),
        ({"reward": {"functions": [{"use": "numeric", "weight": -1}]}}, "over 0"),
        ({"reward": {"functions": [{"use": "numeric", "weight": float("nan")}]}}, "finite number"),
        (
            {"algorithm": {"overlong": 0.2}, "reward": {"functions": [{"use": "numeric", "name": "overlong"}]}},
            "'overlong'",
        ),
        ({"algorithm": {"advantage": "gae", "gamma": 1}}, 'advantage = "gae".*gae_lambda = 0'),
        ({"algorithm": {"loss": "gspo"}}, "clip_low = 0.*2"),
        ({"algorithm": {"loss": "cispo", "clip_low": 1.0}}, "clip_high = 0.*2"),
        ({"cost": {"weight": 0.5}}, r'error, cost\.weight, algorithm\.constraint: .*write preset = "safe_rlhf" \['),
        ({"algorithm": {"preset": "ppo", "loss": "gmpo"}}, 'loss = "clip".*"gspo"'),
        ({"algorithm": {"preset": "gmpo", "turn_discount": 1.0}}, "turn_discount"),
        ({"algorithm": {"preset": "ppo", "kl": 0.1, "kl_target": 0.1}}, "kl_target"),
        ({"cost": {"limit": 0.1}}, r'cost\.limit, algorithm\.constraint: .*write preset = "safe_rlhf"'),
        ({"cost_critic": {"device": "cuda"}, "algorithm": {"preset": "ppo"}}, r"cost_critic\.device"),
        ({"algorithm": {"preset": "safe_rlhf"}, "cost": {"limit": 1}}, r"write cost\.functions, cost\.model or both"),
        ({"algorithm": {"preset": "safe_rlhf"}, "cost": {"model": "m"}}, ""),
        (
            {"algorithm": {"preset": "safe_rlhf"}, "cost": {"multiplier": 9, "model": "m", "limit": 1}},
            r"its bound, cost\.multiplier_max = 5; begin lower",
        ),
        ({"reward": {"model": "m", "weight": 0}}, r"reward\.weight: the weights, 0, sum to 0"),
        (
            {"reward": {"functions": ["numeric"], "model": "m", "weight": -1}},
            r"reward\.functions, reward\.weight: the weights, 1 and -1, sum to 0",
        ),
        ({"reward": {"model": "m", "weight": -1}}, r"reward\.weight.*over 0"),
        (
            {"algorithm": {"preset": "safe_rlhf"}, "cost": {"model": "m", "weight": 0, "limit": 1}},
            r"cost\.weight: the weights, 0, sum to 0",
        ),
        (
            {
                "algorithm": {"preset": "safe_rlhf"},
                "cost": {"functions": ["length"], "model": "m", "weight": -1, "limit": 1},
            },
            r"cost\.functions, cost\.weight: the weights, 1 and -1, sum",
        ),
        (
            {"algorithm": {"constraint": "lagrangian"}},
            r"error, algorithm\.constraint, algorithm\.advantage: costs [^;]*write preset = \"safe_rlhf\" \[",
        ),
        ({"algorithm": {"preset": "gspo", "old_logprobs": "engine"}}, 'write correction = "none", or'),
        ({"algorithm": {"preset": "safe_rlhf", "shuffle_advantages": True}, "cost": {"model": "m", "limit": 1}}, ""),
        ({"algorithm": {"pretrain_coefficient": 1}}, r"write task\.pretrain"),
        ({"task": {"pretrain": "p.jsonl"}}, "write pretrain_coefficient, or remove"),
        (
            {
                "algorithm": {"pretrain_coefficient": 1},
                "task": {"pretrain": "p.jsonl", "pretrain_per_step": 2},
                "training": {"updates": 3},
            },
            "3 updates",
        ),
        ({"algorithm": {"kl": 0.1, "kl_estimator": "k1"}}, "k1"),
        ({"algorithm": {"kl": 0.1, "kl_in": "reward"}}, 'write kl_estimator = "k1"'),
        ({"algorithm": {"kl": 0.1, "kl_in": "reward", "kl_estimator": "k3"}}, 'write kl_estimator = "k1"'),
        ({"training": {"updates": 65}}, "64 samples"),
        ({"training": {"warmup_steps": 100, "schedule": "linear"}}, "warm-up"),
        ({"training": {"layout": {"dp": 65}}}, "64 samples.*65 ranks"),
        ({"training": {"layout": {"dp": 2}}, "fleet": {"wire": "inproc"}}, ""),
        ({"training": {"layout": {"dp": 0}}}, "greater than 0"),
        ({"training": {"layout": {"dp": 5, "shard": 13}}}, "64 samples.*65 ranks"),
        ({"training": {"layout": {"tp": 2, "dp": 2, "shard": 2}}}, "dp = 1"),
        ({"training": {"layout": {"tp": 2}}, "model": {"name": "m", "lora": {}}}, ""),
        ({"training": {"layout": {"sp": 2, "shard": 2}}}, "sp = 2.*pp = 1"),
        ({"training": {"layout": {"sp": 2}}, "model": {"name": "m", "lora": {}}}, ""),
        ({"training": {"layout": {"pp": 2, "shard": 2}}}, "pp = 2"),
        ({"training": {"layout": {"pp": 2, "tp": 2, "dp": 2}}}, "write shard = 1, and tp = 1 or dp = 1"),
        ({"training": {"layout": {"pp": 2}, "optimizer": "muon"}}, ""),
        ({"evaluate": {"samples": 4}}, "temperature 0"),
        ({"reward": {"deadline": 900}}, "never reached"),
        ({"algorithm": {"preset": "safe_rlhf"}, "cost": {"model": "m", "limit": 1, "deadline": 900}}, "never reached"),
        ({"reward": {"functions": ["numeric", {"use": "f.py:g", "name": "numeric"}]}}, "'numeric'"),
    ],
)
def test_refused(sections: dict[str, Any], says: str) -> None:
    with golden.raises(ValidationError, match=says):
        config(**sections)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"staleness": {"cut_at": 4, "policy": "drop"}}, "remove it"),
        (
            {"algorithm": {"advantage": "leave_one_out", "normalize_std": True}},
            'nothing reads it with advantage = "leave_one_out": remove it',
        ),
        (
            {"algorithm": {"old_logprobs": "recomputed", "clip_high": 0.28}},
            "bounds nothing: write training.updates = 2 or more",
        ),
        (
            {"algorithm": {"old_logprobs": "recomputed", "dual_clip": 4}},
            "bounds nothing: write training.updates = 2 or more",
        ),
        ({"algorithm": {"second_moment": 0.1}}, 'nothing reads it with loss = "clip": remove it'),
        ({"algorithm": {"gate_temperatures": (1, 1)}}, 'nothing reads it with loss = "clip": remove it'),
        ({"algorithm": {"preset": "gspo", "dual_clip": 3}}, 'nothing reads it with loss = "gspo": remove it'),
        ({"algorithm": {"divisor": 3}}, "nothing reads it with aggregation"),
        ({"algorithm": {"kl_target": 0.1}}, "nothing reads it with kl = 0.0"),
        ({"algorithm": {"weight_floor": 0.1}}, "nothing reads it with correction"),
        (
            {"algorithm": {"preset": "ppo", "advantage": "group_mean"}},
            'preset = "ppo" brings gamma = 1.0, which nothing',
        ),
        (
            {"algorithm": {"preset": "dr_grpo", "aggregation": "token_mean", "divisor": 9}},
            "nothing reads it .*: remove it",
        ),
        (
            {"critic": {"model": "m"}, "algorithm": {"preset": "rloo"}},
            'has no critic; remove it, or write preset = "ppo"',
        ),
        ({"algorithm": {"gamma": 0.9}}, 'nothing reads it with advantage = "group_mean": remove it'),
        ({"algorithm": {"correction_level": "sequence"}}, 'nothing reads it with correction = "none": remove it'),
        (
            {"model": {"name": "m", "float32_head": True}},
            "computed in float32 already: remove float32_head",
        ),
        ({"reward": {"functions": ["numeric"], "weight": 0}}, "nothing reads it without a model: remove it"),
        ({"critic": {"learning_rate": 1e-4}}, 'has no critic; remove it, or write preset = "ppo"'),
        (
            {"algorithm": {"preset": "sapo", "clip_high": 0.3}},
            r'algorithm\.clip_high, algorithm\.loss: nothing reads it with loss = "sapo" and no KL in the loss: remove',
        ),
        (
            {"algorithm": {"preset": "m2po", "clip_low": 0.3}},
            r'algorithm\.clip_low, .*: nothing reads it with loss = "m2po"',
        ),
        (
            {"algorithm": {"preset": "sapo", "clip_high": 0.3, "kl": 0.1, "kl_in": "reward", "kl_estimator": "k1"}},
            "no KL in the loss",
        ),
        ({"mismatch": {"warn_kl": 1, "stop_kl": 0.5}}, "write a smaller warn_kl"),
        ({"mismatch": {"warn_ess": 0.1, "stop_ess": 0.5}}, "write a larger warn_ess"),
        ({"algorithm": {"rejection": "token_k2", "rejection_high": 0.1, "rejection_low": 0.1}}, "nothing reads it"),
        (
            {"algorithm": {"preset": "m2po", "loss": "clip", "clip_low": 0.1, "clip_high": 0.1}},
            'preset = "m2po" brings second_moment = 0.04',
        ),
    ],
)
def test_what_nothing_reads_is_a_warning(sections: dict[str, Any], says: str) -> None:
    assert re.search(says, "\n".join(map(str, config(**sections).warnings)))


@pytest.mark.parametrize(
    "sections",
    [
        {"fleet": {"call_deadline": 2}, "generation": {"deadline": 2}, "reward": {"deadline": 2}},
        {"staleness": {"cut_at": 8}},
        {"staleness": {"cut_at": 2}},
        {"staleness": {"cut_at": "never", "policy": "drop"}},
        {"algorithm": {"weight_cap": 1.0, "old_logprobs": "recomputed"}},
        {"task": {"samples_per_prompt": 1}, "algorithm": {"advantage": "batch"}},
        {"algorithm": {"old_logprobs": "recomputed", "correction": "mask", "weight_floor": 0}},
        {"algorithm": {"old_logprobs": "recomputed", "clip_high": 0.28}, "training": {"updates": 2}},
        {"algorithm": {"advantage": "group_mean", "normalize_std": False}},
        {"algorithm": {"old_logprobs": "recomputed", "loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}},
        {"algorithm": {"old_logprobs": "recomputed", "loss": "sapo", "gate_temperatures": (1, 1.05)}},
        {"algorithm": {"old_logprobs": "recomputed", "correction": "none"}},
        {"algorithm": {"old_logprobs": "recomputed", "rejection": "token_k2", "rejection_high": 0.1}},
        {"algorithm": {"rejection": "geometric", "rejection_low": 0.9, "rejection_high": 1.1}},
        {"algorithm": {"preset": "gspo", "kl": 0.1, "kl_in": "reward", "kl_estimator": "k1"}},
        {"algorithm": {"dual_clip": 4}},
        {"algorithm": {"dual_clip": 1e9}},
        {"algorithm": {"clip_high": 3.0}},
        {"algorithm": {"loss": "gmpo", "clip_low": 0.2, "clip_high": 0.2}},
        {"algorithm": {"preset": "gspo", "loss": "clip", "clip_low": 0.2, "clip_high": 0.2}},
        {"algorithm": {"preset": "dapo", "loss": "sapo", "gate_temperatures": (1, 1)}},
        {"algorithm": {"advantage": "group_batch", "dynamic_sampling": True}},
        {"reward": {"functions": [{"use": "numeric", "weight": 2}, {"use": "length", "weight": -1}]}},
        {"reward": {"functions": [{"use": "numeric"}, {"use": "length", "weight": 0}]}},
        {"task": {"samples_per_prompt": 1}, "algorithm": {"preset": "ppo"}},
        {"task": {"samples_per_prompt": 1}, "algorithm": {"preset": "remax", "dynamic_sampling": True}},
        {
            "algorithm": {
                "preset": "ppo",
                "loss": "gspo",
                "aggregation": "sequence_mean_token_mean",
                "clip_low": 3e-4,
                "clip_high": 4e-4,
                "kl": 0.1,
            }
        },
        {"algorithm": {"preset": "ppo", "kl": 0.1, "kl_in": "loss", "kl_estimator": "k2", "kl_target": 0.1}},
        {"algorithm": {"preset": "dr_grpo", "divisor": 100}},
        {"algorithm": {"kl": 0.1, "kl_target": 0.01}},
        {"algorithm": {"preset": "sapo", "clip_high": 0.3, "kl": 0.1}},
        {"reward": {"functions": ["numeric"], "model": "m", "weight": 0}},
        {
            "algorithm": {"preset": "safe_rlhf"},
            "cost": {"functions": [{"use": "length", "weight": -1}], "model": "m", "weight": -1, "limit": 1},
        },
        {"reward": {"functions": ["numeric"], "model": "m", "weight": -0.5}},
        {"algorithm": {"kl": 0.1, "kl_estimator": "k1", "kl_in": "reward"}},
        {"algorithm": {"kl": 0.0, "kl_estimator": "k1"}},
        {"algorithm": {"kl": 0.0, "kl_in": "reward"}},
        {"training": {"updates": 64}},
        {"training": {"layout": {"dp": 64}}},
        {"training": {"layout": {}}, "fleet": {"wire": "inproc"}},
        {"evaluate": {"samples": 4, "temperature": 0.7}},
        {"reward": {"functions": ["numeric", {"use": "numeric", "name": "strict"}]}},
    ],
)
def test_allowed(sections: dict[str, Any]) -> None:
    assert config(**sections).warnings == []


def test_all_contradictions_are_reported_together() -> None:
    with pytest.raises(ValidationError, match=r"(?s)twice.*temperature 0"):
        config(algorithm={"weight_cap": 2}, evaluate={"samples": 4})


def test_a_text_is_short_for_a_reward_function() -> None:
    assert config(reward={"functions": ["numeric"]}).reward.functions[0].use == "numeric"


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_no_deadline_is_endless(value: float) -> None:
    with pytest.raises(ValidationError):
        config(fleet={"call_deadline": value})


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("a.b", "mine.toml:3", "is wrong"), "mine.toml:3: a.b: is wrong"),
        (Problem("a.b", "--a.b", "is wrong"), "--a.b: is wrong"),
        (Problem("a.b", "", "is wrong", ("c.d",)), "a.b, c.d: is wrong"),
        (Problem("a.b", "c.d (mine.toml:3)", "is wrong", ("c.d",)), "c.d (mine.toml:3), a.b: is wrong"),
        (Problem("a.b", "a.b (--a.b), c.d (--c.d)", "is wrong", ("c.d",)), "a.b (--a.b), c.d (--c.d): is wrong"),
        (Problem("", "", "is wrong"), "is wrong"),
    ],
)
def test_a_problem_names_each_key_once(problem: Problem, text: str) -> None:
    assert str(problem) == text


def test_a_large_limit_names_adaptive_admission_unless_it_was_chosen() -> None:
    def noted(**staleness: Any) -> str:
        return "\n".join(map(str, config(staleness=staleness).warnings))

    golden.says(noted(limit=8), "8 versions", '"adaptive"')
    for chosen in ({"limit": 2}, {"limit": 8, "admission": "adaptive"}, {"limit": 8, "admission": "full"}):
        assert "versions old" not in noted(**chosen)
