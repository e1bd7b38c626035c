"""Divide a torch.profiler trace into the parts of a training step, so that each moment of a step
belongs to one part.

On a GPU this is the device's time: each kernel, less its overlap with an earlier one; between
kernels, messages between ranks, waits for data, and the host. On a CPU it is the own time of each
operator, and Python's time between operators; data and optimizer include their Python time. Either
way the parts add up to the step.

The part of a kernel follows from its name, or from the operators and ranges in which the host
launched it. An operator of the backward pass also counts as inside the operators of the forward
pass whose gradient it computes: the profiler gives both the same number.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import inf
from typing import Any

from scripts.tables import Row

PARTS = (
    "attention forward",
    "attention backward",
    "matrix products",
    "norms, elementwise",
    "loss",
    "optimizer",
    "data",
    "other",
    "messages alone",
    "host gaps",
)
(
    FORWARD, BACKWARD, PRODUCTS, ELEMENTWISE, LOSS, OPTIMIZER, DATA, OTHER, MESSAGES, GAPS
) = PARTS  # fmt: skip

STEP = "step"  # the range of one step
# the range of one attention call, if the model is not compiled
ATTENTION = "attention call"
PHASES = (DATA, "forward", "backward", OPTIMIZER)  # the ranges within a step

# attention kernels: ours, FlashAttention's, PyTorch's memory-efficient ones, cuDNN's with its
# helpers, FlexAttention's
ATTENTION_KERNELS = re.compile(
    r"^(intervals|block_starts|forward|query_ranges|delta|dkdv|dq|dkdvdq|backward)_kernel"
    r"|flash_?(fwd|bwd|att)|fmha|_sdpa_|compute_dot_do_o|convert_dq|flex_attention"
)
BACKWARD_KERNELS = re.compile(
    r"^(query_ranges|delta|dkdv|dq|dkdvdq|backward)_kernel"
    r"|bwd|backward|bprop|cutlassb_|compute_dot_do_o|convert_dq|fmha_reduce"
)
# attention operators. Only an attention of plain operators multiplies batches of matrices: all
# other products here are single matrices
ATTENTION_OPS = re.compile(
    r"^attention call$|::_?flash_attention|::tile_loop|scaled_dot_product"
    r"|::_(efficient|cudnn)_attention|flex_attention|^aten::bmm$"
)
PRODUCT_KERNELS = re.compile(r"gemm|nvjet|gemv|splitk|cutlass|cublas|^triton_(tem|mm)_")
PRODUCT_OPS = re.compile(
    r"^(aten|mkldnn|mkl)::"
    r"(addmm|mm|matmul|linear|_linear|_mkl_linear|_linear_pointwise|addmv|mv)(_|$)|^mkl(dnn)?::"
)
LOSS_NAMES = re.compile(r"log_?softmax|nll_?loss|cross_?entropy|logsumexp")
MESSAGE_KERNELS = re.compile(r"^nccl")
OPTIMIZER_NAMES = re.compile(r"fusedadam|_fused_adam|fusedoptimizer")


@dataclass
class Range:
    """One event of the host: an operator, a named range or a call of the driver."""

    name: str
    start: float  # microseconds
    stop: float
    thread: Any
    # the number that an operator of the forward pass shares with its gradient's operator
    sequence: int | None = None
    parent: "Range | None" = None
    inside: float = 0.0  # microseconds spent in its children

    def stack(self) -> list["Range"]:
        """This range and all ranges around it, innermost first."""
        found, each = [], self
        while each is not None:
            found.append(each)
            each = each.parent
        return found


def part_of(
    kernel: str, operators: Sequence[str], gradient_of: Sequence[str] = (), phase: str = ""
) -> str:
    """The part of a kernel, or of an operator if `kernel` is "".

    operators: names of the operators around its launch, innermost first. gradient_of: names of the
    forward operators whose gradient it computes. phase: the range in PHASES of its launch, "" if
    unknown.
    """
    name, lower = kernel.lower(), [operator.lower() for operator in operators]
    if MESSAGE_KERNELS.search(name):
        return MESSAGES
    # a prefetched batch may be copied in any phase
    if phase == DATA or name.startswith("memcpy htod"):
        return DATA
    if phase == OPTIMIZER or any(OPTIMIZER_NAMES.search(each) for each in (name, *lower)):
        return OPTIMIZER
    if ATTENTION_KERNELS.search(name):
        return BACKWARD if BACKWARD_KERNELS.search(name) else FORWARD
    calls = [each for each in lower if ATTENTION_OPS.search(each)]
    if calls:
        # a call that is recomputed in the backward pass still counts as forward; only its range
        # shows that
        in_backward = phase == "backward" and ATTENTION not in calls
        backward = in_backward or any("backward" in each for each in calls)
        return BACKWARD if backward else FORWARD
    if any(ATTENTION_OPS.search(each.lower()) for each in gradient_of):
        return BACKWARD
    if PRODUCT_KERNELS.search(name) or any(PRODUCT_OPS.search(each) for each in lower):
        return PRODUCTS
    if any(LOSS_NAMES.search(each) for each in (name, *lower)):
        return LOSS
    return ELEMENTWISE if phase in ("forward", "backward") else OTHER


@dataclass
class Trace:
    """The host's ranges by thread, the kernels, and where each was launched."""

    # by thread, sorted by start
    ranges: dict[Any, list[Range]] = field(default_factory=dict)
    # correlation: thread and time
    launches: dict[int, tuple[Any, float]] = field(default_factory=dict)
    # name, start, stop, correlation
    kernels: list[tuple[str, float, float, int | None]] = field(default_factory=list)
    # sequence number: the forward operator
    made_by: dict[int, Range] = field(default_factory=dict)

    @classmethod
    def read(cls, events: Iterable[Row]) -> "Trace":
        """Read the traceEvents of a Chrome trace."""
        trace = cls()
        for event in events:
            if event.get("ph") != "X" or "dur" not in event:
                continue
            name, thread, start = event["name"], event["tid"], float(event["ts"])
            stop, arguments = start + float(event["dur"]), event.get("args", {})
            correlation = arguments.get("correlation")
            match event.get("cat"):
                case "cpu_op" | "user_annotation":
                    found = Range(name, start, stop, thread, arguments.get("Sequence number"))
                    trace.ranges.setdefault(thread, []).append(found)
                case "cuda_runtime" | "cuda_driver":
                    trace.launches.setdefault(correlation, (thread, start))
                case "kernel" | "gpu_memcpy" | "gpu_memset":
                    trace.kernels.append((name, start, stop, correlation))
        for ranges in trace.ranges.values():
            ranges.sort(key=lambda each: (each.start, -each.stop))
            _nest(ranges)
        trace.kernels.sort(key=lambda kernel: kernel[1])
        # of the forward operators with the same number, the last to start has made the node of the
        # graph
        for each in trace.by_start():
            if each.sequence is not None and each.sequence >= 0 and not _in_backward(each):
                trace.made_by[each.sequence] = each
        return trace

    def by_start(self) -> list[Range]:
        """The ranges of all threads, sorted by start."""
        return sorted(chain(*self.ranges.values()), key=lambda each: each.start)

    def steps(self) -> list[Range]:
        return [each for each in self.by_start() if each.name == STEP]

    def at(self, thread: Any, time: float) -> Range | None:
        """The innermost range of a thread at a time."""
        ranges = self.ranges.get(thread, [])
        index = bisect_right(ranges, time, key=lambda each: each.start) - 1
        each = ranges[index] if index >= 0 else None
        while each is not None and each.stop < time:
            each = each.parent
        return each

    def part(self, kernel: str, where: Range | None, phase: str) -> str:
        operators = where.stack() if where else []
        sequence = next((each.sequence for each in operators if _is_gradient(each)), None)
        made_by = self.made_by.get(sequence)
        gradient_of = [each.name for each in made_by.stack()] if made_by else []
        names = [each.name for each in operators]
        return part_of(kernel, names, gradient_of, phase)


