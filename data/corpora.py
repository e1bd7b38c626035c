"""Where the documents come from: each source becomes one `datasets` stream of {"path", "text"}
rows.

    stdlib        the Python files of the running interpreter's standard library: on every machine,
                  about 9 MB
    torch_source  the Python files of the installed torch: also on every machine, 46 MB, a third of
                  it in very long files
    text          data.path=FILE, a folder or a glob; JSON, JSONL and parquet files give one
                  document a row (data.field)
    hub           data.name=org/name on the Hugging Face hub (data.subset, data.split, data.field)

A row's path names the document inside its corpus ("json/decoder.py", "books.jsonl:17", "17") and
decides whether it is held out, so it never depends on where the corpus lies on this machine.
"""

import hashlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from config import DataConfig
from data.hub import load_from_hub, read_from_hub
from data.local_files import TABLES, list_files, read_table, read_text

if TYPE_CHECKING:
    from datasets import IterableDataset

Row = dict[str, str]


def subject(config: DataConfig) -> str:
    """What the user typed to choose this corpus."""
    return {"text": f"data.path={config.path}", "hub": f"data.name={config.name}"}.get(
        config.source, f"data={config.source}"
    )


def identity(config: DataConfig) -> str:
    """A hash of all that can be known of the corpus without reading it: a token store is found by
    it.

    Files count by place, size and time of change. A hub dataset counts by its name alone: once
    tokenized it is not asked for again, with or without a network.
    """
    known: list[Any] = [config.source, config.field, config.max_documents]
    if config.source == "hub":
        known += [config.name, config.subset, config.split]
    else:
        root, files = list_files(config)
        known += [
            str(root),
            [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files],
        ]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def count_documents(config: DataConfig) -> int | None:
    """How many documents to expect at most, where it is known beforehand."""
    if config.source == "hub":
        return config.max_documents
    _, files = list_files(config)
    if config.source == "text" and any(file.suffix in TABLES for file in files):
        return config.max_documents
    return min(len(files), config.max_documents or len(files))


def documents(config: DataConfig) -> "IterableDataset":
    """The corpus as a `datasets` stream with the columns `path` and `text`, in a fixed order and
    without empty texts.
    """
    import datasets
    import huggingface_hub

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        huggingface_hub.utils.disable_progress_bars()
    # a hub that cannot be reached is reported here, not at the first row
    table = load_from_hub(config) if config.source == "hub" else None

    def rows() -> Iterator[Row]:
        found = (
            local_rows(config)
            if table is None
            else table_rows(read_from_hub(table, config), config.field, subject(config))
        )
        yield from itertools.islice((row for row in found if row["text"]), config.max_documents)

    return datasets.IterableDataset.from_generator(rows)


def local_rows(config: DataConfig) -> Iterator[Row]:
    """One row a text file, and one a row of a table file."""
    root, files = list_files(config)
    for file in files:
        path = file.relative_to(root).as_posix()
        if config.source == "text" and file.suffix in TABLES:
            rows = table_rows(read_table(file), config.field, f"data.path={config.path}: {file}")
            yield from ({"path": f"{path}:{row['path']}", "text": row["text"]} for row in rows)
            continue
        try:
            yield {"path": path, "text": read_text(file)}
        except UnicodeDecodeError as error:
            # a package may hold a file in an old encoding; the user's own files are never dropped
            # silently
            if config.source == "text":
                raise ValueError(
                    f"data.path={config.path}: {file} is not UTF-8 text (byte {error.start}: "
                    f"{error.reason}); "
                    "convert it, or leave it out with a glob such as "
                    f"data.path='{file.parent}/*.txt'"
                ) from error


def table_rows(table: Iterable[dict[str, Any]], field: str, where: str) -> Iterator[Row]:
    """The texts of one column; a row's path is its number."""
    for index, row in enumerate(table):
        if field not in row:
            raise ValueError(
                f"{where} has no column data.field={field}; its columns are: {', '.join(row)}"
            )
        text = row[field] or ""  # a missing text is an empty one
        if not isinstance(text, str):
            raise ValueError(
                f"{where}: row {index} of data.field={field} is not text but "
                f"{type(text).__name__}; columns: {', '.join(row)}"
            )
        yield {"path": str(index), "text": text}
