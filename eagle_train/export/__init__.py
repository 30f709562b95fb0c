"""A trained head turned into the directory that a serving engine loads, checked after writing.

Legend of this room: H hidden size, W width of one captured target layer, V target vocabulary, D draft
vocabulary, hd head dimension, n target layers. hs[k] is the target's residual stream entering layer k;
hs[n] is what its final norm reads.
"""
