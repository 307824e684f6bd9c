"""Items, histories and clicks: what makes them differ, see `kind.Kind`."""
