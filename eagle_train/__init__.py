"""Train, score and export EAGLE draft heads for lossless speculative decoding of language models."""

import logging

# torchao, which transformers imports where it is installed, names each kernel built for another GPU
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
