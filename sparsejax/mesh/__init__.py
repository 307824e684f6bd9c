"""Devices and processes: layouts on a mesh, blocks of sparse rows, several processes.

Above `sparse` and `losses`, below everything else. Other wings may import all of it.
"""
