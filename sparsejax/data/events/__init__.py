"""From a source of events to checked blocks of them: one room for all that is read."""
