"""Draft heads: modules, their attention, the draft vocabulary, config and weights on disk.

Legend for this room: N packed tokens, C counted rows, H hidden size, F feature width (k captured
layers of H each), V target vocabulary, D draft vocabulary, hd head dimension. hs[k] is the target's
residual stream entering layer k. Row t of a head reads (feature having read x[t], embedding of
x[t+1]) and predicts x[t+2].
"""
