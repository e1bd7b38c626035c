"""Where the documents come from: each source becomes a `datasets` stream of {"path", "text"} rows.

    stdlib        the Python files of the interpreter's standard library: on every machine, 9 MB
    torch_source  the Python files of the installed torch: on every machine, 46 MB, a third of it
                  in very long files
    text          data.path=FILE, a folder or a glob; a JSON, JSONL or parquet file gives one
                  document per row (data.field)
    hub           data.name=org/name on the Hugging Face hub (data.subset, data.split, data.field)

A row's path names the document inside its corpus ("json/decoder.py", "books.jsonl:17", "17"). It
decides whether the document is held out, so it does not depend on where the corpus lies.
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
    if config.source == "text":
        return f"data.path={config.path}"
    if config.source == "hub":
        return f"data.name={config.name}"
    return f"data={config.source}"


class Corpus:
    """The documents that the settings name. Local files are listed once, when it is made."""

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self.is_hub = config.source == "hub"
        if not self.is_hub:
            self.root, self.files = list_files(config)

    def identity(self) -> str:
        """A hash of what is known without reading the corpus. It names the token store.

        Files count by path, size and time of change. A hub dataset counts by its name alone: once
        it is tokenized, the hub is not asked again, with or without a network.
        """
        config = self.config
        parts: list[Any] = [config.source, config.field, config.max_documents]
        if self.is_hub:
            parts += [config.name, config.subset, config.split]
        else:
            stats = [(str(file), file.stat()) for file in self.files]
            parts += [str(self.root), [(name, x.st_size, x.st_mtime_ns) for name, x in stats]]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def max_documents(self) -> int | None:
        """An upper bound on the number of documents; None if only reading the corpus tells."""
        limit = self.config.max_documents
        if self.is_hub or any(file.suffix in TABLES for file in self.files):
            return limit
        return min(len(self.files), limit or len(self.files))

    def documents(self) -> "IterableDataset":
        """A `datasets` stream with the columns `path` and `text`, in a fixed order.

        Empty texts are left out.
        """
        import datasets
        import huggingface_hub

        config = self.config
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
            huggingface_hub.utils.disable_progress_bars()
        # loaded here, so that a hub out of reach is reported at once, not at the first row
        table = load_from_hub(config) if self.is_hub else None

        def rows() -> Iterator[Row]:
            if table is None:
                rows = self.local_rows()
            else:
                rows = table_rows(read_from_hub(table, config), config.field, subject(config))
            yield from itertools.islice((row for row in rows if row["text"]), config.max_documents)

        return datasets.IterableDataset.from_generator(rows)

    def local_rows(self) -> Iterator[Row]:
        """One row per text file, and one per row of a table file."""
        config = self.config
        for file in self.files:
            path = file.relative_to(self.root).as_posix()
            if file.suffix in TABLES:
                where = f"data.path={config.path}: {file}"
                for row in table_rows(read_table(file), config.field, where):
                    yield {"path": f"{path}:{row['path']}", "text": row["text"]}
                continue
            try:
                yield {"path": path, "text": read_text(file)}
            except UnicodeDecodeError as error:
                # a package may hold a file in an old encoding; a file of the user is never dropped
                # silently
                if config.source == "text":
                    raise ValueError(
                        f"data.path={config.path}: {file} is not UTF-8 text (byte {error.start}: "
                        f"{error.reason}); convert it, or leave it out with a glob such as "
                        f"data.path='{file.parent}/*.txt'"
                    ) from error


def table_rows(table: Iterable[dict[str, Any]], field: str, where: str) -> Iterator[Row]:
    """The texts of one column. A row's path is its number."""
    for index, row in enumerate(table):
        if field not in row:
            raise ValueError(
                f"{where} has no column data.field={field}; its columns are: {', '.join(row)}"
            )
        text = row[field] or ""  # a missing text counts as empty
        if not isinstance(text, str):
            raise ValueError(
                f"{where}: row {index} of data.field={field} is not text but "
                f"{type(text).__name__}; columns: {', '.join(row)}"
            )
        yield {"path": str(index), "text": text}
