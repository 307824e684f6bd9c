"""Histories: what users did in its order, and models that say what comes next."""
