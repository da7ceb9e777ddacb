"""Loading a base model, with the words that help when it cannot be loaded."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from gateway.store.policy_settings import Lora
from trainer.settings import TrainerSettings


class ModelError(Exception):
    """A base model or an adapter cannot be used; the message says what to do."""


def device_of(settings: TrainerSettings) -> str:
    """`cpu` or `cuda`, as the settings say and the machine allows.

    Raises:
        ModelError: CUDA was asked for and torch finds none.
    """
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise ModelError(
            "STROP_TRAINER_DEVICE is cuda, but torch finds no GPU; "
            "install a build of torch for this GPU, or set it to auto."
        )
    return "cuda" if available and settings.device != "cpu" else "cpu"


def load_base_model(
    name: str, settings: TrainerSettings, place: Callable[[nn.Module, str], None] | None = None
) -> nn.Module:
    """The bare base model on its device, in evaluation mode.

    Args:
        name: a folder, or a name on the model hub.
        settings: `device` and `dtype` are used.
        place: puts it on the device, where it does not fit onto one as a whole.

    Raises:
        ModelError: there is no such model.
    """
    folder = Path(name).expanduser()
    local = folder.exists() or folder.is_absolute() or name.startswith((".", "~"))
    if local and not (folder / "config.json").is_file():
        raise ModelError(
            f"the base model {name} is not a model folder (it has no config.json); set the "
            "policy's base_model to a folder that this machine can read, or to a name on the hub."
        )
    device = device_of(settings)
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    _check_precision(device, dtype, settings)
    disable_progress_bar()
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if settings.quantization == "nf4":
        options.update(quantization_config=_nf4(options["dtype"]), device_map={"": 0})
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder) if local else name, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"the base model {name} cannot be loaded: {reason} Download it to this machine first, "
            "or set the policy's base_model to a folder."
        ) from error
    config = model.config.get_text_config()
    if getattr(config, "attention_dropout", 0):
        # Packing gives the padded results only if nothing is random.
        config.attention_dropout = 0.0
    if settings.quantization != "none":
        # On its device already, and refuses to be moved.
        if place is not None:
            raise ModelError(
                "a quantised base model cannot be sharded; set STROP_TRAINER_QUANTIZATION to none, "
                "or leave the launcher's FSDP options out."
            )
    elif place is not None:
        place(model, device)
    else:
        model = model.to(device)
    return cast(nn.Module, model.eval())


def _check_precision(device: str, dtype: str, settings: TrainerSettings) -> None:
    if device == "cuda":
        return
    if settings.quantization != "none":
        raise ModelError(
            f"STROP_TRAINER_QUANTIZATION is {settings.quantization}, which needs a CUDA GPU, and "
            "training runs on the CPU; set it to none."
        )
    if dtype == "bfloat16":
        raise ModelError(
            "STROP_TRAINER_DTYPE is bfloat16, which needs a CUDA GPU, and training runs on the "
            "CPU; set it to auto."
        )


def _nf4(compute_dtype: torch.dtype) -> Any:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError(
            "STROP_TRAINER_QUANTIZATION is nf4, and bitsandbytes is not installed; "
            "run `pip install bitsandbytes`."
        )
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )


def lora_config(lora: Lora, base_model: str) -> Any:
    """The PEFT configuration of a policy: what vLLM can serve, and no randomness."""
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=sorted(lora.target_modules),
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_model,
    )


def check_targets(model: nn.Module, lora: Lora) -> None:
    """Refuse target modules that the model lacks, or that vLLM cannot serve.

    Raises:
        ModelError: names them, and what the model has instead.
    """
    linear = {
        name.rsplit(".", 1)[-1]
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear)
    } - {"lm_head"}
    missing = sorted(set(lora.target_modules) - linear)
    if missing:
        raise ModelError(
            f"lora.target_modules names {', '.join(missing)}, which the base model lacks or cannot "
            f"have adapted; its linear layers are {', '.join(sorted(linear))}."
        )
