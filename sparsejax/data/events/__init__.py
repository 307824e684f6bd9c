"""Reads sources of events, of all formats, as checked blocks of events."""
