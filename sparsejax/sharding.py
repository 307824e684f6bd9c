"""How parameters lie in memory, whatever the mesh."""

ROW_MULTIPLE = 256


def padded_rows(rows: int) -> int:
    """Rows a kernel is allocated with: `rows` rounded up to a multiple of 256.

    The multiple does not depend on the mesh, so that a checkpoint fits any mesh whose
    axis divides it. Rows beyond `rows` stay zero and take part in nothing.
    """
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
