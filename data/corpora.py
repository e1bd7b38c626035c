"""Where the documents come from: each source becomes a stream of documents.

stdlib        the Python files of the interpreter's standard library: on every machine, 9 MB
torch_source  the Python files of the installed torch: on every machine, 46 MB, a third of it
              in very long files
text          data.path=FILE, a folder or a glob; a table gives one document per row
              (readers.py, data.field)
hub           data.name=org/name on the Hugging Face hub (data.subset, data.split, data.field)
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from config import DataConfig
from data.local_files import list_files
from data.network import answers
from data.readers import Row, is_table, read_rows, read_text, texts
from data.token_file import size_and_time


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
        return f"data.name={config.name} data.subset={config.subset} data.split={config.split}"
    return f"data={config.source}"


class Corpus:
    """The documents that the settings name. Local files are listed once, when it is made.

    Raises ValueError if there are none, and for a column of tables where no file is a table.
    """

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self.root, self.files = (None, []) if config.source == "hub" else list_files(config)
        has_table = config.source == "hub" or any(map(is_table, self.files))
        if config.field != DataConfig.field and not has_table:
            raise ValueError(
                f"data.field={config.field} has no effect: {subject(config)} names no table; leave "
                "it out"
            )

    def identity(self) -> list[Any]:
        """What is known without reading the corpus, for JSON. It names the token store.

        Files count by path, size and time of change. A hub dataset counts by its name alone: once
        it is tokenized, the hub is not asked again, with or without a network.
        """
        config = self.config
        files = [(str(file), *size_and_time(file)) for file in self.files]
        return [config.name, config.subset, config.split, config.field, files]

    def documents(self) -> Iterator[Document]:
        """The documents in a fixed order. Empty texts are left out.

        Raises ValueError, naming the file and the row, for what cannot be read.
        """
        return (document for document in self._read() if document.text)

    def _read(self) -> Iterator[Document]:
        """One document for each text file, and one for each row of a table."""
        field, place = self.config.field, subject(self.config)
        try:
            if self.config.source == "hub":
                for number, text in enumerate(texts(hub_rows(self.config), field)):
                    yield Document(str(number), text)
            for file in self.files:
                path = file.relative_to(self.root).as_posix()
                place = f"{subject(self.config)}: {file}"
                if is_table(file):
                    for number, text in enumerate(texts(read_rows(file, field), field)):
                        yield Document(f"{path}:{number}", text)
                else:
                    yield Document(path, read_text(file))
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"{place}: {error}") from error


def hub_rows(config: DataConfig) -> Iterable[Row]:
    """One split of a dataset; with HF_HUB_OFFLINE=1, from this machine's cache alone.

    Where the hub is out of reach, `datasets` would retry for 25 seconds. So its host is tried
    first. Raises OSError, ValueError or RuntimeError if the dataset cannot be had.
    """
    import datasets

    hub = datasets.config.HF_ENDPOINT
    try:
        if not datasets.config.HF_HUB_OFFLINE and not answers(hub):
            raise OSError(f"{hub} does not answer; HF_HUB_OFFLINE=1 reads what this machine has")
        return datasets.load_dataset(config.name, config.subset, split=config.split)
    except OSError as error:
        raise OSError(
            f"{error}; data=stdlib, data=torch_source and data=text data.path=FILE need no network"
        ) from error
