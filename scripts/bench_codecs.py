"""What storing states in fewer bits costs: error of each layer, and acceptance after training from it.

    python scripts/bench_codecs.py SHARDS [--codecs bf16,fp8,int8,bf16+top8,bf16+top64]
                                   [--recipe eagle3-smollm2] [--steps 300] [--set optim.lr=1e-3]
                                   [--errors-only] [--json]

SHARDS hold eagle3 features in bf16 or fp32. They are rounded to each codec as extraction would have, into a
temporary folder; ``+topK`` puts the K likeliest tokens of each label in place of its state. A head is trained
from each for --steps steps with the recipe's own seed, and its acceptance length predicted on the rows held
out, always from the states of SHARDS. Prints one table. Errors of states are |stored - true| / |true| over
all tokens (Frobenius), and that of the worst token. Errors of labels are total variations from the
distribution that SHARDS give, restricted to the recipe's draft vocabulary: the mean over up to 4,096 labels,
and what the stored mass bounds that mean by.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.evaluation.predict import predict
from eagle_train.heads.draft_vocab import choose_draft_ids, to_draft
from eagle_train.io.paths import make_folder
from eagle_train.io.tensors import save_tensors
from eagle_train.losses.top_labels import TopLabels
from eagle_train.recipe_files import load_recipe
from eagle_train.shards.codecs import CODECS, check_codec, decode, encode
from eagle_train.shards.files import ShardFile, checksum, open_shard
from eagle_train.shards.frozen_target import FrozenTarget
from eagle_train.shards.manifest import head_of, write_manifest
from eagle_train.shards.reader import open_shards
from eagle_train.shards.schema import HEADER_KEY
from eagle_train.targets.labels import likeliest
from eagle_train.training.held_out import split
from eagle_train.training.loop import train

_LABELS = 256  # labels whose logits over the whole vocabulary are held at once
_COMPARED = 4096  # labels whose distributions are compared, evenly spread over the shards


class Errors:
    """Sums of squares for each layer of `aux` and for `last`."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.wrong = torch.zeros(len(names), dtype=torch.float64)
        self.whole = torch.zeros(len(names), dtype=torch.float64)
        self.worst = torch.zeros(len(names), dtype=torch.float64)

    def add(self, first: int, true: Tensor, stored: Tensor) -> None:
        """Add states [n, G, H] of the layers `first` to first + G - 1."""
        where = slice(first, first + true.shape[1])
        wrong, whole = ((x.double().square().sum(-1)) for x in (stored - true, true))  # (n, G)
        self.wrong[where] += wrong.sum(0)
        self.whole[where] += whole.sum(0)
        self.worst[where] = torch.maximum(self.worst[where], (wrong / whole.clamp_min(1e-30)).amax(0))

    def figures(self) -> dict[str, dict[str, float]]:
        """Return ``error`` and ``worst_token`` by layer."""
        ratios = zip(
            self.names, (self.wrong / self.whole).sqrt().tolist(), self.worst.sqrt().tolist(), strict=True
        )
        return {name: {"error": error, "worst_token": worst} for name, error, worst in ratios}


