"""Everything of strop that needs torch."""

import os
import warnings

# Read by huggingface_hub when it is imported, so it has to come before every other module here.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

# TRL's own vLLM client is meant, which is not used here.
warnings.filterwarnings("ignore", message="TRL currently supports vLLM")
