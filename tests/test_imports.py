"""Which package may import which, read from the source of every file; and what a fresh process
loads.

attention < conformance; attention < model; data alone; training above model and data; scripts and
train.py above training; lab above everything. Inside training: launch above loop above record.
Imports inside functions and for types alone count like all others. What is optional or slow to
import is imported where it is used.
"""

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import attention
from tests import processes

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
EDGE = ("train.", "config.", "training.launch.", "training.loop.trained.")
# the launch of the portable kernels chooses the pair for Hopper, which reads its settings
CHOICE = {"attention.kernels.launch", "attention.kernels.hopper.launch"}
# rooms of attention that know no other implementation of it
INDEPENDENT = {"naive", "tiled", "sdpa", "flex", "kernels"}
BELOW_THEM = {"interface", "mask", "online_softmax"}
LAZY = {"wandb", "wandb_workspaces", "datasets", "huggingface_hub", "tiktoken", "matplotlib"}
LAZY |= {"tensorboard", "triton", "transformers", "altair", "vl_convert"}


class Import(NamedTuple):
    importer: str  # dotted
    module: str  # dotted; of `from a import b`, a.b where that is a module
    name: str | None = None  # of `from module import name`

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


def dotted(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def files(*names: str) -> list[Path]:
    """Of these packages and modules of ours."""
    found = [[*ROOT.glob(f"{name}.py"), *(ROOT / name).rglob("*.py")] for name in names]
    return sorted(sum(found, []))


@cache
def imports(*names: str) -> list[Import]:
    found = []
    for file in files(*names):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found += [Import(dotted(file), alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}:{node.lineno} is a relative import"
                for name in (alias.name for alias in node.names):
                    inner = f"{node.module}.{name}"
                    module = inner if is_module(inner) else node.module
                    found.append(Import(dotted(file), module, name))
    return found


def test_packages_import_those_below_them():
    folders = {file.parent.name for file in ROOT.glob("*/*.py")}
    assert {name for name in folders if not name.startswith(".")} <= OURS
    for package, below in MAY_IMPORT.items():
        found = [x for x in imports(package) if x[:2] not in BESIDES]
        assert found, "the walk is broken"
        assert not [x for x in found if x.top in OURS - below - {package}]


def test_the_rooms_of_training_import_those_below_them():
    """None of them imports the front door, training itself, whose run() needs all of them."""
    for number, room in enumerate(ROOMS):
        own = [x for x in imports("training") if x.importer.startswith(room)]
        assert own, room
        below = tuple(ROOMS[: number + 1])
        assert not [x for x in own if x.top == "training" and not x.module.startswith(below)]


def test_no_circle_of_imports():
    graph: dict[str, set[str]] = {}
    for x in imports(*OURS - {"tests"}):
        if {x.importer, x.module} != CHOICE:
            graph.setdefault(x.importer, set()).add(x.module)
    TopologicalSorter(graph).prepare()  # its error names the circle


def test_attention_needs_torch_and_numpy_only():
    needed = {*sys.stdlib_module_names, "torch", "numpy", "attention"}
    foreign = {x for x in imports("attention") if x.top not in needed}
    kernels = {x for x in foreign if x.top == "triton" and is_of_triton(x.importer)}
    assert kernels and {x.importer for x in foreign - kernels} == {"attention.hf"}
    # of transformers' users alone
    assert not [x for x in imports(*OURS - {"tests"}) if x.module == "attention.hf"]


def test_attentions_do_not_import_one_another():
    for x in imports("attention"):
        room, used = ((*name.split("."), "")[1] for name in (x.importer, x.module))
        if x.top == "attention" and room in BELOW_THEM:
            assert used in BELOW_THEM, x
        if x.top == "attention" and room in INDEPENDENT:
            assert used == room or used not in {*INDEPENDENT, "backends", ""}, x


def test_model_knows_attention_by_its_public_names():
    found = [x for x in imports("model") if x.top == "attention"]
    public = [x for x in found if x.module == "attention" and x.name in attention.__all__]
    # kernels use the helpers of the attention's
    kernels = [x for x in found if x.module.startswith("attention.kernels.")]
    assert public and kernels and len(public) + len(kernels) == len(found)


def test_hydra_stays_at_the_edge():
    ours = imports("attention", "conformance", "config", "data", "model", "training", "train")
    hydra = [x for x in ours if x.top in {"hydra", "omegaconf"}]
    assert hydra and not [x for x in hydra if not f"{x.importer}.".startswith(EDGE)]


def is_of_triton(module: str) -> bool:
    """Kernels, and what calls them."""
    return ".kernels." in module or module.endswith("_kernel")


def loaded(code: str, *arguments: str) -> set[str]:
    """The top-level modules that a fresh process has imported after running `code`."""
    end = "print('\\nLOADED', *{name.partition('.')[0] for name, x in sys.modules.items() if x})"
    program = f"import sys, atexit\natexit.register(lambda: {end})\n{code}"
    done = processes.run("-c", program, *arguments)
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
        (DATA, [], {"numpy"}, LAZY | {"hydra", "torch"}),
        (TRAIN, ["--help"], {"hydra"}, LAZY | {"torch"}),
        (TRAIN, ["sead=1"], {"hydra"}, LAZY | {"torch"}),
    ],
    ids=["data", "train-help", "train-mistyped-key"],
)
def test_a_fresh_process_loads(code, arguments, needed, refused):
    found = loaded(code, *arguments)
    assert needed <= found and not found & refused


def test_what_is_optional_or_slow_is_imported_where_it_is_used():
    """All modules but those of Triton, transformers and charts, where Triton is absent. 5 s: a
    process that imports all of them.
    """
    modules = map(dotted, files(*OURS - {"tests", "docs", "examples", "hydra_plugins"}))
    left_out = ("attention.hf", "scripts.report.")
    kept = [x for x in modules if not is_of_triton(x) and not x.startswith(left_out)]
    code = "sys.modules['triton'] = None\nimport torch, attention, " + ", ".join(kept)
    code += "\nq = torch.ones(1, 1, 4, 16)\nattention.attention(q, q, q, backend='tiled')"
    assert len(kept) > 100 and not loaded(code) & LAZY
