"""Which package may import which, read from the source of every file; and what a fresh process
loads.

attention < conformance; attention < model; data alone; training above model and data; scripts and
train.py above training; lab above everything. Inside training: launch above loop above record.
Imports inside functions and for types alone count like all others. What is optional or slow to
import is imported where it is used.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import attention

ROOT = Path(__file__).resolve().parents[1]
# what a package may import of ours, besides itself; lab and tests may import all
MAY_IMPORT = {
    "config": set(),
    "attention": set(),
    "conformance": {"attention"},
    "data": {"config"},
    "model": {"attention", "config"},
    "training": {"attention", "config", "data", "model"},
    "hydra_plugins": {"attention", "config", "training"},
    "train": {"config", "training"},
    "scripts": {"attention", "conformance", "config", "data", "model", "training"},
    "docs": set(),
    "examples": {"attention"},
}
OURS = {*MAY_IMPORT, "lab", "tests"}
# run() calls the story that train.py tells; generate names the type of a tokenizer
BESIDES = {("training", "train"), ("model.generate", "data")}
# the rooms of training: each may import itself and those before it
ROOMS = ["training.own_modules", "training.record", "training.loop", "training.launch"]
# Hydra's objects are made into dataclasses here
EDGE = ("train", "config", "training.launch", "training.loop.trained")
# the launch of the portable kernels chooses the pair for Hopper, which reads its settings
CHOICE = {"attention.kernels.launch", "attention.kernels.hopper.launch"}
# modules of attention that know no other implementation of it
INDEPENDENT = {"naive", "tiled", "sdpa", "flex", "kernels"}
BELOW_THEM = {"interface", "mask", "online_softmax"}
# modules that call attention() itself, and that nothing in attention imports
ABOVE = {"attention.hf", "attention.look.trace", "attention.look.try_out"}
LAZY = {"wandb", "wandb_workspaces", "datasets", "huggingface_hub", "tiktoken", "matplotlib"}
LAZY |= {"tensorboard", "triton", "transformers"}
# of scripts.report alone
CHARTS = {"altair", "vl_convert"}


class Import(NamedTuple):
    file: Path  # relative to the root
    line: int
    module: str  # dotted; of `from a import b`, a.b where that is a module
    name: str | None  # of `from module import name`
    at_import: bool  # whether it runs when the file is imported

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    @property
    def importer(self) -> str:
        return ".".join(self.file.with_suffix("").parts).removesuffix(".__init__")

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def is_module(dotted: str) -> bool:
    path = ROOT / dotted.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports_of(node: ast.AST, file: Path, at_import: bool = True) -> list[Import]:
    found = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
            found += [Import(file, child.lineno, name, None, at_import) for name in names]
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{file}:{child.lineno} is a relative import"
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                module = inner if is_module(inner) else child.module
                found.append(Import(file, child.lineno, module, alias.name, at_import))
        else:
            later = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            later |= isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            found += imports_of(child, file, at_import and not later)
    return found


@cache
def imports(*names: str) -> list[Import]:
    """Of the files of these packages and modules of ours."""
    found = []
    for name in names:
        for file in sorted([*ROOT.glob(f"{name}.py"), *(ROOT / name).rglob("*.py")]):
            found += imports_of(ast.parse(file.read_text()), file.relative_to(ROOT))
    return found


@cache
def needing(package: str) -> set[str]:
    """Our modules that cannot be imported where this package is absent."""
    found = [x for x in imports(*OURS - {"tests"}) if x.at_import]
    apart, more = set(), {x.importer for x in found if x.top == package}
    while more:
        apart |= more
        more = {x.importer for x in found if x.module in apart} - apart
    return apart


def refuse(found: list[Import]) -> None:
    assert not found, "\n".join(map(str, found))


def test_every_folder_with_code_is_walked():
    folders = {file.parent.name for file in ROOT.glob("*/*.py")}
    assert {name for name in folders if not name.startswith(".")} <= OURS
    assert all(imports(name) for name in MAY_IMPORT), "the walk is broken"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_direction(package):
    other = OURS - MAY_IMPORT[package] - {package}
    found = [x for x in imports(package) if (x.importer, x.module) not in BESIDES]
    refuse([x for x in found if x.top in other])


def test_the_rooms_of_training_import_those_below_them():
    """None of them imports the front door, training itself, whose run() needs all of them."""
    for number, room in enumerate(ROOMS):
        own = [x for x in imports("training") if x.importer.startswith(room)]
        assert own, room
        below = tuple(ROOMS[: number + 1])
        refuse([x for x in own if x.top == "training" and not x.module.startswith(below)])


def test_no_circle_of_imports():
    graph: dict[str, set[str]] = {}
    for x in imports(*OURS - {"tests"}):
        graph.setdefault(x.importer, set()).add(x.module)

    def reached(start: str) -> set[str]:
        found, more = set(), [start]
        while more:
            new = graph.get(more.pop(), set()) - found
            found |= new
            more += new
        return found

    assert {module for module in graph if module in reached(module)} <= CHOICE


def test_attention_needs_torch_and_numpy_only():
    needed = {*sys.stdlib_module_names, "torch", "numpy", "attention"}
    foreign = [x for x in imports("attention") if x.top not in needed]
    assert foreign, "the kernels import triton"
    kernels = [x for x in foreign if x.top == "triton" and x.importer in needing("triton")]
    refuse([x for x in foreign if x not in kernels and x.importer != "attention.hf"])
    # of transformers' users alone
    refuse([x for x in imports(*OURS - {"tests"}) if x.module == "attention.hf"])


def test_attentions_do_not_import_one_another():
    for x in imports("attention"):
        importer = x.importer.partition(".")[2].partition(".")[0]
        used = x.module.partition(".")[2].partition(".")[0]
        assert x.module not in ABOVE, f"{x}: a circle"
        if x.top != "attention" or importer in ("", "backends") or x.importer in ABOVE:
            continue
        assert used, f"{x}: a circle"
        if importer in BELOW_THEM:
            assert used in BELOW_THEM, x
        if importer in INDEPENDENT:
            assert used == importer or used not in {*INDEPENDENT, "backends"}, x


def test_model_knows_attention_by_its_public_names():
    found = [x for x in imports("model") if x.top == "attention"]
    public = [x for x in found if x.module == "attention" and x.name in attention.__all__]
    # kernels use the helpers of the attention's
    kernels = [x for x in found if x.module.startswith("attention.kernels.")]
    kernels = [x for x in kernels if not x.at_import or x.importer in needing("triton")]
    assert public and kernels
    refuse([x for x in found if x not in public and x not in kernels])


def test_hydra_stays_at_the_edge():
    ours = imports("attention", "conformance", "config", "data", "model", "training", "train")
    hydra = [x for x in ours if x.top in {"hydra", "omegaconf"}]
    assert hydra
    refuse([x for x in hydra if not x.importer.startswith(EDGE)])


def test_what_is_optional_or_slow_is_imported_where_it_is_used():
    found = [x for x in imports(*OURS - {"tests"}) if x.at_import]
    refuse([x for x in found if x.top in LAZY - {"triton", "transformers"}])
    kernels = [name for name in needing("triton") if not name.endswith("_kernel")]
    assert kernels and all(".kernels." in name for name in kernels)
    assert needing("transformers") == {"attention.hf"}
    for package in CHARTS:
        assert all(name.startswith("scripts.report.") for name in needing(package))


def loaded(code: str, *arguments: str) -> set[str]:
    """The top-level modules that a fresh process has imported after running `code`."""
    end = "print('\\nLOADED', *{name.partition('.')[0] for name, x in sys.modules.items() if x})"
    program = f"import sys, atexit\natexit.register(lambda: {end})\n{code}"
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert "Traceback" not in done.stderr, done.stderr
    return set(done.stdout.splitlines()[-1].removeprefix("LOADED ").split())


DATA = "import data, data.tokenizer, data.corpora, data.token_store, data.batches, data.synthetic"
TRAIN = (
    "import runpy; sys.argv = ['train.py', *sys.argv[1:]]; "
    "runpy.run_path('train.py', run_name='__main__')"
)


@pytest.mark.parametrize(
    ("code", "arguments", "needed", "refused"),
    [
        ("import attention", [], {"torch"}, LAZY | {"hydra"}),
        ("import model", [], {"torch"}, LAZY | {"hydra"}),
        (DATA, [], {"numpy"}, LAZY | {"hydra", "torch"}),
        (TRAIN, ["--help"], {"hydra"}, LAZY | {"torch"}),
        (TRAIN, ["sead=1"], {"hydra"}, LAZY | {"torch"}),
        (TRAIN, ["--cfg", "job", "attention=triton"], {"hydra"}, LAZY),
    ],
    ids=["attention", "model", "data", "train-help", "train-mistyped-key", "train-cfg-job"],
)
def test_a_fresh_process_loads(code, arguments, needed, refused):
    found = loaded(code, *arguments)
    assert needed <= found
    assert not found & (refused | CHARTS)


def test_attention_works_where_triton_is_absent():
    code = (
        "sys.modules['triton'] = None\nimport torch, attention\nq = torch.ones(1, 1, 4, 16)\n"
        "attention.attention(q, q, q, backend='tiled')"
    )
    assert "triton" not in loaded(code)
