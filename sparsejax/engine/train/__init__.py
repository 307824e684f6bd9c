"""Training: a job's dispatches, data on the devices, checkpoints, memory."""
