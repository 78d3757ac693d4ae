"""What `python -m experiments.gpu_check` runs on a machine with a GPU, stage by stage."""
