"""Runs Gluon kernels on the CPU, where Triton has no interpreter for them: each partition is a
thread, each barrier a condition. One thread runs at a time, until it waits: side by side they would
hand Python's lock to each other at every operation, and take twice as long.

    hopper = load_kernels()                       # attention/kernels/hopper once more, in this
                                                  interpreter's Gluon
    hopper["launch"].forward(q, k, v, out, ...)

Of what the hardware does asynchronously it takes the worst case, so that an error in the protocol
fails every time and not now and then:

- a box that is being loaded is NaN until nothing else can go on, and boxes come in any order;
- a product reads its operands when it is issued and again when it is waited for, and both must
  be the same;
- a box that is being stored is read when it is issued and again when it is waited for, likewise;
- results start as NaN, and no two boxes may be stored to one place, in whichever order;
- shared memory starts as NaN, and what a thread wrote to it must be fenced before a product or a
  store reads it;
- after an arrival at a barrier the others go on first, as far as they can: what is released too
  early is overwritten;
- where all wait and nothing is on its way, that is a deadlock, and who waits for what.

Layouts, registers and the order of single instructions are the compiler's business: see
test_machine_code.py for those. Where instructions are written for several of a thread's numbers at
once, those of its scores are meant.
"""

import math
import random
import re
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from attention.kernels.forward import with_sink
from attention.kernels.score_mods import find_score_mod
from tests.conformance.edits import Edit, Package

FOLDER = Path(__file__).parents[3] / "attention" / "kernels" / "hopper"
here = threading.local()  # .program, .partition, and what the partition has under way
TURN = threading.Lock()  # of the one thread that runs


class Failure(RuntimeError):
    """What would be a wrong number, a fault or a hang on the device."""


def check(condition: bool, message: str) -> None:
    if not condition:
        raise Failure(message)


@contextmanager
def others_run() -> Iterator[None]:
    """While this thread waits for something."""
    TURN.release()
    try:
        yield
    finally:
        TURN.acquire()


def raw(x: Any) -> Any:
    return x.data if isinstance(x, Value) else x


class Value:
    """A scalar or a tensor in registers. Integers divide as in C."""

    def __init__(self, data: Any):
        self.data = torch.as_tensor(data)

    shape = property(lambda self: tuple(self.data.shape))
    dtype = property(lambda self: self.data.dtype)
    type = property(lambda self: types.SimpleNamespace(layout=None))

    def to(self, dtype: Any) -> "Value | Pointer":
        return Pointer(NOTED[int(self.data)]) if dtype is Pointer else Value(self.data.to(dtype))

    def reshape(self, shape: list[int]) -> "Value":
        return Value(self.data.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> "Value":
        return Value(self.data.permute(order))

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)


def operator(name: str, function: Callable) -> None:
    def forward(self: Value, other: Any) -> Value:
        return Value(function(self.data, raw(other)))

    def reflected(self: Value, other: Any) -> Value:
        return Value(function(torch.as_tensor(raw(other)), self.data))

    setattr(Value, f"__{name}__", forward)
    setattr(Value, f"__r{name}__", reflected)


for name, function in {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.true_divide,
    "floordiv": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "mod": torch.fmod,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
}.items():
    operator(name, function)


NOTED: dict[int, torch.Tensor] = {}  # by address


