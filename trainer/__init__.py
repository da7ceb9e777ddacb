"""Everything of strop that needs torch."""

import os

# Read by huggingface_hub when it is imported, so it has to come before every other module here.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