def _nest(ranges: list[Range]) -> None:
    """Find each range's parent and add the range's time to the parent's `inside`. `ranges` are of
    one thread, sorted by start, longer ones first.
    """
    open_ranges: list[Range] = []
    for each in ranges:
        while open_ranges and open_ranges[-1].stop <= each.start:
            open_ranges.pop()
        if open_ranges:
            each.parent = open_ranges[-1]
            each.parent.inside += min(each.stop, each.parent.stop) - each.start
        open_ranges.append(each)


def _is_gradient(each: Range) -> bool:
    return each.sequence is not None and each.name.startswith("autograd::engine::evaluate_function")


def _in_backward(each: Range) -> bool:
    return any(outer.name.startswith("autograd::engine::") for outer in each.stack())


def parts_of_steps(events: Iterable[Row]) -> tuple[list[dict[str, float]], bool]:
    """Milliseconds of each part in each step, and whether they are GPU time. The last step of a
    GPU's trace only marks the end of the one before.

    Raises ValueError for a trace without steps.
    """
    trace = Trace.read(events)
    steps = trace.steps()
    if not steps:
        raise ValueError(f"the trace has no range named {STEP!r}")
    return (_of_gpu(trace, steps), True) if trace.kernels else (_of_cpu(trace, steps), False)


