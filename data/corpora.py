"""Where the documents come from: each source becomes a stream of documents.

stdlib        the Python files of the interpreter's standard library: on every machine, 9 MB
torch_source  the Python files of the installed torch: on every machine, 46 MB, a third of it
              in very long files
text          data.path=FILE, a folder or a glob; a table gives one document per row
              (readers.py, data.field)
hub           data.name=org/name on the Hugging Face hub (data.subset, data.split, data.field)
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from config import DataConfig
from data.hub import load_from_hub
from data.local_files import list_files
from data.readers import TABLES, read_rows, read_text, texts


class Document(NamedTuple):
    """A text, and its name inside its corpus: "json/decoder.py", "books.jsonl:17" or "17".

    The name decides whether the document is held out, so it does not depend on where the corpus
    lies.
    """

    path: str
    text: str


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
        # None was the number of documents: stores of earlier releases keep their names
        parts: list[Any] = [config.source, config.field, None]
        if self.is_hub:
            parts += [config.name, config.subset, config.split]
        else:
            stats = [(str(file), file.stat()) for file in self.files]
            parts += [str(self.root), [(name, x.st_size, x.st_mtime_ns) for name, x in stats]]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def documents(self) -> Iterator[Document]:
        """The documents in a fixed order. Empty texts are left out.

        Raises ValueError, naming the file and the row, for what cannot be read.
        """
        found = self._hub_documents() if self.is_hub else self._local_documents()
        return (document for document in found if document.text)

    def _hub_documents(self) -> Iterator[Document]:
        table = load_from_hub(self.config)
        try:
            for number, text in enumerate(texts(table, self.config.field)):
                yield Document(str(number), text)
        except ValueError as error:
            raise ValueError(f"{subject(self.config)}: {error}") from error

    def _local_documents(self) -> Iterator[Document]:
        """One document for each text file, and one for each row of a table."""
        field = self.config.field
        for file in self.files:
            path = file.relative_to(self.root).as_posix()
            try:
                if file.suffix.lower() not in TABLES:
                    yield Document(path, read_text(file))
                    continue
                for number, text in enumerate(texts(read_rows(file, field), field)):
                    yield Document(f"{path}:{number}", text)
            except (OSError, ValueError) as error:
                # a package may hold a file in an old encoding; a file of the user is never dropped
                # silently
                if self.config.source == "text" or not isinstance(error, UnicodeDecodeError):
                    raise ValueError(
                        f"{subject(self.config)}: {file}: {error}; mend it, or leave it out with a "
                        f"glob such as '{file.parent}/*.txt'"
                    ) from error
