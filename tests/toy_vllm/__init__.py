"""The parts of the fake vLLM: a toy model, and the shapes in which vLLM 0.32 speaks."""
