"""What storing states in fewer bits costs: error of each layer, and acceptance after training from it.

    python scripts/bench_codecs.py SHARDS [--codecs bf16,fp8,int8] [--recipe eagle3-smollm2]
                                   [--set run.steps=300] [--errors-only] [--json]

SHARDS are stored in bf16 or fp32. Their states are rounded to each codec as extraction would have, into a
temporary folder; a head is trained from each with the recipe's own seed, and its acceptance length predicted
on the rows held out, always from the states of SHARDS. Errors are |stored - true| / |true| over all tokens
(Frobenius), and that of the worst token. Give a recipe a budget in steps: minutes differ between runs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_train.evaluation.predict import predict
from eagle_train.io import make_folder, save_tensors
from eagle_train.recipe_files import load_recipe
from eagle_train.shards.codecs import CODECS, check_codec, decode, encode
from eagle_train.shards.files import checksum, open_shard
from eagle_train.shards.manifest import head_of, write_manifest
from eagle_train.shards.reader import open_shards
from eagle_train.shards.schema import HEADER_KEY
from eagle_train.training.held_out import split
from eagle_train.training.loop import train


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


def recode(source: Path, out: Path, codec: str) -> dict[str, dict[str, float]]:
    """Write the shards of `source` in another codec; return the errors by layer."""
    shards = open_shards(source)
    layers = shards.info["layer_ids"]
    errors = Errors([*(f"layer {k}" for k in layers), "last"])
    make_folder(out)
    written = []
    for entry in shards.info["shards"]:
        shard = open_shard(source / entry["file"])
        tensors = dict(shard.map())
        for name, first, groups in (("aux", 0, len(layers)), ("last", len(layers), 1)):
            if name not in tensors:
                continue
            true = tensors[name].float()
            values, scale = encode(CODECS[codec], true, groups)
            errors.add(first, *(x.float().unflatten(1, (groups, -1)) for x in (true, decode(values, scale))))
            tensors[name] = values
            if scale is not None:
                tensors[f"{name}_scale"] = scale
        header = {**shard.header, "codec": codec}
        header["checksums"] = {
            name: checksum(tensor.contiguous()) for name, tensor in sorted(tensors.items())
        }
        save_tensors(out / entry["file"], tensors, {HEADER_KEY: json.dumps(header)})
        written.append(open_shard(out / entry["file"]))
    shards.frozen_target().save(out)
    write_manifest(out, {**head_of(shards.info), "codec": codec}, written)
    return errors.figures()


def compare(source: Path, codecs: list[str], recipe_name: str, settings: list[str], train_too: bool) -> Any:
    """Return, by codec, the errors and (with `train_too`) the acceptance length."""
    recipe = load_recipe(recipe_name, settings)
    shards = open_shards(source)
    held_out = split(shards.conversation_ids, recipe.data.held_out)[1]
    found: dict[str, Any] = {}
    for codec in codecs:
        with tempfile.TemporaryDirectory(prefix="eagle-codecs-") as temporary:
            folder = Path(temporary)
            recoded = folder / "shards"
            found[codec] = {"errors": recode(source, recoded, codec)}
            size = sum(file.stat().st_size for file in recoded.glob("shard-*"))
            found[codec]["bytes_per_token"] = size / int(shards.lengths.sum())
            if train_too:
                train(recoded, recipe, folder / "run")
                figures = predict(
                    folder / "run", source, rows=held_out, gamma=recipe.run.eval_gamma, show=False
                )
                found[codec]["tau"] = figures["tau"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shards", type=Path)
    parser.add_argument("--codecs", default="bf16,fp8,int8")
    parser.add_argument("--recipe", default="eagle3-smollm2")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--errors-only", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    codecs = [check_codec(codec) for codec in given.codecs.split(",")]
    found = compare(given.shards, codecs, given.recipe, given.settings, not given.errors_only)
    if given.json:
        print(json.dumps(found))
        return
    for codec, figures in found.items():
        errors = ", ".join(
            f"{name} {one['error']:.2%} (worst token {one['worst_token']:.1%})"
            for name, one in figures["errors"].items()
        )
        tau = f", tau {figures['tau']:.3f}" if "tau" in figures else ""
        print(f"{codec}: {figures['bytes_per_token']:,.0f} bytes a token{tau}; errors: {errors}")


if __name__ == "__main__":
    main()
