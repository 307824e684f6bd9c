"""The engine that trains and ranks models. It has no code for a single kind of model."""
