"""TRL's GRPO, imported without vLLM.

Where vLLM is installed too, TRL imports it for a client of its own, which is not used here. That
takes seconds and hundreds of megabytes, and changes settings of torch for the whole process.
"""

from trl import import_utils

import_utils.is_vllm_available = lambda *_, **__: False

from trl import GRPOConfig, GRPOTrainer  # noqa: E402  (after the line above, or it is too late)

__all__ = ["GRPOConfig", "GRPOTrainer"]
