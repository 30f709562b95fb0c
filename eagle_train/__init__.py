"""Train, score and export EAGLE draft heads for lossless speculative decoding of language models."""
