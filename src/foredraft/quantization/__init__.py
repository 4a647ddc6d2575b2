"""Weights in fewer bits: the MXFP4 format, and its checkpoints."""
