"""Steps of optimizer rules in NumPy."""

import numpy as np


def numpy_step(rule, w, state, g, t, rate):
    """Step `t` of the dense rule with the learning rate `rate`, in float64."""
    decay, s = rule.weight_decay, dict(state)
    match rule.name:
        case "sgd":
            move = g + decay * w
        case "momentum" | "nesterov":
            g = g + decay * w
            s["trace"] = rule.momentum * s["trace"] + g
            nesterov = rule.name == "nesterov"
            move = g + rule.momentum * s["trace"] if nesterov else s["trace"]
        case "adagrad":
            s["sum_of_squares"] = s["sum_of_squares"] + g**2
            move = g / np.sqrt(s["sum_of_squares"] + rule.eps)
        case "rowwise_adagrad":
            mean = np.mean(g**2, axis=1, keepdims=True)
            s["sum_of_squares"] = s["sum_of_squares"] + mean
            move = g / (np.sqrt(s["sum_of_squares"]) + rule.eps)
        case "rmsprop":
            s["nu"] = rule.decay * s["nu"] + (1 - rule.decay) * g**2
            move = g / np.sqrt(s["nu"] + rule.eps)
        case "adadelta":
            s["e_g"] = rule.rho * s["e_g"] + (1 - rule.rho) * g**2
            move = g * np.sqrt((s["e_x"] + rule.eps) / (s["e_g"] + rule.eps))
            s["e_x"] = rule.rho * s["e_x"] + (1 - rule.rho) * move**2
        case "adam" | "adamw" | "lazy_adam":
            s["mu"] = rule.b1 * s["mu"] + (1 - rule.b1) * g
            s["nu"] = rule.b2 * s["nu"] + (1 - rule.b2) * g**2
            mean = s["mu"] / (1 - rule.b1**t)
            move = mean / (np.sqrt(s["nu"] / (1 - rule.b2**t)) + rule.eps) + decay * w
        case "adamax":
            s["mu"] = rule.b1 * s["mu"] + (1 - rule.b1) * g
            s["nu"] = np.maximum(rule.b2 * s["nu"], np.abs(g) + rule.eps)
            move = s["mu"] / (1 - rule.b1**t) / s["nu"]
        case "ftrl":
            n = s["n"] + g**2
            s["z"] = s["z"] + g - (np.sqrt(n) - np.sqrt(s["n"])) / rate * w
            s["n"] = n
            shrunk = np.sign(s["z"]) * np.maximum(np.abs(s["z"]) - rule.l1, 0)
            return -shrunk / ((rule.beta + np.sqrt(n)) / rate + rule.l2), s
        case _:
            raise AssertionError(f"no oracle of {rule.name}")
    return w - rate * move, s
