"""Stands in for NVIDIA's Apex where it cannot be built: the same modules and calls, computed by torch on any device.

Put the folder above on PYTHONPATH, and Megatron takes it for Apex. Signatures, and the places where state is kept, are
Apex's own (github.com/NVIDIA/apex): `step` is one number of a parameter group, moments are tensors of a parameter.
"""
