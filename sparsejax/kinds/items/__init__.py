"""The kind of item models: rows of bought or seen items, and networks that predict more items."""
