"""The engine that trains and ranks all kinds of models. It knows none of them."""
