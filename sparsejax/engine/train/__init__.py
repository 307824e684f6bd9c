"""Training: dispatches of steps, data on the devices, checkpoints, memory estimates."""
