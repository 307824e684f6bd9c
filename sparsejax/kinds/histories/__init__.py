"""Histories: events of users in order, and models that predict the next item."""
