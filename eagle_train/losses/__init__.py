"""Losses, and acceptance from teacher-forced predictions: pure functions of sums and counts.

Legend for this room: R rows of all steps together, M label positions, C rows counted at step 0, S steps,
H hidden size, D draft vocabulary (the whole one where it is not reduced). Nothing here divides by a
count: means are taken once, over the whole optimizer step.
"""
