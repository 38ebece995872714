"""Bytes on the wire: what a model is turned into, and back, checked."""
