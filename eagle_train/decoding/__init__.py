"""Speculative decoding that leaves the target's output unchanged.

Legend: T tokens so far, n nodes of a tree (root included), k rows of one drafting step, H hidden size,
V target vocabulary, D draft vocabulary (D <= V), F width of the features a head reads.

Time: x[t] is the token at position t. Row t of a head reads (the target's feature at t, the embedding of
x[t+1]) and guesses x[t+2]. The root of a tree is the last emitted token, x[b]; it is known but not yet read
by the target. A node at depth d is a guess of x[b+d] and is verified at position b+d.
"""
