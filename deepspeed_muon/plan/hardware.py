"""Published figures of GPUs, from which times are predicted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU in the server in which it is usually sold. All bandwidths are bytes per second.

    Attributes:
        name: Key of the table.
        flops: Dense bf16 / fp16 tensor operations per second, without sparsity.
        memory_bandwidth: Of the device memory.
        memory: Bytes of device memory.
        node_bandwidth: NVLink, one direction, per GPU.
        network_bandwidth: Network, one direction, per GPU.
        source: Documents with the figures.
    """

    name: str
    flops: float
    memory_bandwidth: float
    memory: float
    node_bandwidth: float
    network_bandwidth: float
    source: str


# The datasheets give NVLink as the sum of both directions; the table has half of it. The network is that of the DGX
# server with eight GPUs: eight ports of 400 Gb/s (DGX H100, H200, B200) or 200 Gb/s (DGX A100).
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            "a100", 312e12, 2.039e12, 80e9, 300e9, 25e9, "NVIDIA A100 80GB SXM datasheet; DGX A100 datasheet"
        ),
        Gpu("h100", 989e12, 3.35e12, 80e9, 450e9, 50e9, "NVIDIA H100 SXM datasheet; DGX H100 datasheet"),
        Gpu("h200", 989e12, 4.8e12, 141e9, 450e9, 50e9, "NVIDIA H200 SXM datasheet; DGX H200 datasheet"),
        Gpu("b200", 2250e12, 8.0e12, 180e9, 900e9, 50e9, "NVIDIA DGX B200 datasheet"),
    )
}
