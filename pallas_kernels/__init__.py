"""GPU programs in Pallas: arrays in, arrays out, usable without sparsejax.

In these files a *kernel* is a weight matrix, as in Flax. Only the name of this folder and
`plgpu.kernel`, which launches a GPU program, use the word for a GPU program. Where the
text is about a grid, a *program* is one instance of the grid, as in Pallas.
"""
