"""Items: rows of what was bought or seen, and networks that say what else would be."""
