"""A policy's `training` settings → TRL's `GRPOConfig`."""

import dataclasses
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gateway.store.policy_settings import PolicySettings
from trainer.without_vllm import GRPOConfig


class TrainingSettingsError(ValueError):
    """A policy's training settings cannot be used; the message says which and why."""


DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "beta": 0.0,
    "epsilon": 0.2,
    "seed": 42,
    "router_aux_loss_coef": 0.0,
}
"""Where strop's defaults are not TRL's: for adapters the learning rate is a hundred times that of
TRL, which is for whole models."""

ENDLESS_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Learning rate schedules that do not have to know when training ends."""

TUNABLE = frozenset(
    {
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "beta",
        "delta",
        "entropy_coef",
        "epsilon",
        "epsilon_high",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "importance_sampling_level",
        "learning_rate",
        "loss_type",
        "lr_scheduler_kwargs",
        "lr_scheduler_type",
        "max_completion_length",
        "max_grad_norm",
        "off_policy_mask_threshold",
        "optim",
        "optim_args",
        "router_aux_loss_coef",
        "sapo_temperature_neg",
        "sapo_temperature_pos",
        "scale_rewards",
        "seed",
        "top_entropy_quantile",
        "use_bias_correction_kl",
        "vespo_k_neg",
        "vespo_k_pos",
        "vespo_lambda_neg",
        "vespo_lambda_pos",
        "warmup_steps",
        "weight_decay",
    }
)
"""Fields of `GRPOConfig` that mean something here. The others are about generating, evaluating,
saving and reporting, which are not TRL's part in strop, or about how a step is cut into passes."""


def check(training: dict[str, Any]) -> None:
    """Refuse settings that would be ignored, or that nobody knows.

    Raises:
        TrainingSettingsError: names the first such setting, and the nearest one there is.
    """
    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    for name in training:
        if name in TUNABLE:
            continue
        if name in known:
            raise TrainingSettingsError(
                f"training.{name} is a setting of TRL that strop decides by itself; remove it."
            )
        near = get_close_matches(name, TUNABLE, n=1, cutoff=0.0)[0]
        raise TrainingSettingsError(
            f"training.{name} is not a setting of GRPO; did you mean training.{near}?"
        )
    schedule = training.get("lr_scheduler_type", "constant")
    if schedule not in ENDLESS_SCHEDULES:
        raise TrainingSettingsError(
            f"training.lr_scheduler_type {schedule!r} has to know when training ends, and it does "
            f"not end; use one of {', '.join(ENDLESS_SCHEDULES)}."
        )
    if 0 < training.get("warmup_steps", 0) < 1:
        raise TrainingSettingsError(
            "training.warmup_steps below 1 means a share of all steps, and there is no end to "
            "count them to; give a number of steps."
        )


def scale_rewards(settings: PolicySettings) -> Any:
    """`group`, `batch` or `none`; TRL's older names for two of them, true and false, go too."""
    scale = settings.training.get("scale_rewards", DEFAULTS["scale_rewards"])
    if isinstance(scale, bool):
        return "group" if scale else "none"
    return scale


def grpo_config(settings: PolicySettings, folder: Path, device: str) -> Any:
    """The `GRPOConfig` of a policy.

    Args:
        settings: `training` is laid over `DEFAULTS`.
        folder: where TRL would write; it is told to write nothing.
        device: `cpu` or `cuda`.

    Raises:
        TrainingSettingsError: a setting is unknown, decided by strop, or has a wrong value.
    """
    check(settings.training)
    chosen = {"gradient_checkpointing": device == "cuda", **DEFAULTS, **settings.training}
    chosen["scale_rewards"] = scale_rewards(settings)
    if chosen["scale_rewards"] not in ("group", "batch", "none"):
        raise TrainingSettingsError(
            f"training.scale_rewards {chosen['scale_rewards']!r} is not one of group, batch, none."
        )
    try:
        config = GRPOConfig(
            output_dir=str(folder),
            # One item of the data is one whole step.
            per_device_train_batch_size=2,
            gradient_accumulation_steps=1,
            num_generations=2,
            max_steps=1,
            use_cpu=device == "cpu",
            # The model's own type is used as it is; adapters are float32.
            bf16=False,
            fp16=False,
            use_vllm=False,
            report_to="none",
            push_to_hub=False,
            save_strategy="no",
            eval_strategy="no",
            logging_strategy="steps",
            logging_steps=1,
            # Would hide a loss that is not a number.
            logging_nan_inf_filter=False,
            disable_tqdm=True,
            remove_unused_columns=False,
            **chosen,
        )
    except (TypeError, ValueError) as error:
        raise TrainingSettingsError(f"the policy's training settings are wrong: {error}") from error
    # More GPUs than one would make transformers replicate the model in threads.
    config._n_gpu = min(config.n_gpu, 1)
    return config