class Pointer:
    """Into a tensor's memory, by elements."""

    def __init__(self, base: torch.Tensor, offset: Any = 0):
        self.base, self.offset = base, offset

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.base, raw(offset) + self.offset)

    def to(self, dtype: torch.dtype) -> Value:
        """The address. Read back, it points to all that follows in the tensor's storage."""
        length = self.base.untyped_storage().nbytes() // self.base.element_size()
        start = self.base.storage_offset()
        NOTED[self.base.data_ptr()] = self.base.as_strided((length - start,), (1,))
        return Value(torch.tensor(self.base.data_ptr(), dtype=dtype))

    def locations(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        where = torch.as_tensor(self.offset)
        inside = torch.as_tensor(True if mask is None else raw(mask)).broadcast_to(where.shape)
        there = (where >= 0) & (where < self.base.numel())
        check(there[inside].all(), f"an address outside a tensor of {tuple(self.base.shape)}")
        return where, inside


def load(pointer: Pointer, mask: Any = None, other: float = 0) -> Value:
    where, inside = pointer.locations(mask)
    flat = pointer.base.view(-1)
    found = flat[torch.where(inside, where, 0)]
    return Value(torch.where(inside, found, torch.tensor(other, dtype=flat.dtype)))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    where, inside = pointer.locations(mask)
    values = torch.as_tensor(raw(value), dtype=pointer.base.dtype).broadcast_to(where.shape)
    pointer.base.view(-1)[where[inside]] = values[inside]


def atomic_add(pointer: Pointer, value: int) -> Value:
    before = load(pointer)
    store(pointer, before + value)
    return before


class Descriptor:
    """Of a tensor in global memory, for boxes of one shape."""

    def __init__(self, base: torch.Tensor, shape: Any, strides: Any, block_shape: Any, layout: Any):
        size = base.element_size()
        check(base.data_ptr() % 16 == 0, "a descriptor's tensor starts at a multiple of 16 bytes")
        check(strides[-1] == 1, f"the last of {strides} is not 1")
        check(
            all(stride * size % 16 == 0 for stride in strides[:-1]),
            f"strides {strides} are not multiples of 16 bytes",
        )
        steps = [stride if length > 1 else 0 for length, stride in zip(shape, strides, strict=True)]
        self.tensor = base.detach().as_strided(shape, steps)
        self.dtype, self.layout = base.dtype, layout
        nbytes = math.prod(block_shape) * size
        self.block_type = types.SimpleNamespace(shape=block_shape, nbytes=nbytes)

    def box(self, coordinates: list) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """The part of the box inside the tensor, and where in the box it lies."""
        start = [int(raw(x)) for x in coordinates]
        check(min(start) >= 0, f"a box at {start} starts before the tensor")
        ends = zip(start, self.block_type.shape, strict=True)
        part = self.tensor[tuple(slice(first, first + length) for first, length in ends)]
        return part, tuple(slice(0, length) for length in part.shape)


class Shared:
    """A view of shared memory."""

    def __init__(self, data: torch.Tensor):
        self.data = data

    shape = property(lambda self: list(self.data.shape))
    dtype = property(lambda self: self.data.dtype)

    def index(self, i: Any) -> "Shared":
        i = int(raw(i))
        check(0 <= i < self.data.shape[0], f"slot {i} of {self.data.shape[0]}")
        return Shared(self.data[i])

    def slice(self, start: Any, length: int, dim: int = 0) -> "Shared":
        return Shared(self.data.narrow(dim, int(raw(start)), length))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.data.permute(order))

    def reshape(self, shape: list[int]) -> "Shared":
        return Shared(self.data.view(shape))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> "Shared":
        return Shared(self.data.view(-1).view(dtype).view(shape))

    def load(self, layout: Any) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        check(
            self.data.shape == value.data.shape and self.data.dtype == value.data.dtype,
            f"{value.shape} stored to {self.data.shape}",
        )
        self.data.copy_(value.data)
        here.program.unfenced.append((here.partition, *self.extent()))

    def extent(self) -> tuple[int, int]:
        """Addresses."""
        steps = zip(self.data.shape, self.data.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in steps)
        first = self.data.data_ptr()
        return first, first + (last + 1) * self.data.element_size()

    def read_by_hardware(self) -> torch.Tensor:
        first, last = self.extent()
        for partition, start, stop in here.program.unfenced:
            check(
                stop <= first or start >= last,
                f"{here.partition} gives the hardware what {partition} wrote without a fence",
            )
        return self.data.clone()


