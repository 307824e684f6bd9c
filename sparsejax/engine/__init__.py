"""The engine that trains and ranks models. It contains nothing specific to one kind of model."""
