"""What trains and ranks, for all kinds of models. It knows none of them."""