def fence_async_shared() -> None:
    of_others = [entry for entry in here.program.unfenced if entry[0] != here.partition]
    here.program.unfenced = of_others


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all expected bytes have come."""

    def __init__(self, count: int):
        self.count = self.missing = count
        self.bytes = self.phase = 0

    def progress(self, arrivals: int = 0, expected: int = 0) -> None:
        self.missing -= arrivals
        self.bytes += expected
        check(self.missing >= 0, "more arrivals at a barrier than it counts")
        if self.missing == 0 and self.bytes == 0:
            self.missing = self.count
            self.phase ^= 1
            here.program.changed.notify_all()


def barrier_at(shared: Shared) -> Barrier:
    return here.program.barriers[shared.data.data_ptr()]


def init(shared: Shared, count: int) -> None:
    here.program.barriers[shared.data.data_ptr()] = Barrier(count)


def expect(shared: Shared, nbytes: int) -> None:
    barrier_at(shared).progress(1, nbytes)
    here.program.give_way()


def arrive(shared: Shared) -> None:
    expect(shared, 0)


def wait(shared: Shared, phase: Any, pred: Any = True) -> None:
    if raw(pred):
        barrier, phase = barrier_at(shared), int(raw(phase))
        here.program.wait_until(
            lambda: barrier.phase != phase, f"phase {phase} of a barrier of {barrier.count}"
        )


def await_copy(desc: Descriptor, coordinates: list, barrier: Shared, destination: Shared) -> None:
    part, inside = desc.box(coordinates)
    check(
        list(destination.data.shape) == list(desc.block_type.shape),
        f"a box of {desc.block_type.shape} into {destination.data.shape}",
    )
    destination.data.fill_(math.nan)

    def finish() -> None:
        box = torch.zeros_like(destination.data)
        box[inside] = part
        destination.data.copy_(box)
        barrier_at(barrier).progress(0, -desc.block_type.nbytes)

    here.program.copies.append(finish)
    here.program.changed.notify_all()


def start_store(desc: Descriptor, coordinates: list, source: Shared, *, add: bool) -> None:
    part, inside = desc.box(coordinates)
    issued = source.read_by_hardware()

    def finish() -> None:
        check(
            torch.equal(source.read_by_hardware().nan_to_num(), issued.nan_to_num()),
            "a buffer was written while it was being stored",
        )
        check(add or bool(part.isnan().all()), "a box was stored where another one was")
        part.copy_(part + issued[inside] if add else issued[inside])

    here.stores.append(finish)


def store_wait(pendings: int) -> None:
    while len(here.stores) > pendings:
        here.stores.pop(0)()


def unchanged(x: torch.Tensor, y: torch.Tensor) -> bool:
    """NaN is what has not come yet: a test of NaN in the inputs puts another function here."""
    return torch.equal(x, y)


class Product:
    """a @ b + acc on its way; its numbers may not be used before it is waited for."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool):
        self.a, self.b, self.acc, self.use_acc, self.data = a, b, acc, use_acc, None
        self.issued = self.operands()

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        a = self.a.read_by_hardware() if isinstance(self.a, Shared) else self.a.data
        return a, self.b.read_by_hardware()

    def finish(self) -> None:
        a, b = self.operands()
        for x, y in zip((a, b), self.issued, strict=True):
            check(
                unchanged(x, y),
                "an operand changed, or was NaN, between a product's issue and its wait",
            )
        check(a.dtype == b.dtype and a.dtype.itemsize == 2, f"a product of {a.dtype} and {b.dtype}")
        self.data = a.float() @ b.float()
        if self.use_acc:
            self.data = self.data + self.acc.data


def warpgroup_mma(
    a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False
) -> Product:
    assert is_async
    product = Product(a, b, acc, use_acc)
    here.products.append(product)
    return product


def warpgroup_mma_wait(outstanding: int, deps: tuple) -> Any:
    while len(here.products) > outstanding:
        here.products.pop(0).finish()
    check(
        all(not isinstance(x, Product) or x.data is not None for x in deps),
        "a product is used that was not waited for",
    )
    results = tuple(Value(x.data) for x in deps)
    return results if len(results) > 1 else results[0]


def come(number: int, expected: int, *, stay: bool) -> None:
    """bar.sync and bar.arrive: a named barrier opens when as many threads have come as all of them
    say.
    """
    program = here.program
    barrier = program.named.setdefault((number, expected), Barrier(expected))
    phase = barrier.phase
    barrier.progress(program.threads[here.partition])
    if stay:
        program.wait_until(lambda: barrier.phase != phase, f"named barrier {number}")
    else:
        program.give_way()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32).long()


