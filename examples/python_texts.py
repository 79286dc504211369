"""Collect the documents that come with Python, which the small models are trained on.

They are the language reference that `help()` shows, the docstrings of modules written in C, and the
sources of the standard library. Whole documents are held out for calibration and for evaluation.
Documents of one Python can be kept in a file, so that another one trains on the same.
"""

import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import platform
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

# Tests, generated tables, build settings and what pip installed: not text that a person wrote.
SKIPPED_FOLDERS = re.compile(
    r"test|tests|idle_test|encodings|pydoc_data|site-packages|dist-packages|config-.*|__.*__"
)
SKIPPED_FILES = re.compile(r"_sysconfigdata.*|stringprep|entities|this|keycert.*")
# In each held-out text, characters of each kind of document.
HELD_OUT = {"topic": 60_000, "docstrings": 15_000, "source": 115_000}
HELD_OUT_LENGTHS = range(800, 30_000)
# The held-out texts are published with the model: no addresses or absolute paths in them.
PRIVATE = re.compile(r"[\w.+-]+@[\w-]+\.\w+|/(tmp|home|root|work|Users)\b")
CONTROL = re.compile(r"[^\n\t\x20-\x7e\xa0-\uffff]")


@dataclass(frozen=True)
class Document:
    """Hold one text; `kind` is "topic", "docstrings" or "source"."""

    kind: str
    name: str
    text: str

    @property
    def key(self) -> str:
        return text_key(f"{self.kind}:{self.name}")


def text_key(text: str) -> str:
    """Return a key that sorts texts in a fixed random order."""
    return hashlib.sha256(text.encode()).hexdigest()


def topics() -> Iterator[Document]:
    """Yield the language reference, as `help("topic")` prints it."""
    for name, text in importlib.import_module("pydoc_data.topics").topics.items():
        yield Document("topic", name, text)


def sources() -> Iterator[Document]:
    """Yield the modules of the standard library that are written in Python."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if any(SKIPPED_FOLDERS.fullmatch(part) for part in place.parts[:-1]):
            continue
        if not SKIPPED_FILES.fullmatch(path.stem):
            with tokenize.open(path) as file:
                yield Document("source", place.as_posix(), file.read())


def docstrings() -> Iterator[Document]:
    """Yield the docstrings of the modules that are written in C."""
    in_c = (importlib.machinery.BuiltinImporter, importlib.machinery.ExtensionFileLoader)
    for name in sorted(sys.stdlib_module_names):
        spec = None if "test" in name or "xx" in name else importlib.util.find_spec(name)
        if spec and (spec.loader in in_c or isinstance(spec.loader, in_c)):
            module = importlib.import_module(name)
            yield Document("docstrings", name, "\n\n".join(described(name, module)))


def described(name: str, owner: ModuleType | type) -> Iterator[str]:
    """Yield name, signature and docstring of a module or class, then of its members."""
    yield f"{name}{signature(owner)}\n\n{inspect.cleandoc(owner.__doc__ or '')}".rstrip()
    for member, value in sorted(vars(owner).items()):
        if member.startswith("__") or not isinstance(getattr(value, "__doc__", None), str):
            continue
        if inspect.isclass(value) and isinstance(owner, ModuleType):
            yield from described(member, value)
        elif inspect.isroutine(value) or inspect.isdatadescriptor(value):
            yield f"{member}{signature(value)}\n{inspect.cleandoc(value.__doc__)}"


def signature(value: object) -> str:
    """Return the signature of an object written in C, as a caller writes it, if it has one."""
    text = getattr(value, "__text_signature__", None) or ""
    return re.sub(r"\$\w+(, /)?(, )?", "", text)


def collect() -> list[Document]:
    """Return all documents of this Python, without near copies, in a fixed random order."""
    documents = []
    for document in (*topics(), *docstrings(), *sources()):
        text = document.text.replace("\f", "").expandtabs().strip("\n")
        if text and not CONTROL.search(text):
            documents.append(Document(document.kind, document.name, text))
    # Longest first: topics repeat parts of longer ones, C docstrings those of a Python twin.
    seen: set[str] = set()
    kept = []
    for document in sorted(documents, key=lambda d: (-len(d.text), d.key)):
        lines = {s for line in document.text.splitlines() if len(s := line.strip()) > 20}
        if lines and len(lines & seen) <= 0.3 * len(lines):
            kept.append(document)
            seen |= lines
    return sorted(kept, key=lambda d: d.key)


def split(documents: Iterable[Document]) -> dict[str, list[str]]:
    """Return the "train", "calib" and "eval" texts; whole documents are held out."""
    texts: dict[str, list[str]] = {"train": [], "calib": [], "eval": []}
    room = {(part, kind): n for part in ("calib", "eval") for kind, n in HELD_OUT.items()}
    for document in documents:
        part = max(("calib", "eval"), key=lambda part: room[part, document.kind])
        fits = len(document.text) <= room[part, document.kind]
        if fits and len(document.text) in HELD_OUT_LENGTHS and not PRIVATE.search(document.text):
            room[part, document.kind] -= len(document.text)
        else:
            part = "train"
        texts[part].append(document.text)
    # The short kinds fill up first, so mix again: the first windows should show every kind.
    return {part: sorted(held, key=text_key) for part, held in texts.items()}


def load_corpus(path: Path | None) -> tuple[str, list[Document]]:
    """Return the documents, and the version of Python that they come from."""
    if path and path.exists():
        stored = json.loads(path.read_text())
        return stored["python"], [Document(**d) for d in stored["documents"]]
    documents = collect()
    if path:
        stored = {"python": platform.python_version(), "documents": [asdict(d) for d in documents]}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(stored))
    return platform.python_version(), documents