def _of_cpu(trace: Trace, steps: list[Range]) -> list[dict[str, float]]:
    found = []
    for step in steps:
        parts = dict.fromkeys(PARTS, 0.0)
        for each in trace.ranges[step.thread]:
            if step.start <= each.start < step.stop:
                part = _part_on_cpu(trace, each, _phase(each.stack()))
                parts[part] += (each.stop - each.start - each.inside) / 1000
        found.append(parts)
    return found


def _part_on_cpu(trace: Trace, each: Range, phase: str) -> str:
    if phase in (DATA, OPTIMIZER):
        return phase
    # the own time of ranges, autograd nodes and Python functions is Python's
    is_operator = re.match(r"(?!autograd::)\w+::|graph_\d+_cpp_", each.name)
    return trace.part("", each, phase) if is_operator else GAPS


def _phase(stack: Iterable[Range]) -> str:
    return next((each.name for each in stack if each.name in PHASES), "")


def _of_gpu(trace: Trace, steps: list[Range]) -> list[dict[str, float]]:
    main = steps[0].thread
    starts = [step.start for step in steps]
    # a step begins on the GPU with the first kernel that its forward pass launches. A copy of its
    # batch may overlap with the step before. Kernels launched before the recording belong to no
    # recorded step
    begins: dict[int, float] = {}
    placed, messages = [], []
    for name, start, stop, correlation in trace.kernels:
        thread, launched = trace.launches.get(correlation, (None, start))
        # in the backward pass the main thread waits while another thread launches
        at_main = trace.at(main, launched)
        phase = _phase(at_main.stack()) if at_main else ""
        number = bisect_right(starts, launched) - 1
        part = trace.part(name, trace.at(thread, launched), phase)
        if number >= 0 and phase == "forward" and part != DATA and correlation in trace.launches:
            begins[number] = min(start, begins.get(number, start))
        if part == MESSAGES:
            messages.append((start, stop))
        else:
            placed.append((start, stop, part))
    bounds = [begin for _, begin in sorted(begins.items())]
    found = [dict.fromkeys(PARTS, 0.0) for _ in bounds[1:]]

    def add(part: str, start: float, stop: float) -> None:
        """Add a span to `part`, split at the beginnings of steps. Time outside all steps is
        dropped.
        """
        for number, (begin, end) in enumerate(pairwise(bounds)):
            found[number][part] += max(0.0, min(stop, end) - max(start, begin)) / 1000

    waits = [(each.start, each.stop) for each in trace.ranges[main] if each.name == DATA]
    # reasons why the GPU is idle; the first that fits counts
    idle = [(MESSAGES, messages), (DATA, waits), (GAPS, [(-inf, inf)])]

    def add_idle(start: float, stop: float, reasons: list[tuple[str, list]]) -> None:
        (part, spans), *others = reasons
        for begin, end in spans:
            begin, end = max(start, begin), min(stop, end)
            if begin < end:
                if others:
                    add_idle(start, begin, others)
                add(part, begin, end)
                start = end
        if start < stop and others:
            add_idle(start, stop, others)

    cursor = bounds[0] if bounds else 0.0
    for start, stop, part in placed:
        if start > cursor:
            add_idle(cursor, start, idle)
            cursor = start
        add(part, max(start, cursor), max(stop, cursor))
        cursor = max(cursor, stop)
    return found
