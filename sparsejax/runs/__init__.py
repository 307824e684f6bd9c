"""Runs: a model with its optimizer, its vocabulary and its history, in a folder."""
