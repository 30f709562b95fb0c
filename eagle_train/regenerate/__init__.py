"""Answers by the target itself, in place of those that the conversations came with.

A head learns to predict the target, so the text it is trained on is best the target's own. Prompts are
answered in process (`local.py` over the batched decoding of `decode.py`) or by a server (`server.py`);
either way each answer is kept as soon as it is there (`work.py`), and the file is put together last.
"""
