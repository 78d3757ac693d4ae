"""The stages of `python -m experiments.gpu_check`, which needs a GPU."""
