"""What a user does with a model: build, fit, evaluate, recommend and so on."""
