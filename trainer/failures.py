"""What went wrong with a step, in words that help, and of which kind it is."""

import errno

from trainer.grpo import Stopped
from trainer.learner import NotFinite, TooLong
from trainer.memory import is_out_of_memory

NOT_FINITE = "not_finite"
OUT_OF_MEMORY = "out_of_memory"
DISK_FULL = "disk_full"
STOPPED = "stopped"
TOO_LONG = "too_long"
ERROR = "error"

_DISK_FULL = ("No space left on device", "os error 28", "file write failed", "disk is full")
"""What safetensors, torch and SQLite call it."""


def explain(error: Exception) -> tuple[str, str]:
    """The kind of an error, and a sentence that says what to do."""
    text = sentence(error)
    if isinstance(error, NotFinite):
        return NOT_FINITE, text
    if isinstance(error, Stopped):
        return STOPPED, text
    if isinstance(error, TooLong):
        return TOO_LONG, text
    if is_out_of_memory(error):
        return OUT_OF_MEMORY, (
            "out of memory; set STROP_TRAINER_TOKEN_BUDGET to fewer tokens, "
            f"or training.gradient_checkpointing to true ({text})"
        )
    if _is_disk_full(error):
        return DISK_FULL, (
            "the disk is full; free space on it, or keep fewer versions (the policy's `keep` "
            f"settings). The groups of this step wait, nothing is lost ({text})"
        )
    return ERROR, text


def sentence(error: Exception) -> str:
    """The first line of an error; with its type, unless it is one of ours."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else "no message"
    ours = type(error).__module__.startswith("trainer.")
    return text if ours else f"{type(error).__name__}: {text}"


def _is_disk_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(said in str(error) for said in _DISK_FULL):
            return True
        error = error.__cause__ or error.__context__
    return False
