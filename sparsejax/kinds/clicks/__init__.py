"""Clicks: examples with a label, and models of how probable it is."""
