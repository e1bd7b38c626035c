"""The script that shows how memory grows with the length, and does not import this project."""

import re

from conformance.backend_under_test import Subject
from conformance.cases import SHORT
from conformance.dialects import Target
from conformance.memory_growth import LINEAR, lengths_on, shape_of
from conformance.script_of_call import Call, mask_lines, tensors_of, values_of

# by property
FIGURES = {"saved bytes": "saved", "largest tensor": "largest"}
SAVED = '''\
def saved(n):
    """Bytes that a forward pass of n tokens keeps for the backward pass."""
    {inputs}
    sizes = {{}}

    def keep(x):
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        {call}
    return sum(sizes.values())'''
LARGEST = '''\
class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {{}}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


def largest(n):
    """Bytes of the largest tensor in a forward and backward pass of n tokens."""
    {inputs}
    with Largest() as mode:
        {call}
        found = {output}
        found.backward(torch.ones_like(found))
    return mode.bytes'''

PEAK = '''\
def peak(n):
    """Peak bytes of a forward and backward pass of n tokens, above q, k and v."""
    {inputs}
    for _ in range(2):  # the first pass compiles, and allocates lasting workspaces
        q.grad = k.grad = v.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        {call}
        found = {output}
        found.backward(torch.ones_like(found))
        del result, found
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before'''


def write_memory(target: Target, subject: Subject, figure: str) -> str:
    """The script. Its last two lines print the exponent and compare it."""
    device, lengths, dialect = subject.device, lengths_on(subject.device), target.dialect
    few, many = lengths[0], lengths[-1]
    # a number that nothing else in the text is, and that becomes the variable n
    length = subject.rounded(104729)
    case = subject.case(length, **shape_of(subject.head_dims))
    masked = dialect.needs_mask(length, length, causal=True, given={})
    values = values_of(Call(case, "out", subject.dtype), None)
    call_text = dialect.call(tensors_of(dialect, views=False), values, masked=masked)
    lines = [*mask_lines(Call(case, "out", subject.dtype), dialect, None, call_text)]
    if "seen" not in call_text:
        lines.remove(next(line for line in lines if line.startswith("seen = ")))
    lines.append(f"result = {call_text.replace('function', target.function, 1)}")
    template = SAVED if figure == "saved" else LARGEST
    if figure == "largest" and device != "cpu":
        figure, template = "peak", PEAK  # compiled kernels hide their tensors
    shape = f"{case.batch}, {case.num_heads}, n, {case.head_dim}"
    body = template.format(
        inputs=f"q, k, v = (torch.randn({shape}, dtype={subject.dtype}, device={device!r})"
        ".requires_grad_() for _ in range(3))",
        call="\n        ".join(lines),
        output=dialect.output(str(case.batch)),
    )
    body = re.sub(rf"\b{length}\b", "n", body)
    flex = "create_block_mask" in call_text
    head = f'"""{figure} bytes of N tokens, {SHORT[subject.dtype]}: written by attn-conform."""'
    imports = [
        "from math import log\n",
        "import torch",
        *["from torch.nn.attention.flex_attention import create_block_mask"] * flex,
        *["import torch.utils._python_dispatch"] * (template is LARGEST),
        target.imports,
    ]
    default = [f"torch.set_default_device({device!r})"] * (device != "cpu")
    tail = [
        f"few, many = {figure}({few}), {figure}({many})",
        f"exponent = log(many / few) / log({many} / {few})",
        f'print(f"{figure} bytes: {{few}} at N = {few}, {{many}} at N = {many}: '
        f'N ** {{exponent:.2f}}, allowed N ** {LINEAR}")',
        f"assert exponent <= {LINEAR}",
    ]
    return "\n".join([head, "", *imports, *default, "", "", body, "", "", *tail, ""])
