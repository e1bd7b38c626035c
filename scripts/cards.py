"""Figures of GPUs from data sheets and NVIDIA's programming guide."""

from typing import NamedTuple

# device memory bandwidth in bytes/s, from the data sheets of PEAK_FLOPS, for data_sheet() too
PEAK_BANDWIDTH = {
    "B200": 8.0e12,
    "GH200": 4.0e12,  # with HBM3
    "H200": 4.8e12,
    "H100 NVL": 3.9e12,
    "H100 PCIe": 2.0e12,
    "H100": 3.35e12,  # SXM
    "A100 80GB PCIe": 1.935e12,
    "A100.*80GB": 2.039e12,  # SXM
    "A100": 1.555e12,
    "L40S": 0.864e12,
    "L4": 0.300e12,
    "RTX 4090": 1.008e12,
    "RTX 3090": 0.936e12,
}
# The most shared memory that one block can request, in KiB, by compute capability. Source: the CUDA
# C++ programming guide.
SHARED_KIB = {
    "7.0": 96,  # V100
    "7.5": 64,  # T4
    "8.0": 163,  # A100
    "8.6": 99,  # RTX 30
    "8.9": 99,  # RTX 40, L4, L40S
    "9.0": 227,  # H100, H200
    "10.0": 227,  # B200
    "12.0": 99,  # RTX 50
}
REGISTER_BYTES = 256 * 1024  # per multiprocessor, for every capability above
BLOCK_DEFAULT_KIB = 48  # shared memory of a block that requests no more
# GPU memory that the driver and the libraries take before the first tensor, measured on an H200
CONTEXT_GIB = 0.7


class Card(NamedTuple):
    data_sheet: str  # its key in PEAK_FLOPS and PEAK_BANDWIDTH
    capability: str  # compute capability


GPUS = {
    "b200": Card("B200", "10.0"),
    "h200": Card("H200", "9.0"),
    "h100": Card("H100", "9.0"),
    "a100-80": Card("A100.*80GB", "8.0"),
    "a100-40": Card("A100", "8.0"),
    "l40s": Card("L40S", "8.9"),
    "l4": Card("L4", "8.9"),
    "rtx4090": Card("RTX 4090", "8.9"),
    "rtx3090": Card("RTX 3090", "8.6"),
}
# GiB that a card has, by the GB it is sold with
CARD_SIZES = {
    8: 8.0,
    12: 12.0,
    16: 16.0,
    24: 24.0,
    40: 39.5,
    48: 48.0,
    80: 79.3,
    141: 139.8,
}
