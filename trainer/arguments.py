"""A policy's `training` settings → TRL's `GRPOConfig`."""

from pathlib import Path
from typing import Any

from gateway.store.policy_settings import PolicySettings
from gateway.store.training_settings import TrainingSettingsError, check
from trainer.without_vllm import GRPOConfig

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
    "vllm_importance_sampling_mode": "token_truncate",
}
"""Where strop's defaults are not TRL's: for adapters the learning rate is a hundred times that of
TRL, which is for whole models; importance weights of whole episodes would mask most of them."""


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
    if chosen["loss_type"] == "cispo":
        # TRL's would be `epsilon`, a width; here the largest weight is meant (MiniMax-M1's).
        chosen.setdefault("epsilon_high", 5.0)
    # Reporting is the worker's: TRL's own would take every step for a run.
    for name in ("report_to", "run_name"):
        chosen.pop(name, None)
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
