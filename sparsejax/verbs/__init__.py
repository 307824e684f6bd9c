"""The verbs of a user: build, fit, evaluate, recommend and so on."""
