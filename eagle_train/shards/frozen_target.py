"""The parts of the target that a head needs, kept in two small files so that training never loads it.

Legend of this room: R rows (documents), L tokens of one row, N tokens of all rows of a shard laid end
to end, M label positions, H hidden size, V target vocabulary. Time is part of a tensor's shape:
``aux[t]`` and ``last[t]`` have read token t; ``label_*[m]`` belongs to the position whose next token is
supervised, so for an answer span [s..e] the positions s-1..e-1, in order, span after span.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from eagle_train.errors import UserError
from eagle_train.io.tensors import load_tensors, save_tensors
from eagle_train.io.text import read_json, write_json
from eagle_train.shards.files import refuse_other_file
from eagle_train.shards.schema import mend

TENSORS = "target.safetensors"
RECORD = "target.json"
FORMAT_VERSION = 1
_FIELDS: dict[str, tuple[type, ...]] = {
    "tied": (bool,),
    "logit_scale": (float, int),
    "softcap": (float, int, type(None)),
    "target": (dict,),
    "config": (dict,),
    "generation": (dict,),
}
_WORDS: dict[type, str] = {bool: "true or false", float: "a number", dict: "an object"}


@dataclass(frozen=True)
class FrozenTarget:
    """The target's embedding and its whole output map: final state after the norm -> logits.

    ``logits = cap(logit_scale * (lm_head @ hidden + bias))`` with ``cap(z) = softcap * tanh(z / softcap)``
    where the target caps its logits (Gemma 2), else the identity.
    """

    embedding: Tensor  # (V, H) raw rows, without the scaling some targets apply after the look-up
    lm_head: Tensor  # (V, H); the same storage as `embedding` when the target ties them
    bias: Tensor | None = None  # (V,)
    logit_scale: float = 1.0
    softcap: float | None = None
    config: dict[str, Any] = field(default_factory=dict)  # the target's text config
    target: dict[str, Any] = field(default_factory=dict)  # id, revision, dtype, fingerprints
    generation: dict[str, Any] = field(default_factory=dict)  # its own processors of logits; mostly empty

    @property
    def tied(self) -> bool:
        """True when embedding and lm_head are one tensor."""
        return self.embedding.data_ptr() == self.lm_head.data_ptr()

    @property
    def vocab_size(self) -> int:
        """V, the number of rows of the output map."""
        return self.lm_head.shape[0]

    @property
    def hidden_size(self) -> int:
        """H, the width of the state that the output map reads."""
        return self.lm_head.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.lm_head.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that logits are computed in."""
        return self.lm_head.dtype

    def embed(self, ids: Tensor) -> Tensor:
        """Return the raw embedding rows of `ids` (int64 [...]): [..., H]."""
        return functional.embedding(ids, self.embedding)  # (...) -> (..., H)

    def logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the target's logits [..., V] of final states [..., H], or [..., len(rows)] of some rows.

        `hidden` is cast to the lm_head's dtype; cast the logits to float32 before any softmax.
        For the same `rows` again and again, call ``restrict(rows)`` once instead: it copies them once.
        """
        if rows is not None:
            return self.restrict(rows).logits(hidden)
        logits = functional.linear(hidden.to(self.lm_head.dtype), self.lm_head, self.bias)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def restrict(self, rows: Tensor) -> FrozenTarget:
        """Return a target whose output map holds only the vocabulary `rows` (int64), in that order."""
        rows = rows.to(self.lm_head.device)
        bias = None if self.bias is None else self.bias[rows]
        return replace(self, lm_head=self.lm_head[rows], bias=bias)

    def to(self, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> FrozenTarget:
        """Return a copy on another device or in another dtype; tied tensors stay tied."""
        embedding = self.embedding.to(device=device, dtype=dtype)
        lm_head = embedding if self.tied else self.lm_head.to(device=device, dtype=dtype)
        bias = None if self.bias is None else self.bias.to(device=device, dtype=dtype)
        return replace(self, embedding=embedding, lm_head=lm_head, bias=bias)

    def save(self, folder: str | Path) -> None:
        """Write ``target.safetensors`` and then ``target.json`` into `folder`."""
        tensors = {"embedding": self.embedding}
        if not self.tied:
            tensors["lm_head"] = self.lm_head
        if self.bias is not None:
            tensors["bias"] = self.bias
        save_tensors(Path(folder) / TENSORS, tensors)
        record = {
            "format_version": FORMAT_VERSION,
            "tied": self.tied,
            "logit_scale": self.logit_scale,
            "softcap": self.softcap,
            "target": self.target,
            "config": self.config,
            **({"generation": self.generation} if self.generation else {}),
        }
        write_json(Path(folder) / RECORD, record)

    @classmethod
    def load(cls, folder: str | Path) -> FrozenTarget:
        """Read what `save` wrote; raise UserError naming the file that is missing or damaged."""
        folder = Path(folder)
        record = read_json(folder / RECORD, mend(folder))
        if record.get("format_version") != FORMAT_VERSION:
            raise UserError(
                f"{folder / RECORD}: format version {record.get('format_version')}, wanted {FORMAT_VERSION}; "
                "it was written by another version of eagle"
            )
        record.setdefault("generation", {})
        for name, kinds in _FIELDS.items():
            if name not in record or not isinstance(record[name], kinds):
                raise UserError(
                    f"{folder / RECORD}: {name}: got {record.get(name, 'nothing')!r}, wanted "
                    f"{_WORDS[kinds[0]]}; {mend(folder)}"
                )
        tensors = _tensors(folder)
        wanted = {"embedding"} if record["tied"] else {"embedding", "lm_head"}
        if absent := sorted(wanted - set(tensors)):
            raise UserError(f"{folder / TENSORS}: lacks {', '.join(absent)}; {mend(folder)}")
        return cls(
            embedding=tensors["embedding"],
            lm_head=tensors["embedding"] if record["tied"] else tensors["lm_head"],
            bias=tensors.get("bias"),
            logit_scale=float(record["logit_scale"]),
            softcap=record["softcap"],
            config=record["config"],
            target=record["target"],
            generation=record["generation"],
        )


def _tensors(folder: Path) -> dict[str, Tensor]:
    try:
        return load_tensors(folder / TENSORS)[0]
    except UserError as error:
        raise UserError(f"{error}; {mend(folder)}") from error


def target_bytes(folder: Path) -> int:
    """Return the size of the target's embedding and lm_head in a shard directory, 0 where not yet there."""
    file = folder / TENSORS
    return file.stat().st_size if file.is_file() else 0


def load_frozen(folder: Path, fingerprint: str | None, checksum: str | None) -> FrozenTarget:
    """Load the frozen target of `folder`, whose features come from weights of this `fingerprint`.

    `checksum` is the SHA-256 of its tensors' file, None where it is not known. Raises UserError when the
    files are missing, damaged or of other weights.
    """
    refuse_other_file(folder, TENSORS, checksum, mend(folder))
    frozen = FrozenTarget.load(folder)
    if frozen.target.get("fingerprint") != fingerprint:
        raise UserError(
            f"{folder / RECORD}: of target weights {frozen.target.get('fingerprint')}, the "
            f"features are of {fingerprint}; {mend(folder)}"
        )
    return frozen