def number(x: torch.Tensor) -> torch.Tensor:
    """Of 32 bits."""
    return (x & 0xFFFFFFFF).sub(x & 0x80000000, alpha=2).int().view(torch.float32)


PTX = {
    "ex2.approx.ftz.f32": torch.exp2,
    "add.rn.ftz.f32": torch.add,
    "sub.rn.ftz.f32": torch.sub,
    "fma.rn.ftz.f32": lambda x, y, z: (x.double() * y.double() + z.double()).float(),
    "fma.rn.ftz.sat.f32": lambda x, y, z: (
        (x.double() * y.double() + z.double()).clamp(0, 1).nan_to_num(0).float()
    ),
    "shl.b32": lambda x, places: number(bits(x) << places),
    "add.s32": lambda x, y: number(bits(x) + bits(y)),
    "mul.rn.f32": torch.mul,
    "setp.neu.f32": torch.ne,
    "setp.neu.or.f32": lambda x, y, p: (x != y) | p,
    "vote.sync.any.pred": lambda p, _: (
        p.reshape(4, 32).any(1, keepdim=True).expand(4, 32).flatten()
    ),
}


def by_thread(x: torch.Tensor) -> torch.Tensor:
    """(128 threads, numbers): 64 rows as four warps hold them, two numbers of a row, two of the row
    eight further down, and so on.
    """
    return x.reshape(4, 2, 8, x.shape[1] // 8, 4, 2).permute(0, 2, 4, 3, 1, 5).reshape(128, -1)


def from_threads(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return x.reshape(4, 8, 4, shape[1] // 8, 2, 2).permute(0, 4, 1, 3, 2, 5).reshape(shape)


def run_ptx(code: str, arguments: list[torch.Tensor], pack: int) -> torch.Tensor:
    """PTX for `pack` of a thread's numbers at once: the result's are $0 ..., behind them those of
    each argument.
    """
    shape = arguments[0].shape
    shapes = [(x.dtype, *x.shape) for x in arguments]
    taken = all(dtype == torch.float32 and rows == 64 for dtype, rows, _ in shapes)
    check(taken, f"{code[:20]}... of {shapes}")
    # (arguments, threads, numbers)
    numbers = torch.stack([by_thread(x.expand(shape)) for x in arguments])
    result = torch.empty_like(numbers[0])
    for begin in range(0, numbers.shape[2], pack):
        part = numbers[:, :, begin : begin + pack]
        # what an argument shares with the result, it writes over
        registers = {f"${pack + i}": x for i, x in enumerate(part.permute(0, 2, 1).flatten(0, 1))}
        registers |= {f"${i}": x for i, x in enumerate(part[0].T)}
        run_block(code, registers)
        result[:, begin : begin + pack] = torch.stack([registers[f"${i}"] for i in range(pack)], 1)
    return from_threads(result, shape)


def run_block(code: str, registers: dict[str, torch.Tensor]) -> None:
    """One block in braces, for 128 threads; a branch is taken or not by whole warps."""
    skipped = torch.zeros(128, dtype=torch.bool)  # threads that are on their way to the label

    def operand(text: str) -> Any:
        if text.startswith("0f"):
            return torch.tensor(struct.unpack(">f", bytes.fromhex(text[2:]))[0])
        return int(text) if text.lstrip("-").isdigit() else registers[text]

    for line in code.strip("{}").split(";")[1:]:  # the first declares registers
        label, colon, rest = line.partition(":")
        if colon:
            skipped, line = torch.zeros_like(skipped), rest
        name, *operands = line.replace(",", "").split() or [""]
        if name == "@!p":
            check(operands[0] == "bra.uni", f"no such branch: {line}")
            taken = ~registers["p"].reshape(4, 32)
            together = torch.equal(taken, taken[:, :1].expand(4, 32))
            check(together, "threads of a warp part at a uniform branch")
            skipped = skipped | taken.flatten()
        elif name:
            check(name in PTX, f"no such instruction: {line}")
            target, *operands = operands
            found = PTX[name](*map(operand, operands))
            before = registers.get(target, found)
            registers[target] = torch.where(skipped, before, found)


def inline_asm(
    code: str, constraints: str, arguments: list, dtype: Any, *, is_pure: bool, pack: int
) -> Value:
    """The few instructions that the kernels write themselves."""
    if found := re.match(r"bar\.(sync|arrive) \$1, (\d+);", code):
        come(int(raw(arguments[0])), int(found[2]), stay=found[1] == "sync")
        return Value(0)
    if code.startswith("cp.async.bulk.wait_group.read 0;"):
        store_wait(0)
        return Value(0)
    if code.startswith("{.reg") and pack > 1:
        wanted = ["r"] * pack if "ex2" in code else [*map(str, range(pack)), *["f"] * pack]
        wanted = ",".join([f"={wanted[-1]}"] * pack + wanted)
        check(constraints == wanted, f"{pack} numbers and {constraints}")
        return Value(run_ptx(code, [raw(argument) for argument in arguments], pack))
    if code == "mov.b32 $0, $1;":
        return Value(raw(arguments[0]))
    if found := re.match(r"cvt\.rn\.b?f16x2\.f32 \$0, \$2, \$1;", code):
        same = (dtype == torch.bfloat16) == ("bf16" in found[0])
        check(pack == 2 and same, f"{code} gives {dtype}")
        return arguments[0].to(dtype)
    less = "{.reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, $1, 0f%s, p;}"
    otherwise = {less % "00000000": 0.0, less % "FF800000": -math.inf}
    check(code in otherwise, f"no such instruction: {code}")
    x, a, b = (torch.as_tensor(raw(argument)) for argument in arguments)
    return Value(torch.where(a < b, x, otherwise[code]))


ANOTHER_FAILED = "another partition failed"


class Program:
    """One program of the grid: its shared memory, its partitions, and the copy engine's queue."""

    def __init__(self, number: int, grid: int, num_warps: int):
        self.number, self.grid = number, grid
        self.num_warps, self.threads = num_warps, {}
        self.changed = threading.Condition(TURN)
        self.memory, self.unfenced, self.copies = [], [], []
        self.barriers: dict[int, Barrier] = {}  # by address
        self.named: dict[tuple[int, int], Barrier] = {}  # by number and threads
        self.errors: list[BaseException] = []
        self.over = False
        self.partitions = 0
        self.waiting: dict[str, tuple[Callable[[], bool], str]] = {}
        self.giving_way: set[str] = set()

    def others_until(self, condition: Callable[[], bool]) -> None:
        """The others go on until it holds, or one of them fails."""
        self.changed.notify_all()
        self.changed.wait_for(lambda: condition() or self.errors)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        self.waiting[here.partition] = condition, what
        self.others_until(condition)
        del self.waiting[here.partition]
        check(not self.errors, ANOTHER_FAILED)

    def give_way(self) -> None:
        """The others go on as far as they can."""

        def all_stand() -> bool:
            waiting = {name for name, (condition, _) in self.waiting.items() if not condition()}
            return len(self.giving_way | waiting) >= self.partitions

        self.giving_way.add(here.partition)
        self.others_until(all_stand)
        self.giving_way.remove(here.partition)

    def stuck(self) -> bool:
        """Every partition waits, and none for what has happened."""
        conditions = [condition for condition, _ in self.waiting.values()]
        return len(conditions) >= self.partitions > 0 and not any(x() for x in conditions)

    def run(self, name: str, function: Callable, arguments: tuple = ()) -> None:
        here.program, here.partition, here.stores, here.products = self, name, [], []
        with TURN:
            try:
                with torch.no_grad():
                    function(*arguments)
                under_way = [*here.stores, *here.products]
                check(not under_way, f"{name} ends with stores or products under way")
            except BaseException as error:
                self.errors.append(error)
            finally:
                self.partitions -= 1  # it waits for nothing any more
                self.changed.notify_all()

    def copy_engine(self) -> None:
        while True:
            self.others_until(lambda: self.over or self.stuck())
            if self.over or self.errors:
                return
            waits = ", ".join(f"{name} for {what}" for name, (_, what) in self.waiting.items())
            check(bool(self.copies), f"deadlock in program {self.number}: {waits}")
            self.copies.pop(random.randrange(len(self.copies)))()

    def specialize(self, partitions: list[tuple], num_warps: list[int], _: list[int]) -> None:
        """The first partition has the program's own warps; registers are not modelled."""
        fence_async_shared()
        names = [f"{function.__name__} {i}" for i, (function, _) in enumerate(partitions)]
        warps = zip(names, (self.num_warps, *num_warps), strict=True)
        self.threads = {name: 32 * count for name, count in warps}
        self.partitions += len(partitions)
        threads = [
            threading.Thread(target=self.run, args=(name, *each))
            for name, each in zip(names, partitions, strict=True)
        ]
        engine = threading.Thread(target=self.run, args=("copy engine", self.copy_engine))
        for thread in (*threads, engine):
            thread.start()
        with others_run():
            for thread in threads:
                thread.join()
        self.over = True
        self.changed.notify_all()
        with others_run():
            engine.join()


def allocate_shared_memory(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
    nothing = math.nan if dtype.is_floating_point else -7
    memory = torch.full([int(raw(size)) for size in shape], nothing, dtype=dtype)
    here.program.memory.append(memory)  # its address stays taken while the program runs
    return Shared(memory)


class Kernel:
    """A @gluon.jit function: called inside kernels, launched with kernel[grid](...)."""

    def __init__(self, function: Callable):
        self.function, self.__name__ = function, function.__name__

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.function(*arguments, **named)

    def __get__(self, instance: Any, owner: type) -> Any:
        return types.MethodType(self, instance) if instance is not None else self

    def __getitem__(self, grid: tuple[int]) -> Callable:
        return partial(self.launch, int(grid[0]))

    def launch(self, grid: int, *arguments: Any, num_warps: int, **constants: Any) -> None:
        body = partial(self.function, *map(as_argument, arguments), **constants)
        programs = [Program(number, grid, num_warps) for number in range(grid)]
        threads = [
            threading.Thread(target=program.run, args=("main", body)) for program in programs
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [error for program in programs for error in program.errors]
        for error in sorted(errors, key=lambda error: str(error) == ANOTHER_FAILED):
            raise error


def as_argument(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer(x.detach())
    return Value(x) if isinstance(x, int) else x


def no_layout(*_: Any) -> None:
    """Layouts are not modelled."""


def lifted(function: Callable) -> Callable:
    """A function of tensors for values in registers."""
    return lambda *arguments: Value(function(*(torch.as_tensor(raw(x)) for x in arguments)))


def filled(shape: list[int], value: Any, dtype: torch.dtype, layout: Any) -> Value:
    return Value(torch.full(shape, raw(value), dtype=dtype))


DTYPES = "float32", "float16", "bfloat16", "int32", "int64"
# that are PyTorch's
FUNCTIONS = ["abs", "clamp", "exp2", "log2", "maximum", "minimum", "rsqrt", "where", "zeros_like"]
LAYOUTS = [
    f"{name}Layout"
    for name in ("Slice", "Blocked", "DotOperand", "NVMMADistributed", "SwizzledShared")
]


def fake_language() -> dict[str, Any]:
    """The language's functions and types, as far as the kernels use them."""
    return {
        "constexpr": lambda value: value,
        **{name: getattr(torch, name) for name in DTYPES},
        **{name: lifted(getattr(torch, name)) for name in FUNCTIONS},
        **dict.fromkeys(LAYOUTS, no_layout),
        "NVMMASharedLayout": types.SimpleNamespace(get_default_for=no_layout),
        "max": lambda x, axis: Value(raw(x).amax(axis)),
        "sum": lambda x, axis: Value(raw(x).sum(axis)),
        "cdiv": lambda x, y: (x + (y - 1)) // y,
        "arange": lambda start, stop, layout: Value(torch.arange(start, stop)),
        "zeros": lambda shape, dtype, layout: Value(torch.zeros(shape, dtype=dtype)),
        "full": filled,
        "expand_dims": lambda x, axis: Value(raw(x).unsqueeze(axis)),
        "convert_layout": lambda x, layout: x,
        "to_tensor": Value,
        "pointer_type": lambda dtype: Pointer,
        "thread_barrier": lambda: None,  # a partition is one thread
        "static_range": range,
        "static_assert": partial(check, message="a static_assert does not hold"),
        "program_id": lambda axis: Value(here.program.number),
        "num_programs": lambda axis: Value(here.program.grid),
        "num_warps": lambda: here.program.num_warps,
        "load": load,
        "store": store,
        "atomic_add": atomic_add,
        "inline_asm_elementwise": inline_asm,
        "allocate_shared_memory": allocate_shared_memory,
        "shared_memory_descriptor": Shared,
        "warp_specialize": lambda *partitions: here.program.specialize(*partitions),
    }


def jit(function: Callable | None = None, **_: Any) -> Any:
    return Kernel(function) if function is not None else Kernel


def fake_gluon() -> dict[str, Any]:
    """The modules that the kernels import, as far as they use them."""
    module = types.SimpleNamespace
    language = module(**fake_language())
    gluon = module(jit=jit, constexpr_function=lambda function: function, language=language)
    hopper = module(
        mbarrier=module(
            init=init, expect=expect, arrive=arrive, wait=wait, MBarrierLayout=no_layout
        ),
        tma=module(
            async_copy_global_to_shared=await_copy,
            async_copy_shared_to_global=partial(start_store, add=False),
            store_wait=store_wait,
        ),
        fence_async_shared=fence_async_shared,
        warpgroup_mma=warpgroup_mma,
        warpgroup_mma_wait=warpgroup_mma_wait,
    )
    name = "triton.experimental.gluon"
    return {
        "triton._C.libtriton": module(ir=None),
        "triton.language.core": module(_aggregate=lambda cls: cls),
        "triton.experimental": module(gluon=gluon),
        name: gluon,
        f"{name}.language": language,
        f"{name}.language._core": module(builtin=lambda function: function),
        f"{name}.language.nvidia.hopper": hopper,
        f"{name}.nvidia.hopper": module(TensorDescriptor=Descriptor),
    }


def interpreted(function: Any, gl: Any) -> Kernel | None:
    """A Triton function that the kernels call, in this interpreter's language; None if None."""
    if function is None:
        return None
    code = function.fn.__code__
    known = {name: x for name, x in function.fn.__globals__.items() if name in code.co_names}
    known = {name: interpreted(x, gl) if hasattr(x, "fn") else x for name, x in known.items()}
    return Kernel(types.FunctionType(code, known | {"tl": gl}))


def load_kernels(
    edit: Edit | None = None, *, cache_bytes: int = 2**20
) -> dict[str, types.ModuleType]:
    """attention/kernels/hopper, run against this interpreter: primitives, forward, backward and
    launch.

    edit: what a test breaks. cache_bytes: of the device's L2 cache.
    """
    # what the kernels import beside Gluon comes from outside
    import attention.kernels.hopper.launch  # noqa: F401

    edited = Package(FOLDER).edited((edit,)) if edit else {}
    prefix = "attention.kernels.hopper."
    names = "primitives", "forward", "backward", "launch"
    ours = {name: types.ModuleType(prefix + name) for name in names}
    with patch.dict(sys.modules, fake_gluon() | {prefix + name: ours[name] for name in names}):
        for name, module in ours.items():
            file = FOLDER / f"{name}.py"
            source = edited.get(name, file.read_text())
            exec(compile(source, file, "exec"), module.__dict__)
            if name == "primitives":
                module.add_box = partial(start_store, add=True)
    launch, gl = ours["launch"], ours["forward"].gl
    ours["forward"].with_sink = interpreted(with_sink, gl)
    counters = torch.zeros(2, dtype=torch.int32)  # every launch must leave them at zero
    launch.find_score_mod = lambda name: interpreted(find_score_mod(name), gl)
    launch.multiprocessors = lambda device: 2
    launch.cache_bytes = lambda device: cache_bytes
    launch.counters = lambda device: counters
    return ours