class LabelErrors:
    """Distances of stored labels from the distributions that the true states give, in total variation."""

    def __init__(self, target: FrozenTarget, draft_ids: Tensor | None, num_shards: int) -> None:
        self.target, self.most = target, max(1, _COMPARED // max(1, num_shards))
        self.ids = torch.arange(target.vocab_size) if draft_ids is None else draft_ids
        self.draft_of = to_draft(self.ids, target.vocab_size)
        self.count, self.apart, self.bound = 0, 0.0, 0.0
        self.bounded = False

    def _some(self, count: int) -> tuple[Tensor, ...]:
        """Return pieces of the labels that are compared, of `count`."""
        return torch.arange(0, count, max(1, -(-count // self.most))).split(_LABELS)

    def add_states(self, true: Tensor, stored: Tensor) -> None:
        """Add labels stored as states [m, H]."""
        for piece in self._some(len(true)):
            self._add(true[piece], self.target.logits(stored[piece])[:, self.ids].float())

    def add_top(self, true: Tensor, ids: Tensor, logp: Tensor) -> None:
        """Add labels stored as their likeliest tokens [m, k]."""
        law, self.bounded = TopLabels(ids, logp, self.draft_of, len(self.ids)), True
        for piece in self._some(len(true)):
            self._add(true[piece], law.logits(piece))
            kept = logp[piece].float().exp()
            rest = (1 - kept.sum(-1)).clamp(min=0)
            inside = (kept * (self.draft_of[ids[piece].long()] >= 0)).sum(-1)
            self.bound += float((rest / (rest + inside)).sum())

    def _add(self, true: Tensor, logits: Tensor) -> None:
        p = self.target.logits(true)[:, self.ids].float().softmax(-1)
        self.apart += float((p - logits.softmax(-1)).abs().sum()) / 2
        self.count += len(true)

    def figures(self) -> dict[str, float | None]:
        """Return ``variation`` and, for top labels, the ``bound`` on it."""
        count = max(self.count, 1)
        return {"variation": self.apart / count, "bound": self.bound / count if self.bounded else None}


class Likeliest:
    """What extraction would have kept of a shard's labels, from its states; made once for the largest k."""

    def __init__(self, target: FrozenTarget, most: int) -> None:
        self.target, self.most = target, most
        self._made: dict[str, tuple[Tensor, Tensor]] = {}

    def of(self, shard: ShardFile, k: int) -> tuple[Tensor, Tensor]:
        """Return ids int32 and log-probabilities float32 [m, k]."""
        if shard.path.name not in self._made:
            tensors, found = shard.map(), []
            pairs = zip(tensors["last"].split(_LABELS), tensors["label_argmax"].split(_LABELS), strict=True)
            for states, first in pairs:
                logits = self.target.logits(states)
                ids = likeliest(logits, first.long(), self.most)
                found.append((ids.to(torch.int32), logits.float().log_softmax(-1).gather(-1, ids)))
            self._made[shard.path.name] = torch.cat([a for a, _ in found]), torch.cat([b for _, b in found])
        ids, logp = self._made[shard.path.name]
        return ids[:, :k].contiguous(), logp[:, :k].contiguous()


def split_name(name: str) -> tuple[str, int]:
    """Return the codec and the tokens a label of ``CODEC[+topK]``."""
    codec, plus, top = name.partition("+")
    if plus and not re.fullmatch("top[1-9][0-9]{0,5}", top):
        raise UserError(f"--codecs {name}: wanted a codec, or one with +top8 behind it")
    return check_codec(codec), int(top[3:]) if plus else 0


def recode(
    source: Path, out: Path, name: str, draft_ids: Tensor | None = None, known: Likeliest | None = None
) -> dict[str, Any]:
    """Write the shards of `source` in another codec; return the errors by layer, and those of labels.

    Labels are compared on `draft_ids`, None being the whole vocabulary.
    """
    codec, top = split_name(name)
    shards = open_shards(source)
    layers = shards.info["layer_ids"]
    errors = Errors([*(f"layer {k}" for k in layers), *([] if top else ["last"])])
    known = known or Likeliest(shards.frozen_target(), top)
    labels = LabelErrors(known.target, draft_ids, len(shards.info["shards"]))
    make_folder(out)
    written = []
    described = {"codec": codec, **({"label_top_k": top} if top else {})}
    for entry in shards.info["shards"]:
        shard = open_shard(source / entry["file"])
        tensors = dict(shard.map())
        true_last = tensors["last"]
        if top:
            kind = torch.float32 if codec == "fp32" else torch.float16
            del tensors["last"]
            ids, logp = known.of(shard, top)
            tensors |= {"label_ids": ids, "label_logp": logp.to(kind)}
        for name, first, groups in (("aux", 0, len(layers)), ("last", len(layers), 1)):
            if name not in tensors:
                continue
            true = tensors[name].float()
            values, scale = encode(CODECS[codec], true, groups)
            errors.add(first, *(x.float().unflatten(1, (groups, -1)) for x in (true, decode(values, scale))))
            tensors[name] = values
            if scale is not None:
                tensors[f"{name}_scale"] = scale
        header = {**shard.header, **described}
        if top:
            header["label_mass"] = float(tensors["label_logp"].double().exp().sum())
            labels.add_top(true_last, tensors["label_ids"], tensors["label_logp"])
        else:
            labels.add_states(true_last, decode(tensors["last"], tensors.get("last_scale")))
        header["checksums"] = {
            name: checksum(tensor.contiguous()) for name, tensor in sorted(tensors.items())
        }
        save_tensors(out / entry["file"], tensors, {HEADER_KEY: json.dumps(header)})
        written.append(open_shard(out / entry["file"]))
    shards.frozen_target().save(out)
    write_manifest(out, {**head_of(shards.info), **described}, written)
    return {"layers": errors.figures(), "labels": labels.figures()}


def compare(
    source: Path, codecs: list[str], recipe_name: str, settings: list[str], train_too: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each codec with its errors and (with `train_too`) the acceptance length."""
    recipe = load_recipe(recipe_name, settings)
    shards = open_shards(source)
    held_out = split(shards.conversation_ids, recipe.data.held_out)[1]
    draft_ids = None
    if (size := recipe.head.draft_vocab_size) is not None:
        draft_ids = choose_draft_ids(shards.supervised_frequencies, int(shards.info["vocab_size"]), size)
    known = Likeliest(shards.frozen_target(), max(split_name(codec)[1] for codec in codecs))
    for codec in codecs:
        with tempfile.TemporaryDirectory(prefix="eagle-codecs-") as temporary:
            folder = Path(temporary)
            recoded = folder / "shards"
            found: dict[str, Any] = {"errors": recode(source, recoded, codec, draft_ids, known)}
            size = sum(file.stat().st_size for file in recoded.glob("shard-*"))
            found["bytes_per_token"] = size / int(shards.lengths.sum())
            if train_too:
                train(recoded, recipe, folder / "run")
                figures = predict(
                    folder / "run", source, rows=held_out, gamma=recipe.run.eval_gamma, show=False
                )
                found["tau"] = figures["tau"]
        yield codec, found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shards", type=Path)
    parser.add_argument("--codecs", default="bf16,fp8,int8,bf16+top8,bf16+top64")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--recipe", default="eagle3-smollm2")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--errors-only", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    codecs = given.codecs.split(",")
    for codec in codecs:
        split_name(codec)
    settings = [f"run.steps={given.steps}", "run.minutes=null", *given.settings]
    found = compare(given.shards, codecs, given.recipe, settings, not given.errors_only)
    if given.json:
        print(json.dumps(dict(found)))
    else:
        for line in table(found):
            print(line, flush=True)


def table(found: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown, each as soon as its figures are there."""
    yield "| codec | bytes a token | layers, error (worst token) | labels, total variation (bound) | tau |"
    yield "|---|---|---|---|---|"
    for codec, figures in found:
        layers = "; ".join(
            f"{name} {one['error']:.2%} ({one['worst_token']:.1%})"
            for name, one in figures["errors"]["layers"].items()
        )
        labels = figures["errors"]["labels"]
        bound = "" if labels["bound"] is None else f" ({labels['bound']:.2%})"
        tau = f"{figures['tau']:.3f}" if "tau" in figures else ""
        size = f"{figures['bytes_per_token']:,.0f}"
        yield f"| {codec} | {size} | {layers} | {labels['variation']:.2%}{bound} | {tau} |"


if __name__ == "__main__":
    main()
