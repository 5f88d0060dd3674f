"""The folders of the models that score or value samples: reward, cost and the critics.

Each model must read the token ids of the policy, so its tokenizer, head and context length are checked here.
"""

import json
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.engines.models.context_window import refuse_short_context
from asyncrl.engines.models.file_checks import has_tokenizer, head_labels, refuse_damaged
from asyncrl.engines.models.model_folder import existing_folder
from asyncrl.errors import ConfigError


def scoring_model_folders(config: Config, policy: Path) -> dict[str, Path]:
    """Returns the model folder of each service that scores or values samples, by service.

    A critic without a `model` in its section starts from the folder of the policy.

    Raises:
        ConfigError: a folder is missing, holds no model, is damaged, has no tokenizer or another one than the policy, a
            head with more than one output, or a context shorter than the longest row.
    """
    default = {"critic": policy, "cost_critic": policy}
    named = {
        "reward": config.reward.model,
        "cost": config.cost.model,
        "critic": config.critic.model,
        "cost_critic": config.cost_critic.model,
    }
    return default | {
        name: scoring_model_folder(config, given, f"{name}.model", policy) for name, given in named.items() if given
    }


def scoring_model_folder(config: Config, name: str, key: str, policy: Path) -> Path:
    """Returns the folder that `key` names. Raises ConfigError like `scoring_model_folders`."""
    folder = existing_folder(name, key)
    if folder is None:
        raise ConfigError(f"{key}: there is no folder {name}; write one that from_pretrained loads")
    refuse_damaged(folder)
    if not has_tokenizer(folder):
        raise ConfigError(f"{key}: there is no tokenizer in {folder}; save that of model.name beside it")
    own, others = vocabulary(folder), vocabulary(policy)
    if own and others and own != others:
        raise ConfigError(another_tokenizer(key))
    _refuse_other_heads(folder, key)
    refuse_short_context(config, key, folder, policy)
    return folder.absolute()


def _refuse_other_heads(folder: Path, key: str) -> None:
    """Raises ConfigError when the head does not have one output. Only a critic may start without a head."""
    labels = head_labels(folder)
    if "critic" in key:
        if labels is not None and labels > 1 and next(folder.glob("*.safetensors"), None):
            raise ConfigError(
                f"{key}: the head of {folder} has {labels} labels, and a value is one number; take one of 1 label"
            )
    elif labels is not None and labels != 1:
        found = f"the head of {folder} has {labels} labels" if labels else f"{folder} has no head that scores"
        raise ConfigError(
            f"{key}: {found}, and a score is one number; take a folder that AutoModelForSequenceClassification with "
            "num_labels=1 was saved to after training"
        )


def another_tokenizer(key: str) -> str:
    """Returns the error text for a model, named by `key`, whose tokenizer is not that of the policy."""
    return (
        f"{key}: its tokenizer is not that of model.name, and it reads the policy's token ids, so it would score "
        "other texts than were generated; take a model with the same tokenizer, or call yours from a reward function"
    )


def vocabulary(folder: Path) -> dict[int, str]:
    """Returns the tokens by id from tokenizer.json, or nothing where that file does not list them."""
    try:
        described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        known = described["model"]["vocab"]
        by_token = known.items() if isinstance(known, dict) else ((entry[0], i) for i, entry in enumerate(known))
        added = {int(each["id"]): str(each["content"]) for each in described.get("added_tokens") or ()}
        return {int(number): str(token) for token, number in by_token} | added
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}
