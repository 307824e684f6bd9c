"""The main functions for users, called verbs: build, fit, evaluate, recommend and so on."""
