"""Where conversations come from: files, folders, globs, hub datasets, each with its weight."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle_train import hub
from eagle_train.data.conversations import RECORD_FIELDS
from eagle_train.data.entries import LINE_FORMS, Entry, dataset_entries, json_entries, parquet_entries
from eagle_train.errors import UserError
from eagle_train.io.checksums import sha256_file
from eagle_train.io.paths import os_error
from eagle_train.io.text import read_json

FILE_FORMS = (*LINE_FORMS, ".json", ".json.gz", ".parquet")
_LARGEST_WEIGHT = 100


@dataclass(frozen=True)
class Source:
    """One input. `identity` tells its content: two runs whose identities agree read the same records.
    `name` is the file's name alone, so that moving a file changes nothing that is made of it. `weight` is
    how often a record is taken: 0.5 every second one, 2 each twice."""

    name: str
    size: int
    identity: dict[str, Any]
    _path: Path | None = None
    _dataset: Any = field(default=None, repr=False)
    tokenizer_fingerprint: str | None = None  # of rows that came with their tokens, where it is known
    weight: float = 1.0

    def entries(self) -> Iterator[Entry]:
        """Yield every record in order. Raises UserError when the source cannot be opened."""
        if self._dataset is not None:
            yield from dataset_entries(self._dataset)
        elif self.name.lower().endswith(".parquet"):
            yield from parquet_entries(self.path, self.size)
        else:
            yield from json_entries(self.path)

    @property
    def path(self) -> Path:
        """The file; only file sources have one."""
        assert self._path is not None
        return self._path

    def place(self, entry: Entry) -> str:
        """Return where `entry` stands, for a message: file, line and record."""
        return f"{self._path or self.name}:{entry.line} (record {entry.number})"


def find_sources(data: list[str]) -> list[Source]:
    """Return the inputs named by `data`, in order: files, folders and globs sorted by name.

    A name that is neither is taken as a hub dataset ``owner/name[:split]``. Behind any of them ``=0.5``
    gives its weight in a mixture. Raises UserError for what cannot be found, an unknown file form, a
    folder without data files, or a weight that is none.
    """
    return [source for name in data for source in _weighted(name)]


def refuse_missing(data: list[str]) -> None:
    """Raise UserError for what `find_sources` would not find here; nothing is read, no hub is asked."""
    for name in data:
        _files(_split_weight(name)[0])


def _weighted(name: str) -> list[Source]:
    named, weight = _split_weight(name)
    weighed = {} if weight == 1 else {"weight": weight}
    return [
        replace(source, weight=weight, identity={**source.identity, **weighed}) for source in _named(named)
    ]


def _split_weight(name: str) -> tuple[str, float]:
    named, sign, text = name.rpartition("=")
    if not sign or Path(name).expanduser().exists():
        return name, 1.0
    try:
        weight = float(text)
    except ValueError:
        return name, 1.0
    if not 0 < weight <= _LARGEST_WEIGHT:
        raise UserError(f"{name}: weight {text}, wanted more than 0 and at most {_LARGEST_WEIGHT}")
    return named, weight


def _named(name: str) -> list[Source]:
    path = Path(name).expanduser()
    if _is_saved_dataset(path):
        return [_saved_dataset(path)]
    files = _files(name)
    return [_hub_dataset(name)] if files is None else [_file(file) for file in files]


def _files(name: str) -> list[Path] | None:
    """Return the files that `name` stands for, none for a saved dataset, None for a dataset on the hub."""
    if not name.strip():
        raise UserError("DATA: got an empty name, wanted a file, folder, glob or hub dataset")
    path = Path(name).expanduser()
    if _is_saved_dataset(path):
        return []
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and _form(file))
        if not files:
            raise UserError(f"{path}: no data files in this folder; wanted {', '.join(FILE_FORMS)}")
        return files
    if path.exists():
        if _form(path) is None:
            raise UserError(f"{path}: unknown file form '{path.suffix}'; wanted {', '.join(FILE_FORMS)}")
        return [path]
    if any(sign in name for sign in "*?["):
        found = sorted(Path(hit) for hit in glob.glob(str(path), recursive=True))
        if files := [hit for hit in found if hit.is_file() and _form(hit)]:
            return files
        raise UserError(f"{name}: no file of this pattern; wanted {', '.join(FILE_FORMS)}")
    identity = name.partition(":")[0]
    if _form(Path(name)) or name.startswith((".", "/", "~")) or identity.count("/") != 1:
        raise UserError(f"{name}: no such file or folder")
    return None


def _is_saved_dataset(path: Path) -> bool:
    return (path / "state.json").exists() or (path / "dataset_dict.json").exists()


def _form(path: Path) -> str | None:
    return next((form for form in FILE_FORMS if path.name.lower().endswith(form)), None)


def _file(path: Path) -> Source:
    try:
        size, digest = path.stat().st_size, sha256_file(path)
    except OSError as error:
        raise os_error(path, error) from error
    name = os.fsencode(path.name).decode("utf-8", "replace")  # some names are no text
    return Source(name, size, {"name": name, "sha256": digest}, _path=path)


def _saved_dataset(path: Path) -> Source:
    import datasets

    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: not a readable datasets folder ({error})") from error
    made_with = None
    if (path / "rows.json").exists():
        made_with = read_json(path / "rows.json", "make the rows again").get("tokenizer_fingerprint")
    source = _from_dataset(path.name, _one_split(dataset, path.name, None))
    return replace(source, tokenizer_fingerprint=made_with)


def _hub_dataset(name: str) -> Source:
    identity, _, split = name.partition(":")
    import datasets

    with hub.asked_once(identity) as silent:
        try:
            loaded = datasets.load_dataset(identity)
        except Exception as error:  # the hub client, the loaders and the network each raise their own kinds
            reason = silent or (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"{name}: no such file or folder, and as a hub dataset it cannot be loaded ({reason}); check "
                "the name, or the network and HF_HUB_OFFLINE"
            ) from error
    return _from_dataset(identity, _one_split(loaded, identity, split or None))


def _one_split(loaded: Any, name: str, split: str | None) -> Any:
    if not isinstance(loaded, dict):
        return loaded
    chosen = split or ("train" if "train" in loaded else next(iter(loaded)) if len(loaded) == 1 else None)
    if chosen not in loaded:
        raise UserError(
            f"{name}: wanted one of the splits {', '.join(loaded)}; name it as {name}:{next(iter(loaded))}"
        )
    return loaded[chosen]


def _from_dataset(name: str, dataset: Any) -> Source:
    known = [column for column in dataset.column_names if column in RECORD_FIELDS]
    if not known:
        raise UserError(f"{name}: no conversations; its columns are {', '.join(dataset.column_names)}")
    dataset = dataset.select_columns(known)
    identity = {"name": name, "fingerprint": dataset._fingerprint}
    return Source(name, max(dataset.num_rows, 1) * 1000, identity, _dataset=dataset)
