"""The `training` table of a policy: fields of TRL's `GRPOConfig`, by their names.

They are checked where they are read, which is also where TRL is not installed: hence this list. The
trainer's tests hold it against TRL's own.
"""

from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

LossType = Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
Reporter = Literal["none", "tensorboard", "wandb", "trackio"]

SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Learning rate schedules that do not have to know when training ends."""

CORRECTION = "vllm_importance_sampling_"
"""What the names of the settings begin with that need `old_policy = "recomputed"`."""

DECIDED: dict[str, str] = {
    "num_generations": "a group is what was logged: see group_size",
    "num_iterations": "one optimiser step is taken on a group: see groups_per_step",
    "gradient_accumulation_steps": "passes are cut by STROP_TRAINER_TOKEN_BUDGET",
    "per_device_train_batch_size": "passes are cut by STROP_TRAINER_TOKEN_BUDGET",
    "temperature": "it is that of each request, as it was logged; see sampling.temperature",
    "top_p": "it is that of each request, as it was logged; see sampling.top_p",
    "reward_weights": "see reward_weights of the policy, by the names of the rewards",
    "use_vllm": "completions come from the log",
    "vllm_importance_sampling_cap": "its name is vllm_importance_sampling_clip_max now",
    "max_steps": "training goes on for as long as there are groups",
    "num_train_epochs": "training goes on for as long as there are groups",
    "save_steps": "every version is saved",
    "output_dir": "see artifacts_dir",
    "use_adaptive_entropy": "set entropy_coef",
    "bf16": "see STROP_TRAINER_DTYPE",
    "fp16": "see STROP_TRAINER_DTYPE",
}
"""Settings of TRL that one might look for here, and where to look instead."""


class TrainingSettingsError(ValueError):
    """A policy's training settings cannot be used; the message says which and why."""


class Training(BaseModel):
    """Fields of `GRPOConfig` that mean something here; None means the default of strop or TRL."""

    model_config = ConfigDict(extra="forbid")

    adam_beta1: float | None = Field(default=None, ge=0, lt=1)
    adam_beta2: float | None = Field(default=None, ge=0, lt=1)
    adam_epsilon: float | None = Field(default=None, gt=0)
    beta: float | None = Field(default=None, ge=0)
    """Weight of the KL term; its reference is the base model, or the policy's `kl_version`."""
    delta: float | None = Field(default=None, gt=0)
    entropy_coef: float | None = None
    epsilon: float | None = Field(default=None, ge=0)
    epsilon_high: float | None = Field(default=None, ge=0)
    gradient_checkpointing: bool | None = None
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    importance_sampling_level: Literal["token", "sequence"] | None = None
    learning_rate: float | None = Field(default=None, ge=0)
    loss_type: LossType | None = None
    lr_scheduler_kwargs: dict[str, Any] | None = None
    lr_scheduler_type: str | None = None
    max_completion_length: int | None = Field(default=None, ge=1)
    """What the loss `dr_grpo` divides by."""
    max_grad_norm: float | None = Field(default=None, ge=0)
    off_policy_mask_threshold: float | None = Field(default=None, ge=0)
    optim: str | None = None
    optim_args: str | None = None
    report_to: Reporter | list[Reporter] | None = None
    """Where the metrics of steps go, besides the database."""
    router_aux_loss_coef: float | None = None
    run_name: str | None = None
    """Of the run that is reported; the policy's name where it is not given."""
    sapo_temperature_neg: float | None = Field(default=None, gt=0)
    sapo_temperature_pos: float | None = Field(default=None, gt=0)
    scale_rewards: Literal["group", "batch", "none"] | bool | None = None
    seed: int | None = None
    top_entropy_quantile: float | None = Field(default=None, gt=0, le=1)
    use_bias_correction_kl: bool | None = None
    vespo_k_neg: float | None = None
    vespo_k_pos: float | None = None
    vespo_lambda_neg: float | None = None
    vespo_lambda_pos: float | None = None
    vllm_importance_sampling_clip_max: float | None = Field(default=None, gt=0)
    vllm_importance_sampling_clip_min: float | None = Field(default=None, ge=0)
    vllm_importance_sampling_mode: Correction | None = None
    """How weights between sampling and training policy are limited; `token_truncate` unless it is
    given."""
    warmup_steps: float | None = Field(default=None, ge=0)
    weight_decay: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _endless(self) -> "Training":
        if self.lr_scheduler_type not in (None, *SCHEDULES):
            raise ValueError(
                f"lr_scheduler_type {self.lr_scheduler_type!r} has to know when training ends, and "
                f"it does not end; use one of {', '.join(SCHEDULES)}"
            )
        if self.warmup_steps is not None and 0 < self.warmup_steps < 1:
            raise ValueError(
                "warmup_steps below 1 means a share of all steps, and there is no end to count "
                "them to; give a number of steps"
            )
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low > high:
            raise ValueError(f"{CORRECTION}clip_min {low:g} is above {CORRECTION}clip_max {high:g}")
        mode = self.vllm_importance_sampling_mode or "token"
        if self.loss_type == "vespo" and mode.startswith("sequence"):
            raise ValueError(
                f"loss_type vespo goes with {CORRECTION}mode token_truncate or token_mask only"
            )
        return self


def check(training: dict[str, Any]) -> None:
    """Refuse settings that nobody knows, that would be ignored, or whose values are wrong.

    Raises:
        TrainingSettingsError: names the first such setting, and the nearest one there is.
    """
    for name in training:
        if name in Training.model_fields:
            continue
        if name in DECIDED:
            raise TrainingSettingsError(
                f"training.{name} is a setting of TRL that strop decides by itself: "
                f"{DECIDED[name]}; remove it."
            )
        near = get_close_matches(name, Training.model_fields, n=1, cutoff=0.0)[0]
        raise TrainingSettingsError(
            f"training.{name} is not a setting of GRPO here; did you mean training.{near}?"
        )
    try:
        Training.model_validate(training)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(["training", *(str(part) for part in first["loc"][:1])])
        message = first["msg"].removeprefix("Value error, ")
        raise TrainingSettingsError(f"{name}: {message}.") from None
