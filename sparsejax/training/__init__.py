"""From data to a trained model: `fit`, its dispatches, checkpoints and the plan.

Above prediction, below the command line.
"""
