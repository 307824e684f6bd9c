"""GPU programs in Pallas: arrays in, arrays out, usable without sparsejax.

In these files a *kernel* is a weight matrix, as in Flax; only the name of this folder and
`plgpu.kernel`, which launches a GPU program, have the other meaning. Where a grid is spoken
of, a *program* is one instance of it, as in Pallas.
"""
