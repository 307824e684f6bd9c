"""Pallas kernels of sparsejax: arrays in, arrays out, usable without sparsejax."""
